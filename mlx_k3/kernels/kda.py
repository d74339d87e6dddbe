"""Kimi Delta Attention over any number of tokens: the one call the model makes.

Owns the choice between plain MLX ops and two kernels: one over all chunks at once, one along them.
Knows nothing of the layer around it; ``kda_decode.py`` has the whole layer for a few tokens.
"""

from functools import cache

import mlx.core as mx

from .build import Kernel
from .gradient import differentiable
from .kda_reference import kda_chunked, kda_step

CHUNK = 32  # tokens solved together by the kernels
WIDTHS = (32, 64, 128)  # of a head, in the kernels
SCRATCH_BYTES = 2 << 30  # bound on what passes between the kernels; longer inputs go in segments

_CHUNKS = Kernel(
    "kda_prefill_chunks",
    inputs=("q", "k", "v", "log_decay", "beta", "mask"),
    outputs=("q_start", "k_end", "w_k", "w_v", "qk", "decay"),
    needs=("mma",),
)
_STATES = Kernel(
    "kda_prefill_states",
    inputs=("beta", "q_start", "k_end", "w_k", "w_v", "qk", "decay", "state_in"),
    outputs=("o", "state_out"),
    needs=("mma",),
)


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

    Differentiable by way of the plain ops. In the kernels, products are of bfloat16 if q, k and v
    all are, with float32 sums, else in float32's precision.

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
    B, _, H, K = q.shape
    V = v.shape[-1]
    if not (_CHUNKS.runs and _STATES.runs) or K != V or K not in WIDTHS:
        return plain_kda(q, k, v, log_decay, beta, state, mask)
    if state is None:
        state = mx.zeros((B, H, V, K), mx.float32)

    def by_kernels(*inputs):
        return _by_kernels(*inputs, mask)

    def by_plain_ops(*inputs):
        return plain_kda(*inputs, mask)

    return differentiable(by_kernels, by_plain_ops)(q, k, v, log_decay, beta, state)


def plain_kda(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """:func:`kda` in plain MLX ops."""
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


def _by_kernels(q, k, v, log_decay, beta, state, mask):
    """:func:`kda` by the kernels, as many tokens at once as the scratch bound allows."""
    B, T, H, D = q.shape
    exact = any(x.dtype != mx.bfloat16 for x in (q, k, v))
    dtype = mx.float32 if exact else mx.bfloat16
    token_bytes = B * H * (4 * D + CHUNK) * dtype.size
    most = max(SCRATCH_BYTES // token_bytes // CHUNK, 1) * CHUNK
    state = state.astype(mx.float32)
    if most >= T:
        return _segment(q, k, v, log_decay, beta, state, mask, dtype)
    outputs = []
    for first in range(0, T, most):
        part = slice(first, first + most)
        inputs = (x[:, part] for x in (q, k, v, log_decay, beta))
        output, state = _segment(*inputs, state, None if mask is None else mask[:, part], dtype)
        outputs.append(output)
    return mx.concatenate(outputs, axis=1), state


def _segment(q, k, v, log_decay, beta, state, mask, dtype):
    """:func:`kda` by the kernels, with ``dtype`` between them."""
    B, T, H, D = q.shape
    N = -(-T // CHUNK)
    tall, wide, square = (D, CHUNK), (CHUNK, D), (CHUNK, CHUNK)
    chunks = _CHUNKS(
        *(q, k, v, log_decay, beta, no_mask() if mask is None else mask),
        outputs=[
            *(((B, H, N, *shape), dtype) for shape in (wide, tall, wide, tall, square)),
            ((B, H, N, D), mx.float32),
        ],
        groups=(N, H, B),
        threads=D,
        template={"W": dtype, "D": D, "HEADS": H, "MASKED": mask is not None},
    )
    threads = min(2 * D, 128)
    return _STATES(
        *(beta, *chunks, state),
        outputs=[((B, T, H, D), mx.float32), (state.shape, mx.float32)],
        groups=(2 * D // threads, H, B),
        threads=threads,
        template={"W": dtype, "D": D, "HEADS": H},
    )


@cache
def no_mask() -> mx.array:
    """What stands in a mask's place in a kernel that does not read it."""
    return mx.array([True])
