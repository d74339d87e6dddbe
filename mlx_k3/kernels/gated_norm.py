"""The gated norm between KDA's delta rule and its output projection."""

from functools import cache

import mlx.core as mx

from .build import Kernel
from .gradient import differentiable
from .host import sigmoid

THREADS = 256

_KERNEL = Kernel("gated_rms_norm", inputs=("x", "gate", "weight"), outputs=("y",))


def gated_rms_norm(x: mx.array, gate: mx.array, weight: mx.array, eps: float) -> mx.array:
    """``x / rms(x) * weight * sigmoid(gate)`` over the last axis, in float32.

    Args:
        x: ``[..., D]``.
        gate: ``[..., D]``, before its sigmoid.
        weight: ``[D]``.
        eps: added to the mean square.

    Returns:
        ``[..., D]`` in ``gate``'s dtype.
    """
    if not _KERNEL.runs or x.shape[-1] % 32:
        return gated_rms_norm_reference(x, gate, weight, eps)
    return _by_kernel(eps)(x, gate, weight)


def gated_rms_norm_reference(x: mx.array, gate: mx.array, weight: mx.array, eps: float) -> mx.array:
    """:func:`gated_rms_norm` in plain MLX ops."""
    normed = mx.fast.rms_norm(x.astype(mx.float32), weight.astype(mx.float32), eps)
    return (normed * sigmoid(gate.astype(mx.float32))).astype(gate.dtype)


@cache
def _by_kernel(eps: float):
    def kernel(x: mx.array, gate: mx.array, weight: mx.array) -> mx.array:
        D = x.shape[-1]
        rows = x.size // D
        (y,) = _KERNEL(
            x.reshape(rows, D),
            gate.reshape(rows, D),
            weight,
            outputs=[((rows, D), gate.dtype)],
            groups=(-(-rows * 32 // THREADS), 1, 1),
            threads=THREADS,
            template={"T": gate.dtype, "D": D},
            constants={"EPS": eps},
        )
        return y.reshape(gate.shape)

    def reference(x: mx.array, gate: mx.array, weight: mx.array) -> mx.array:
        return gated_rms_norm_reference(x, gate, weight, eps)

    return differentiable(kernel, reference)
