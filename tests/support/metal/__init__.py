"""The host runner: Metal kernels compiled and executed without a GPU. See docs/kernels.md."""

from .execute import KernelFault, available, run

__all__ = ["KernelFault", "available", "run"]
