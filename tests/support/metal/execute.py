"""Metal kernels executed on the CPU, compiled by clang and watched by its sanitizers' hooks.

Owns compilation, its cache and the memory a kernel runs in; ``host/`` is the machine. Knows nothing
of any kernel.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_k3.kernels.build import Launch

from .text import MetalText, construct_vectors, metal_text

HOST = Path(__file__).parent / "host"
COMPILER = "clang++"
SANITIZE = [
    "-fsanitize=thread,bounds,alignment,shift,integer-divide-by-zero",
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
    "-ftrivial-auto-var-init=pattern",
]
PLACES = {
    "simdgroup_index_in_threadgroup": "place->simd",
    "thread_index_in_simdgroup": "place->lane",
    "thread_index_in_threadgroup": "place->index",
    "thread_position_in_grid": "uint3{place->grid[0], place->grid[1], place->grid[2]}",
    "thread_position_in_threadgroup": "uint3{place->index, 0, 0}",
    "threadgroup_position_in_grid": "uint3{place->group[0], place->group[1], place->group[2]}",
    "threadgroups_per_grid": "uint3{place->groups[0], place->groups[1], place->groups[2]}",
    "threads_per_threadgroup": "uint3{place->threads, 1, 1}",
}


# An array of the group as it is declared: its type, name and dimensions.
SHARED_ARRAY = r"(?:alignas\(16\)\s+)?\bthreadgroup\s+([\w:<>, ]*?\w>?)\s+(\w+)((?:\s*\[[^\]]*\])+)"


class KernelFault(AssertionError):
    """What a kernel did wrong, with its name."""


def available() -> bool:
    """Whether kernels can be executed here: on Linux, where the compiler is installed."""
    return sys.platform == "linux" and shutil.which(COMPILER) is not None


def run(launch: Launch, orders: int = 2) -> list[mx.array]:
    """Execute the Metal form of ``launch`` and return its outputs.

    It runs ``orders`` times, its threads in their order first and in random orders then; the
    outputs must be equal bit for bit.

    Raises:
        KernelFault: the kernel, its name first, touched memory that is not its own or not yet
            written, or without a barrier between, or its threads wait for each other in vain.
    """
    text = metal_text(launch)
    machine, kernel = _machine(), _kernel(text)
    first = _execute(machine, kernel, text, launch, 0)
    for order in range(1, orders):
        again = _execute(machine, kernel, text, launch, order)
        for name, one, other in zip(launch.kernel.outputs, first, again, strict=True):
            if one.tobytes() != other.tobytes():
                raise KernelFault(f"{text.kernel}: {name} depends on the order of the threads")
    return [
        mx.array(data).view(dtype).reshape(shape)
        for data, (shape, dtype) in zip(first, launch.outputs, strict=True)
    ]


def _execute(
    machine: ctypes.PyDLL, kernel: ctypes.CDLL, text: MetalText, launch: Launch, order: int
) -> list[np.ndarray]:
    """One run; the outputs' bytes."""
    names = [p.name.encode() for p in text.parameters]
    bases = (ctypes.c_void_p * len(names))()
    contents = _contents(launch, text)
    try:
        for i, (parameter, (data, item_bytes)) in enumerate(
            zip(text.parameters, contents, strict=True)
        ):
            base = ctypes.c_void_p()
            _check(
                text,
                machine.host_place(
                    *(i, names[i], int(parameter.output), ctypes.c_size_t(data.size)),
                    *(ctypes.c_size_t(item_bytes), ctypes.byref(base)),
                ),
            )
            bases[i] = base
            if not parameter.output:
                ctypes.memmove(base, data.ctypes.data, data.size)
        entry = ctypes.cast(kernel.host_entry, ctypes.c_void_p)
        groups = (ctypes.c_uint * 3)(*launch.groups)
        _check(text, machine.host_run(entry, bases, groups, launch.threads, order))
        return [
            np.frombuffer(ctypes.string_at(bases[i], data.size), np.uint8)
            for i, (parameter, (data, _)) in enumerate(zip(text.parameters, contents, strict=True))
            if parameter.output
        ]
    finally:
        machine.host_forget()


def _check(text: MetalText, message: bytes) -> None:
    if message:
        raise KernelFault(f"{text.kernel}: {message.decode()}")


def _contents(launch: Launch, text: MetalText) -> list[tuple[np.ndarray, int]]:
    """Each parameter's bytes and the size of its items."""
    arrays = dict(zip(launch.kernel.inputs, launch.inputs, strict=True))
    sizes = {
        name: (int(np.prod(shape)) * dtype.size, dtype.size)
        for name, (shape, dtype) in zip(launch.kernel.outputs, launch.outputs, strict=True)
    }
    result = []
    for parameter in text.parameters:
        if parameter.output:
            count_bytes, item_bytes = sizes[parameter.name]
            result.append((np.empty(count_bytes, np.uint8), item_bytes))
        elif parameter.name in arrays:
            x = mx.contiguous(arrays[parameter.name])
            result.append((np.array(x.reshape(-1).view(mx.uint8)), x.dtype.size))
        else:
            about, _, what = parameter.name.rpartition("_")
            values = _about(arrays[about], what)
            result.append((values.view(np.uint8), values.itemsize))
    return result


def _about(x: mx.array, what: str) -> np.ndarray:
    if what == "ndim":
        return np.array([x.ndim], np.int32)
    if what == "shape":
        return np.array(x.shape, np.int32)
    strides = [int(np.prod(x.shape[i + 1 :])) for i in range(x.ndim)]
    return np.array(strides, np.int64)


@cache
def _machine() -> ctypes.PyDLL:
    machine = ctypes.PyDLL(str(_runtime()))
    for name in ("host_place", "host_run"):
        getattr(machine, name).restype = ctypes.c_char_p
    return machine


@cache
def _runtime() -> Path:
    sources = [HOST / name for name in ("machine.cpp", "memory.cpp", "hooks.cpp")]
    return _built("the machine", ["-O2", "-shared", "-fPIC", *sources], ".so")


@cache
def _kernel(text: MetalText) -> ctypes.CDLL:
    source = f'#include "metal_execute.h"\n{_executable(text.text)}\n{_entry(text)}'
    compile_ = ["-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", *SANITIZE, "-I", HOST]
    compiled = _built(text.kernel, [*compile_, "-x", "c++", "-c", "-"], ".o", source)
    wrap = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]
    runtime = _runtime()
    link = ["-shared", compiled, runtime, f"-Wl,-rpath,{runtime.parent}", *wrap, "-lm"]
    return ctypes.CDLL(str(_built(text.kernel, link, ".so")))


def _built(what: str, command: list[str | Path], suffix: str, source: str = "") -> Path:
    """The file that the compiler makes of ``source``; a temporary folder keeps what was made."""
    folder = Path(tempfile.gettempdir()) / f"mlx-k3-metal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    words = [str(word) for word in command]
    digest = hashlib.sha256("\0".join([*words, source, _host_text()]).encode()).hexdigest()
    path = folder / (digest[:24] + suffix)
    if not path.exists():
        half = path.with_suffix(f".{os.getpid()}")
        made = [COMPILER, *words, "-o", str(half)]
        shown = subprocess.run(made, input=source, capture_output=True, text=True)
        if shown.returncode:
            raise KernelFault(f"{what}: does not compile:\n{shown.stderr}")
        half.replace(path)
    return path


@cache
def _host_text() -> str:
    """All that a compiled file depends on besides its own source."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    return version.stdout + "".join(path.read_text() for path in sorted(HOST.iterdir()))


def _executable(text: str) -> str:
    """The text with arrays of the group as objects of the machine."""
    return re.sub(SHARED_ARRAY, r"THREADGROUP_ARRAY(\2, \3, \1)", construct_vectors(text))


def _entry(text: MetalText) -> str:
    """The function that the machine calls for every thread."""
    arguments = []
    for i, p in enumerate(text.parameters):
        const, dereference = "" if p.output else "const ", "*" if p.scalar else ""
        arguments.append(f"{dereference}static_cast<{const}{p.type}*>(buffers[{i}])")
    arguments += [PLACES[name] for name in text.builtins]
    return (
        'extern "C" void host_entry(void* const* buffers, const host::Place* place) {\n'
        f"  {text.function}({', '.join(arguments)});\n}}\n"
    )
