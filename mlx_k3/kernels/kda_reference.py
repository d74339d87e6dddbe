"""Kimi Delta Attention in plain MLX ops: the gate, one step, and a chunked form for prefill.

The recurrence, per head, with ``a = exp(log_decay)`` per key channel (Kimi Linear report, section
"Kimi Delta Attention"; all of it in float32)::

    S <- a * S                          decay each key channel
    u  = beta * (v - S k)               error against the decayed state
    S <- S + u k^T
    o  = S q

The chunked form computes the same with matrix products over chunks of tokens. It only ever
multiplies decays, which are at most 1: nothing overflows and nothing cancels, however strong the
gate.
"""

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from .host import exp, sigmoid

CHUNK = 64  # tokens solved together, a power of two
SCRATCH_BYTES = 256 << 20  # bound on the temporaries; longer inputs go in segments


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
    A_log = A_log[:, None]
    if mx.default_device() != mx.cpu:
        return _fused_gate(lower_bound)(a, A_log, dt_bias)
    return _gate(a, A_log, dt_bias, lower_bound, sigmoid)


def _gate(a, A_log, dt_bias, lower_bound, sigmoid):
    rate = mx.exp(A_log.astype(mx.float32))
    x = a.astype(mx.float32) + dt_bias.astype(mx.float32)
    if lower_bound is None:
        return -rate * nn.softplus(x)
    return lower_bound * sigmoid(rate * x)


@cache
def _fused_gate(lower_bound: float | None):
    """:func:`_gate` in one pass, which compiles: a prompt's gates go through memory once."""

    def gate(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
        return _gate(a, A_log, dt_bias, lower_bound, mx.sigmoid)

    return mx.compile(gate, shapeless=True)


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
    tokens = max(SCRATCH_BYTES // (64 * B * H * K) // CHUNK, 1) * CHUNK
    outputs = []
    for t in range(0, T, tokens):
        parts = (x[:, t : t + tokens] for x in (q, k, v, log_decay, beta))
        output, state = _segment(*parts, state)
        outputs.append(output)
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)), state


def _segment(q, k, v, log_decay, beta, state):
    """:func:`kda_chunked` for as many tokens as the scratch bound allows."""
    T, V = q.shape[1], v.shape[-1]
    chunk = min(CHUNK, 1 << (T - 1).bit_length())
    q, k, v, decay, beta = (_chunks(x, chunk) for x in (q, k, v, log_decay, beta[..., None]))
    qk, inverse, since, until = _decayed_products(q, k, exp(decay), beta)

    # u = w_v - w_k S: the chunk's updates, given the state S at its start.
    w = inverse @ (beta * mx.concatenate([v, k * since], axis=-1))
    w_v, w_k = w[..., :V], w[..., V:]
    q_start, k_end = q * since, (k * until).swapaxes(-1, -2)
    chunk_decay = since[..., -1, :, None]

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


def _decayed_products(q, k, decay, beta):
    """What the tokens of a chunk are to each other; ``[..., C, K]`` each, beta ``[..., C, 1]``.

    With ``a_ij`` the decay from token j to token i, per channel, this returns

    - ``qk_ij = sum_c q_ic k_jc a_ijc`` for j <= i, else 0
    - ``(I + A)^-1`` for ``A_ij = beta_i sum_c k_ic k_jc a_ijc`` for j < i, else 0
    - the decay since the chunk's start, up to and with each token
    - the decay after each token until the chunk's end

    Blocks of 1, 2, 4, ... tokens are joined two by two. A pair across the seam decays from its
    left token until the seam and from there to its right token; the inverse of a joined block is
    a forward substitution. (Summing powers of ``A`` instead cancels at real gates.)
    """
    q, k, beta, since = (x[..., None, :] for x in (q, k, beta, decay))
    until = mx.ones_like(since)
    qk = (q * k).sum(-1, keepdims=True)
    inverse = mx.ones_like(qk)
    while since.shape[-3] > 1:
        (_, q_r), (k_l, k_r), (_, beta_r) = _halves(q), _halves(k), _halves(beta)
        (since_l, since_r), (until_l, until_r) = _halves(since), _halves(until)
        (qk_l, qk_r), (inverse_l, inverse_r) = _halves(qk), _halves(inverse)
        across = (k_l * until_l).swapaxes(-1, -2)
        qk = _corner(qk_l, (q_r * since_r) @ across, qk_r)
        seam = inverse_r @ ((beta_r * k_r * since_r) @ across) @ inverse_l
        inverse = _corner(inverse_l, -seam, inverse_r)
        until = mx.concatenate([until_l * since_r[..., -1:, :], until_r], axis=-2)
        since = mx.concatenate([since_l, since_r * since_l[..., -1:, :]], axis=-2)
        q, k, beta = (x.reshape(*since.shape[:-1], -1) for x in (q, k, beta))
    return (x.squeeze(-3) for x in (qk, inverse, since, until))


def _halves(x: mx.array) -> tuple[mx.array, mx.array]:
    """The left and the right block of every two to be joined."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _corner(left: mx.array, below: mx.array, right: mx.array) -> mx.array:
    """The lower triangular ``[[left, 0], [below, right]]``."""
    top = mx.concatenate([left, mx.zeros_like(left)], axis=-1)
    return mx.concatenate([top, mx.concatenate([below, right], axis=-1)], axis=-2)
