"""The Metal text that MLX makes of a launch, as its ``metal_kernel`` writes it.

Knows MLX's rules: which space an input lies in, which builtins and shapes become parameters. Knows
nothing of how the text is compiled.
"""

import re
from typing import NamedTuple

import mlx.core as mx

from mlx_k3.kernels.build import SMALL, SOURCE, Kernel, Launch

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

BUILTINS = {
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_threadgroup": "uint3",
}


class Parameter(NamedTuple):
    """A pointer or reference of the kernel: ``const device float* name``."""

    name: str
    space: str
    type: str
    scalar: bool = False
    output: bool = False

    def declaration(self, index: int) -> str:
        const, sign = "" if self.output else "const ", "&" if self.scalar else "*"
        return f"  {const}{self.space} {self.type}{sign} {self.name} [[buffer({index})]]"


class MetalText(NamedTuple):
    """A kernel's whole text and what its caller must know."""

    kernel: str
    function: str  # with its template arguments
    text: str
    parameters: tuple[Parameter, ...]
    builtins: tuple[str, ...]


def metal_text(launch: Launch) -> MetalText:
    """The text for ``launch``. Lines are numbered as in the files of ``source/``."""
    given = launch.text("metal")
    parameters = _inputs(launch, given.body) + [
        Parameter(name, "device", TYPES[dtype], output=True)
        for name, (_, dtype) in zip(launch.kernel.outputs, launch.outputs, strict=True)
    ]
    builtins = [name for name in BUILTINS if name in given.body]
    signature = [p.declaration(i) for i, p in enumerate(parameters)]
    signature += [f"  {BUILTINS[name]} {name} [[{name}]]" for name in builtins]
    name = f"custom_kernel_{given.name}"
    text = _numbered(launch.kernel, given.header)
    if launch.template:
        text += f"template <{', '.join(_template_parameter(*x) for x in launch.template)}>\n"
    text += f"[[kernel]] void {name}(\n" + ",\n".join(signature) + ") {\n"
    text += _numbered(launch.kernel, given.body) + "\n}\n"
    arguments = ", ".join(_template_argument(value) for _, value in launch.template)
    function = f"{name}<{arguments}>" if launch.template else name
    return MetalText(launch.kernel.name, function, text, tuple(parameters), tuple(builtins))


def _inputs(launch: Launch, body: str) -> list[Parameter]:
    parameters = []
    for name, x in zip(launch.kernel.inputs, launch.inputs, strict=True):
        space = "constant" if x.size < SMALL else "device"
        parameters.append(Parameter(name, space, TYPES[x.dtype], scalar=x.ndim == 0))
        if x.ndim > 0 and f"{name}_shape" in body:
            parameters.append(Parameter(f"{name}_shape", "constant", "int"))
        if x.ndim > 0 and f"{name}_strides" in body:
            parameters.append(Parameter(f"{name}_strides", "constant", "int64_t"))
        if x.ndim > 0 and f"{name}_ndim" in body:
            parameters.append(Parameter(f"{name}_ndim", "constant", "int", scalar=True))
    return parameters


def _template_parameter(name: str, value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return f"typename {name}"
    return f"{'bool' if isinstance(value, bool) else 'int'} {name}"


def _template_argument(value: int | bool | mx.Dtype) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))


def _numbered(kernel: Kernel, text: str) -> str:
    """``text`` with the file and line before what comes from the kernel's file or the dialect."""
    helpers, body = kernel.parts()
    own = f"{kernel.name}.h"
    places = [(helpers, own, 1), (body, own, helpers.count("\n") + 2)]
    for part in ("prelude", *kernel.needs):
        file = f"{part}.metal.h"
        places.append(((SOURCE / file).read_text(encoding="utf-8"), file, 1))
    for part, file, line in places:
        text = text.replace(part, f'#line {line} "{file}"\n{part}')
    return text


def construct_vectors(text: str) -> str:
    """``float4(x)`` as ``construct<float4>(x)``: C++ has no constructors for vector types."""
    text = re.sub(r"\b((?:float|half|u?int|u?short|u?char)[234])\(", r"construct<\1>(", text)
    return re.sub(r"\b(vec<[^<>]*>)\(", r"construct<\1>(", text)
