"""Kimi Delta Attention over any number of tokens: the one call the model makes."""

import mlx.core as mx

from .kda_reference import kda_chunked, kda_step


def kda(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Gated delta rule with per-channel decay, continued from ``state``.

    Args:
        q, k: ``[B, T, H, K]``, normalised; ``q`` carries the scale.
        v: ``[B, T, H, V]``.
        log_decay: ``[B, T, H, K]``, at most 0.
        beta: ``[B, T, H]``.
        state: ``[B, H, V, K]`` float32, or None for zeros.
        mask: ``[B, T]`` bool; tokens where it is False leave the state as it is, whatever the
            other inputs hold there (padding).

    Returns:
        The outputs ``[B, T, H, V]`` and the state ``[B, H, V, K]``, both float32. Outputs at
        masked tokens are unspecified but finite.
    """
    B, T, H, K = q.shape
    q, k, v, log_decay, beta = (x.astype(mx.float32) for x in (q, k, v, log_decay, beta))
    if state is None:
        state = mx.zeros((B, H, v.shape[-1], K), mx.float32)
    if mask is not None:
        keep = mask[..., None, None]
        q, k, v, log_decay = (mx.where(keep, x, 0) for x in (q, k, v, log_decay))
        beta = mx.where(mask[..., None], beta, 0)
    if T > 1:
        return kda_chunked(q, k, v, log_decay, beta, state)
    output, state = kda_step(*(x.squeeze(1) for x in (q, k, v, log_decay, beta)), state)
    return output[:, None], state
