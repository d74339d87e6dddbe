"""Attention of patches, all to all, without the whole table of scores in memory."""

import mlx.core as mx

from ..kernels import backend
from .running_softmax import RunningSoftmax, Softmax

TILE_BYTES = 128 << 20  # of scores, where no kernel does without them
CPU_TILE_BYTES = 8 << 20  # what a processor's caches hold, more or less
QUERY_BLOCK = 256
LEAST_TILE = 64  # keys

# Widths of heads for which MLX's kernels hold no scores.
_KERNEL_WIDTHS = (64, 80, 128)


def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """``softmax(q k^T / sqrt(D)) v`` for ``q [B, H, T, D]`` and ``k``, ``v [B, H, N, D]``."""
    scale = q.shape[-1] ** -0.5
    if _has_kernel(q):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
    T = q.shape[2]
    blocks = (q[:, :, i : i + QUERY_BLOCK] * scale for i in range(0, T, QUERY_BLOCK))
    return mx.concatenate([_in_tiles(block, k, v) for block in blocks], axis=2)


def _has_kernel(q: mx.array) -> bool:
    # Training asks for plain operations, whose gradients are the same each time.
    is_plain = backend() == "reference" or mx.default_device() == mx.cpu
    if is_plain or q.shape[-1] not in _KERNEL_WIDTHS:
        return False
    return mx.metal.is_available() or q.dtype != mx.float32


def _in_tiles(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    (B, H, T, _), N = q.shape, k.shape[2]
    most_bytes = CPU_TILE_BYTES if mx.default_device() == mx.cpu else TILE_BYTES
    tile = max(most_bytes // (B * H * T * 4) // LEAST_TILE, 1) * LEAST_TILE
    total = Softmax() if tile >= N else RunningSoftmax()
    for start in range(0, N, tile):
        keys, values = (x[:, :, start : start + tile] for x in (k, v))
        weights = total.weights((q @ keys.swapaxes(-1, -2)).astype(mx.float32))
        total.add(weights.astype(q.dtype) @ values)
        if tile < N:
            mx.eval(total.arrays)
    return total.result().astype(q.dtype)
