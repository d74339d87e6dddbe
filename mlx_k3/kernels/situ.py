"""SiTU-GLU, the activation of K3's MLPs and experts."""

from functools import cache

import mlx.core as mx
import numpy as np

from .host import on_host


def situ(
    gate: mx.array,
    up: mx.array,
    beta: float,
    linear_beta: float | None,
    *,
    use_host: bool | None = None,
) -> mx.array:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``, in float32.

    ``gate`` and ``up`` have the same shape; without a ``linear_beta``, ``up`` is used as it is.
    The result has ``up``'s dtype. ``use_host`` is :func:`~.host.on_host`'s.
    """
    f = _situ(beta, linear_beta)
    y = f(gate.astype(mx.float32), up.astype(mx.float32), use_host=use_host)
    return y.astype(up.dtype)


@cache
def _situ(beta: float, linear_beta: float | None):
    def reference(gate: mx.array, up: mx.array) -> mx.array:
        if linear_beta is not None:
            up = linear_beta * mx.tanh(up / linear_beta)
        return beta * mx.tanh(gate / beta) * mx.sigmoid(gate) * up

    def host(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        y = np.tanh(gate / beta)
        with np.errstate(over="ignore"):  # to infinity, which is right: sigmoid is then 0
            denominator = np.exp(-gate)
        denominator += 1
        y /= denominator
        if linear_beta is None:
            y *= beta
            y *= up
        else:
            y *= beta * linear_beta
            y *= np.tanh(up / linear_beta)
        return y

    return on_host(reference, host)
