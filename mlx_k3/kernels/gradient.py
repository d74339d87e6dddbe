"""Gradients of kernels: those of the plain ops that compute the same."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def differentiable(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, differentiated as ``reference``; both take and return the same arrays."""

    def vjp(primals, cotangents, _):
        if isinstance(primals, mx.array):
            primals, cotangents = [primals], cotangents
        several = isinstance(cotangents, (list, tuple))
        cotangents = list(cotangents) if several else [cotangents]
        return mx.vjp(reference, list(primals), cotangents)[1]

    function = mx.custom_function(kernel)
    function.vjp(vjp)
    return function
