"""Kimi Delta Attention in plain MLX ops: the gate, one step, and a chunked form for prefill.

The recurrence, per head, with ``a = exp(log_decay)`` per key channel (Kimi Linear report, section
"Kimi Delta Attention"; all of it in float32)::

    S <- a * S                          decay each key channel
    u  = beta * (v - S k)               error against the decayed state
    S <- S + u k^T
    o  = S q

The chunked form computes the same with matrix products. Its exponents are differences of
cumulative log decays that are never positive, so nothing overflows however strong the gate.
"""

import mlx.core as mx
import mlx.nn as nn

CHUNK = 64  # tokens solved together
BLOCK = 16  # tokens whose pairwise decays are formed explicitly; CHUNK is a multiple of it
SCRATCH_BYTES = 128 << 20  # bound on those pairwise decays; longer inputs go in segments


def l2norm(x: mx.array, eps: float = 1e-6) -> mx.array:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, in float32."""
    x = x.astype(mx.float32)
    return x * mx.rsqrt((x * x).sum(-1, keepdims=True) + eps)


def kda_log_decay(
    a: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None
) -> mx.array:
    """The gate: log of the decay of every key channel, at most 0.

    With a ``lower_bound`` (K3: -5) it is ``lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``,
    without one (Kimi Linear) ``-exp(A_log) * softplus(a + dt_bias)``.

    Args:
        a: ``[..., H, K]``, the gate projection.
        A_log: ``[H]``, one value a head.
        dt_bias: ``[H, K]``.
        lower_bound: strongest log decay, or None.

    Returns:
        ``[..., H, K]`` float32.
    """
    rate = mx.exp(A_log.astype(mx.float32))[:, None]
    x = a.astype(mx.float32) + dt_bias.astype(mx.float32)
    if lower_bound is None:
        return -rate * nn.softplus(x)
    return lower_bound * mx.sigmoid(rate * x)


def kda_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """One step of the gated delta rule.

    q, k, log_decay ``[B,H,K]``; v ``[B,H,V]``; beta ``[B,H]``; state ``[B,H,V,K]`` float32.
    Returns the output ``[B,H,V]`` and the new state.
    """
    state = state * mx.exp(log_decay)[..., None, :]
    error = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state = state + error[..., None] * k[..., None, :]
    return (state @ q[..., None])[..., 0], state


def kda_chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over a whole sequence of any length.

    q, k, log_decay ``[B,T,H,K]``; v ``[B,T,H,V]``; beta ``[B,T,H]``; state ``[B,H,V,K]``, all
    float32. Returns the outputs ``[B,T,H,V]`` and the state after the last token.
    """
    B, T, H, K = q.shape
    tokens = max(SCRATCH_BYTES // (4 * B * H * BLOCK * K) // CHUNK, 1) * CHUNK
    outputs = []
    for t in range(0, T, tokens):
        parts = (x[:, t : t + tokens] for x in (q, k, v, log_decay, beta))
        output, state = _segment(*parts, state)
        outputs.append(output)
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)), state


def _segment(q, k, v, log_decay, beta, state):
    """:func:`kda_chunked` for as many tokens as the scratch bound allows."""
    T, V = q.shape[1], v.shape[-1]
    chunk = min(CHUNK, -(-T // BLOCK) * BLOCK)
    q, k, v, log_decay, beta = (_chunks(x, chunk) for x in (q, k, v, log_decay, beta[..., None]))

    qk, kk, to_end = _decayed_products(q, k, log_decay)
    decay = mx.exp(mx.cumsum(log_decay, axis=-2))
    # u = w_v - w_k S: the chunk's updates, given the state S at its start.
    w = _solve_unit_lower(beta * kk, mx.concatenate([beta * v, beta * k * decay], axis=-1))
    w_v, w_k = w[..., :V], w[..., V:]
    q_start = q * decay
    k_end = (k * mx.exp(to_end)).swapaxes(-1, -2)
    chunk_decay = decay[..., -1, :, None]

    state = state.swapaxes(-1, -2)
    outputs = []
    for n in range(q.shape[2]):
        u = w_v[:, :, n] - w_k[:, :, n] @ state
        outputs.append(q_start[:, :, n] @ state + qk[:, :, n] @ u)
        state = chunk_decay[:, :, n] * state + k_end[:, :, n] @ u
    output = mx.concatenate(outputs, axis=2)[:, :, :T]
    return output.swapaxes(1, 2), state.swapaxes(-1, -2)


def _chunks(x: mx.array, chunk: int) -> mx.array:
    """``[B,T,H,D]`` -> ``[B,H,N,chunk,D]``, zero-padded: a zero token changes nothing."""
    B, T, H, D = x.shape
    x = mx.pad(x, ((0, 0), (0, -T % chunk), (0, 0), (0, 0)))
    return x.reshape(B, -1, chunk, H, D).transpose(0, 3, 1, 2, 4)


def _decayed_products(q, k, log_decay):
    """``sum_c q_ic k_jc a_ijc`` for j <= i, the same with k_i for j < i, and log a to the end.

    ``a_ij`` is the decay from token j to token i: the product of the steps in between. Pairs
    within a block of 16 tokens form it explicitly; a pair from an earlier block meets at the end
    of the block before i's. Every exponent is a sum of steps, never a difference of sums, so
    none is positive and none cancels.
    """
    C = q.shape[-2]
    rows_qk, rows_kk = [], []
    lower = mx.tril(mx.ones((BLOCK, BLOCK)))
    strict = mx.tril(mx.ones((BLOCK, BLOCK)), -1)
    to_end = None  # from each token before this block to the block's start
    for start in range(0, C, BLOCK):
        block = slice(start, start + BLOCK)
        q_i, k_i, steps = q[..., block, :], k[..., block, :], log_decay[..., block, :]
        pair = mx.cumsum(steps[..., :, None, :] * strict[..., None], axis=-3)
        pair = mx.exp(pair) * k_i[..., None, :, :]
        qk = ((pair @ q_i[..., None])[..., 0] * lower,)
        kk = ((pair @ k_i[..., None])[..., 0] * strict,)
        since = mx.cumsum(steps, axis=-2)
        after = mx.cumsum(steps, axis=-2, reverse=True, inclusive=False)
        if to_end is not None:
            left = mx.concatenate([q_i, k_i], axis=-2) * mx.exp(mx.concatenate([since] * 2, -2))
            left = left @ (k[..., :start, :] * mx.exp(to_end)).swapaxes(-1, -2)
            qk, kk = (left[..., :BLOCK, :], *qk), (left[..., BLOCK:, :], *kk)
            after = mx.concatenate([to_end + since[..., -1:, :], after], axis=-2)
        to_end = after
        if rest := C - start - BLOCK:
            zeros = mx.zeros((*q.shape[:-2], BLOCK, rest))
            qk, kk = (*qk, zeros), (*kk, zeros)
        rows_qk.append(mx.concatenate(qk, axis=-1))
        rows_kk.append(mx.concatenate(kk, axis=-1))
    return mx.concatenate(rows_qk, axis=-2), mx.concatenate(rows_kk, axis=-2), to_end


def _solve_unit_lower(a: mx.array, b: mx.array) -> mx.array:
    """``x`` with ``(I + a) x = b``; ``a [..., C, C]`` strictly lower triangular, ``b [..., C, D]``.

    Forward substitution by blocks. (Summing powers of ``a`` instead cancels at real gates.)
    """
    C = a.shape[-1]
    solved = None
    for start in range(0, C, BLOCK):
        block = slice(start, start + BLOCK)
        rest = b[..., block, :]
        if start:
            rest = rest - a[..., block, :start] @ solved
        x = _inverse_unit_lower(a[..., block, block]) @ rest
        solved = mx.concatenate([solved, x], axis=-2) if start else x
    return solved


def _inverse_unit_lower(a: mx.array) -> mx.array:
    """``(I + a)^-1`` for a strictly lower triangular ``a [..., n, n]``, row by row."""
    n = a.shape[-1]
    eye = mx.broadcast_to(mx.eye(n), a.shape)
    rows = eye[..., :1, :]
    for i in range(1, n):
        row = eye[..., i : i + 1, :] - (a[..., i, :i, None] * rows).sum(-2, keepdims=True)
        rows = mx.concatenate([rows, row], axis=-2)
    return rows
