"""KDA for training: the chunked form with few, large operations, for gates with a lower bound.

Within a chunk the decay from token j to token i is a quotient of two exponentials, taken from the
chunk's middle. With K3's bound of -5 a token they lie between e^-80 and e^80, which float32 holds;
without a bound they would overflow, and :func:`mlx_k3.kernels.kda` has to be used.
"""

import mlx.core as mx

CHUNK = 32
STRONGEST = -5.0  # log decay a token for which CHUNK is right


def bounded_kda(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, None]:
    """The outputs of :func:`mlx_k3.kernels.kda` for whole sequences, which begin empty.

    q, k, log_decay ``[B,T,H,K]``; v ``[B,T,H,V]``; beta ``[B,T,H]``; returns ``[B,T,H,V]`` float32.
    ``log_decay`` must not be below ``STRONGEST``. There is no final state.
    """
    T, V = q.shape[1], v.shape[-1]
    q, k, v, log_decay, beta = (_chunks(x) for x in (q, k, v, log_decay, beta[..., None]))
    since = mx.cumsum(log_decay, axis=-2)
    end = since[..., -1:, :]
    middle = since[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    decayed, grown = mx.exp(since - middle), mx.exp(middle - since)
    right = (k * grown).swapaxes(-1, -2)
    qk = mx.tril((q * decayed) @ right)
    inverse = _inverse(mx.tril(((beta * k) * decayed) @ right, -1))

    # u = w_v - w_k S: the chunk's updates, given the state S [K, V] at its start.
    from_start = mx.exp(since)
    w = inverse @ (beta * mx.concatenate([v, k * from_start], axis=-1))
    w_v, w_k = w[..., :V], w[..., V:]
    k_end = (k * mx.exp(end - since)).swapaxes(-1, -2)
    decay = mx.exp(end).swapaxes(-1, -2)
    states, updates = [mx.zeros((*q.shape[:2], q.shape[-1], V))], [w_v[:, :, 0]]
    for n in range(1, q.shape[2]):
        S = mx.addmm(decay[:, :, n - 1] * states[-1], k_end[:, :, n - 1], updates[-1])
        states.append(S)
        updates.append(mx.addmm(w_v[:, :, n], w_k[:, :, n], S, alpha=-1))
    output = (q * from_start) @ mx.stack(states, axis=2) + qk @ mx.stack(updates, axis=2)
    return output.flatten(2, 3)[:, :, :T].swapaxes(1, 2), None


def _chunks(x: mx.array) -> mx.array:
    """``[B,T,H,D]`` -> ``[B,H,N,CHUNK,D]`` float32, zero-padded."""
    B, T, H, D = x.shape
    x = mx.pad(x.astype(mx.float32), ((0, 0), (0, -T % CHUNK), (0, 0), (0, 0)))
    return mx.contiguous(x.reshape(B, -1, CHUNK, H, D).transpose(0, 3, 1, 2, 4))


@mx.custom_function
def _inverse(A: mx.array) -> mx.array:
    """``(I + A)^-1`` for strictly lower triangular ``A [..., CHUNK, CHUNK]``.

    Diagonal blocks of 1, 2, 4, ... are joined two by two, which is a forward substitution.
    """
    row = mx.arange(CHUNK)[:, None]
    inverse = mx.broadcast_to(mx.eye(CHUNK), A.shape)
    size = 1
    while size < CHUNK:
        left, upper = row.T // size, row // size
        seam = A * ((upper == left + 1) & (left % 2 == 0))
        inverse = inverse - inverse @ seam @ inverse
        size *= 2
    return inverse


@_inverse.vjp
def _inverse_vjp(primal, cotangent, inverse):
    transposed = inverse.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)
