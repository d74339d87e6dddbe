"""Attention Residuals: a softmax over earlier residual sums, per token."""

import mlx.core as mx


def inverse_rms(v: mx.array, eps: float) -> mx.array:
    """``1 / sqrt(mean(v^2) + eps)`` over the last axis, float32."""
    v = v.astype(mx.float32)
    return mx.rsqrt((v * v).mean(-1) + eps)


def attention_residual(
    blocks: mx.array, blocks_inverse_rms: mx.array, current: mx.array, weight: mx.array, eps: float
) -> mx.array:
    """Mix the finished blocks and the running sum (Attention Residuals report, block form).

    Each candidate ``v`` scores ``rms_norm(v) . weight``; the softmax of the scores weighs the
    candidates as they are, un-normalised. All in float32.

    Args:
        blocks: earlier residual sums ``[M, ..., D]``.
        blocks_inverse_rms: :func:`inverse_rms` of them, ``[M, ...]``; they are mixed many times.
        current: the running sum ``[..., D]``, the last candidate.
        weight: ``[D]`` float32, the norm's gain times the projection.
        eps: of the norm.

    Returns:
        ``[..., D]`` in ``current``'s dtype.
    """
    dtype = current.dtype
    blocks, current = blocks.astype(mx.float32), current.astype(mx.float32)
    scores = mx.concatenate(
        [
            (blocks @ weight) * blocks_inverse_rms,
            ((current @ weight) * inverse_rms(current, eps))[None],
        ]
    )
    shares = mx.softmax(scores, axis=0)[..., None]
    return ((shares[:-1] * blocks).sum(0) + shares[-1] * current).astype(dtype)
