"""The host runner: Metal kernels checked, compiled and executed without a GPU.

See docs/kernels.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest

from mlx_k3.kernels import build

from .check import check
from .execute import KernelFault, available, run


@contextmanager
def on_host() -> Iterator[list[build.Launch]]:
    """Have the operations take the path of Metal in a block, each kernel checked and executed.

    Gives the list of launches, which grows.
    """
    launches = []

    def launch(launch: build.Launch) -> list[mx.array]:
        launches.append(launch)
        check(launch)
        return run(launch)

    before = build.LAUNCHERS["metal"]
    build.LAUNCHERS["metal"] = launch
    try:
        with build.using("metal"):
            yield launches
    finally:
        build.LAUNCHERS["metal"] = before


@contextmanager
def with_kernels() -> Iterator[None]:
    """Have the operations run their kernels in a block: on the GPU, or here where there is none.

    Skips the test where there is neither a GPU nor the compiler for :func:`on_host`.
    """
    if build.backend() != "reference":
        yield
    elif available():
        with on_host():
            yield
    else:
        pytest.skip("no GPU and no clang++ here")


__all__ = ["KernelFault", "available", "check", "on_host", "run", "with_kernels"]
