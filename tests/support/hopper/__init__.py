"""Kernels for Hopper executed on the CPU: their CUDA text, with the hardware played by machine.h.

Kernels that need nothing of Hopper's own go to the runner of Metal texts.
"""

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_k3.kernels import build
from mlx_k3.kernels.build import SOURCE, Launch

from .. import metal
from ..metal.execute import COMPILER

HERE = Path(__file__).parent
TYPES = {mx.float32: "float", mx.bfloat16: "__nv_bfloat16", mx.uint32: "uint"}
HARDWARE = r"\basm\b|__cvta|__sync|extern __shared__"  # what machine.h has in its place


@contextmanager
def playing(late_products: bool, late_copies: bool) -> Iterator[list[Launch]]:
    """Have the operations take the path of CUDA in a block; the launches, as they come."""
    launches = []

    def launch(launch: Launch) -> list[mx.array]:
        launches.append(launch)
        return _run(launch, (late_products, late_copies))

    before = build.LAUNCHERS["cuda"]
    build.LAUNCHERS["cuda"] = launch
    try:
        with build.using("cuda"):
            yield launches
    finally:
        build.LAUNCHERS["cuda"] = before


def _run(launch: Launch, late: tuple[bool, bool]) -> list[mx.array]:
    if "hopper" not in launch.kernel.needs:
        with build.using("metal"):
            return metal.run(launch)
    inputs = [np.array(mx.contiguous(x).reshape(-1).view(mx.uint8)) for x in launch.inputs]
    outputs = [np.zeros(int(np.prod(shape)) * d.size, np.uint8) for shape, d in launch.outputs]
    shapes = [np.array(x.shape, np.int32) for x in launch.inputs]
    given = [*inputs, *outputs, *shapes]
    pointers = (ctypes.c_void_p * len(given))(*(x.ctypes.data for x in given))
    _compiled(_text(launch)).entry(pointers, launch.groups[0], *late)
    return [
        mx.array(data).view(dtype).reshape(shape)
        for data, (shape, dtype) in zip(outputs, launch.outputs, strict=True)
    ]


def _text(launch: Launch) -> str:
    """The kernel as a function of pointers, after what of hopper.cuda.h is no hardware."""
    helpers, body = launch.kernel.parts()
    paragraphs = (SOURCE / "hopper.cuda.h").read_text(encoding="utf-8").split("\n\n")
    plain = [part for part in paragraphs if not re.search(HARDWARE + "|PRODUCT|typedef", part)]
    types = [("const ", x.dtype) for x in launch.inputs] + [("", d) for _, d in launch.outputs]
    names = [*launch.kernel.inputs, *launch.kernel.outputs]
    high = next(line for part in plain for line in part.split("\n") if "define FACTOR_HIGH" in line)
    lines = [high, '#include "machine.h"', *plain, f"#define GROUP_SIZE {launch.threads}", helpers]
    lines.append('extern "C" void entry(void** given, uint groups, bool products, bool copies) {')
    for i, (name, (const, dtype)) in enumerate(zip(names, types, strict=True)):
        lines.append(f"{const}{TYPES[dtype]}* {name} = ({const}{TYPES[dtype]}*)given[{i}];")
    for i, name in enumerate(launch.kernel.inputs):
        if f"{name}_shape" in body:
            lines.append(f"const int* {name}_shape = (const int*)given[{len(names) + i}];")
    lines += [f"constexpr int {name} = {value};" for name, value in launch.template]
    lines += ["machine::run(groups, products, copies, [=] {", body, "});", "}"]
    return "\n".join(lines)


@cache
def _compiled(text: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        command = [COMPILER, "-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-pthread"]
        command += ["-I", str(HERE), "-x", "c++", "-", "-o", str(library)]
        shown = subprocess.run(command, input=text, capture_output=True, text=True)
        if shown.returncode:
            raise metal.KernelFault(shown.stderr)
        return ctypes.CDLL(str(library))
