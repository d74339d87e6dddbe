"""The short causal depthwise convolution in front of KDA's queries, keys and values."""

import mlx.core as mx

from .host import silu


def short_conv(
    x: mx.array,
    weight: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """``silu(causal depthwise convolution of x)``, continued from ``state``.

    Args:
        x: ``[B, T, C]``, the convolution's inputs.
        weight: ``[C, W]``; the last tap multiplies the current token.
        state: ``[B, W - 1, C]``, the inputs before ``x``, oldest first; None for zeros.
        mask: ``[B, T]`` bool; inputs where it is False count as zero (left padding).
        lengths: ``[B]``, how many tokens of each row are real when rows are right-padded; the
            returned state then ends at the last real one.

    Returns:
        ``[B, T, C]`` float32 and the new state ``[B, W - 1, C]`` in ``x``'s dtype.
    """
    B, T, C = x.shape
    W = weight.shape[-1]
    if mask is not None:
        x = mx.where(mask[..., None], x, 0)
    if state is None:
        state = mx.zeros((B, W - 1, C), x.dtype)
    inputs = mx.concatenate([state, x], axis=1)
    taps = weight.astype(mx.float32)
    if T == 1:
        y = (inputs * taps.T).sum(1, keepdims=True)
    else:
        y = sum(inputs[:, w : w + T] * taps[:, w] for w in range(W))
    if lengths is None:
        # A copy: a view would keep the whole prefill's inputs alive.
        new_state = mx.contiguous(inputs[:, T:])
    else:
        last = mx.clip(lengths, 0, T)[:, None] + mx.arange(W - 1)
        new_state = mx.take_along_axis(inputs, last[..., None], axis=1)
    return silu(y), new_state
