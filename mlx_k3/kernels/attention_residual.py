"""Attention Residuals: a softmax over earlier residual sums, per token."""

import mlx.core as mx


def attention_residual(candidates: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Mix residual sums (Attention Residuals report, block form).

    Each candidate ``v`` scores ``rms_norm(v) . weight``; the softmax of the scores weighs the
    candidates as they are, un-normalised. All in float32.

    Args:
        candidates: ``[..., M, D]``, the finished blocks and, last, the running sum.
        weight: ``[D]`` float32, the norm's gain times the projection.
        eps: of the norm.

    Returns:
        ``[..., D]`` in ``candidates``' dtype.
    """
    v = candidates.astype(mx.float32)
    square = (v * v).mean(-1, keepdims=True)
    scores = (v @ weight[:, None]) * mx.rsqrt(square + eps)
    shares = mx.softmax(scores, axis=-2).swapaxes(-1, -2)
    return (shares @ v).squeeze(-2).astype(candidates.dtype)
