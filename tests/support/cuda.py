"""The CUDA text that MLX makes of a launch, compiled where there is a compiler, never run.

Knows how MLX's ``cuda_kernel`` writes the function and what its header brings along.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from mlx_k3.kernels import build
from mlx_k3.kernels.build import Launch

from .metal import KernelFault
from .metal.text import TYPES

COMPILER = "nvcc"
NAMES = TYPES | {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
# What MLX's own header gives, as far as it meets what a kernel may use.
HEADER = """
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cooperative_groups.h>
#define inf (__int_as_float(0x7f800000))
namespace mlx::core::cu {
template <typename T>
struct Array {
  T items[10];
  __device__ const T& operator[](int i) const { return items[i]; }
};
using Shape = Array<int32_t>;
using Strides = Array<int64_t>;
}
"""


def available() -> bool:
    """Whether the compiler is there."""
    return shutil.which(COMPILER) is not None


def cuda_text(launch: Launch, header: str = HEADER) -> str:
    """The text for ``launch``; unlike Metal's, template arguments are names in the body."""
    given = launch.text("cuda")
    parameters = []
    for name, x in zip(launch.kernel.inputs, launch.inputs, strict=True):
        parameters.append(f"    const {NAMES[x.dtype]}* {name}")
        about = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
        parameters += [
            f"    const __grid_constant__ {type_} {name}_{what}"
            for what, type_ in about.items()
            if f"{name}_{what}" in given.body
        ]
    parameters += [
        f"    {NAMES[dtype]}* {name}"
        for name, (_, dtype) in zip(launch.kernel.outputs, launch.outputs, strict=True)
    ]
    text = f"{header}{given.header}namespace mlx::core::cu {{\n\n"
    text += "namespace cg = cooperative_groups;\n\n"
    text += f"__global__ void {given.name}(\n" + ",\n".join(parameters) + ") {\n"
    for name, value in launch.template:
        if isinstance(value, mx.Dtype):
            text += f"  using {name} = {NAMES[value]};\n"
        else:
            kind = "bool" if isinstance(value, bool) else "int"
            text += f"  constexpr {kind} {name} = {str(value).lower()};\n"
    return text + given.body + "\n}\n\n}  // namespace mlx::core::cu\n"


@contextmanager
def compiling(*options: str) -> Iterator[list[str]]:
    """Compile the CUDA text of every kernel that runs in a block; what the assembler says."""
    told = []

    def launch(launch: Launch) -> list[mx.array]:
        told.append(compile_cuda(launch, *options))
        return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs]

    before = build.LAUNCHERS["cuda"]
    build.LAUNCHERS["cuda"] = launch
    try:
        with build.using("cuda"):
            yield told
    finally:
        build.LAUNCHERS["cuda"] = before


def compile_cuda(launch: Launch, *options: str, header: str = HEADER) -> str:
    """Compile ``launch`` for the H200's architecture; what the assembler says of its resources.

    Raises:
        KernelFault: the compiler's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{launch.kernel.name}.cu"
        source.write_text(cuda_text(launch, header))
        command = [COMPILER, "-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a"]
        command += ["-Xptxas", "-v", *options, str(source), "-o", str(source.with_suffix(".cubin"))]
        shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        raise KernelFault(f"{launch.kernel.name}: {shown.stderr}")
    return shown.stderr
