"""Gradients of kernels: those of the plain ops that compute the same.

For a gradient an operation becomes several nodes of MLX's graph, whose evaluation takes longer than
that of the kernel's own. So whoever takes none says so.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import mlx.core as mx

_here = threading.local()


class without_gradients:
    """In a block, on this thread: kernels have no gradients, if ``so``, and are quicker to run."""

    def __init__(self, so: bool = True):
        self._so = so

    def __enter__(self) -> None:
        self._before = getattr(_here, "off", False)
        _here.off = self._so

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _here.off = self._before


def differentiable(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, differentiated as ``reference``; both take and return the same arrays."""

    def vjp(primals, cotangents, _):
        if isinstance(primals, mx.array):
            primals, cotangents = [primals], cotangents
        several = isinstance(cotangents, (list, tuple))
        cotangents = list(cotangents) if several else [cotangents]
        return mx.vjp(reference, list(primals), cotangents)[1]

    return with_vjp(kernel, vjp)


def with_vjp(kernel: Callable[..., Any], vjp: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with ``vjp``, as :func:`mx.custom_function` takes it."""
    function = mx.custom_function(kernel)
    function.vjp(vjp)

    def call(*arrays: mx.array) -> Any:
        return kernel(*arrays) if getattr(_here, "off", False) else function(*arrays)

    return call
