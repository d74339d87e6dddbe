"""SiTU-GLU, the activation of K3's MLPs and experts."""

from functools import cache

import mlx.core as mx
import numpy as np

from .build import Kernel
from .gradient import differentiable
from .host import on_host

PER_THREAD = 4
THREADS = 256

_KERNEL = Kernel("situ", inputs=("gate", "up"), outputs=("y",))


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
    if _KERNEL.runs:
        return _by_kernel(beta, linear_beta)(gate, up)
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


@cache
def _by_kernel(beta: float, linear_beta: float | None):
    def kernel(gate: mx.array, up: mx.array) -> mx.array:
        (y,) = _KERNEL(
            gate,
            up,
            outputs=[(up.shape, up.dtype)],
            groups=(-(-up.size // (THREADS * PER_THREAD)), 1, 1),
            threads=THREADS,
            template={"T": up.dtype, "PER": PER_THREAD, "LINEAR": linear_beta is not None},
            constants={"BETA": beta, "LINEAR_BETA": linear_beta or 1.0},
        )
        return y

    def reference(gate: mx.array, up: mx.array) -> mx.array:
        y = _situ(beta, linear_beta)(gate.astype(mx.float32), up.astype(mx.float32))
        return y.astype(up.dtype)

    return differentiable(kernel, reference)
