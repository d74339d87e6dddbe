"""Attention over latents, a tile of keys at a time, in memory that does not grow with the text.

Two ways give the same numbers. *Absorbed*: the up-projections of keys and values move to the
queries and to the output, and all heads look at the latents themselves. *Expanded*: every head's
keys and values are made for a tile, serve all queries, and are dropped. The first costs more for
a pair of query and key, the second costs once for every key; the cheaper one is taken. A running
softmax, its maximum and its sums in float32, joins the tiles.
"""

import mlx.core as mx
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from ..kernels.mla_decode import mla_decode, mla_decode_pays
from ..kernels.quantized import expanding_pays
from .latent_cache import Latents
from .layers import dense_weight
from .running_softmax import RunningSoftmax, Softmax

TILE_BYTES = 64 << 20  # of what is made for a tile of keys
CPU_TILE_BYTES = 16 << 20  # what a processor's caches hold, more or less
PENDING_BYTES = 128 << 20  # of tiles that wait for their evaluation
LEAST_TILE = 64  # keys
QUERY_BLOCK = 256
SCORE_BYTES = 3 * 4  # of a score on its way through the softmax: three float32 arrays
LOWEST = -1e30  # added to the score of a key out of sight; finite, for rows that see no key

HeadLinear = MultiLinear | QuantizedMultiLinear


def latent_attention(
    q: mx.array, latents: Latents, embed_q: HeadLinear, unembed_out: HeadLinear
) -> mx.array:
    """Causal attention of the last ``T`` of ``S`` tokens, for inference.

    Args:
        q: ``[B, H, T, nope + shared]``, scaled.
        latents: of all ``S`` tokens.
        embed_q: with weights ``[H, rank, nope]``.
        unembed_out: with weights ``[H, v, rank]``.

    Returns:
        ``[B, H, T, v]`` in the queries' dtype.
    """
    B, H, T, width = q.shape
    S, (rank, shared) = latents.length, latents.widths
    plain = latents.bits is None and latents.starts is None
    if plain and mla_decode_pays(q, latents.blocks, rank):
        q_latent = _multiply(embed_q, q[..., : width - shared])
        return _multiply(unembed_out, mla_decode(q, q_latent, latents.blocks, S))
    expands = expanding_is_cheaper(T, S, rank, width - shared, unembed_out.weight.shape[1])
    way = (_Expanded if expands else _Absorbed)(q, latents, embed_q, unembed_out)
    blocks = [slice(i, min(i + QUERY_BLOCK, T)) for i in range(0, T, QUERY_BLOCK)]
    key_bytes = way.key_bytes + B * H * blocks[0].stop * SCORE_BYTES
    most_bytes = CPU_TILE_BYTES if mx.default_device() == mx.cpu else TILE_BYTES
    tile = max(most_bytes // key_bytes // LEAST_TILE, 1) * LEAST_TILE
    in_one = len(latents.blocks) == 1 and tile >= S
    sums = [Softmax() if in_one else RunningSoftmax() for _ in blocks]
    queries = [way.queries(rows) for rows in blocks]
    pending = 0
    for start, latent, key in latents.tiles(tile):
        keys, values = way.tile(latent, key)
        for rows, query, total in zip(blocks, queries, sums, strict=True):
            place = S - T + rows.start  # of the block's first query
            seen = min(S - T + rows.stop - start, latent.shape[2])
            if seen <= 0:
                continue
            scores = way.scores(query, keys, seen)
            weights = total.weights(hide(scores, place, start, latents.starts))
            total.add(way.weigh(weights.astype(q.dtype), values, seen))
            pending += key_bytes * latent.shape[2]
            if pending > PENDING_BYTES:
                mx.eval(total.arrays)
                pending = 0
    y = mx.concatenate([total.result() for total in sums], axis=2)
    return way.output(y.astype(q.dtype))


def expanding_is_cheaper(T: int, S: int, rank: int, nope: int, v: int) -> bool:
    """Whether :class:`_Expanded` multiplies less than :class:`_Absorbed`.

    For every pair and head ``nope + v`` numbers meet instead of ``2 rank``; for that, every key
    and not every query goes through ``rank * (nope + v)`` weights.
    """
    pairs = T * S - T * (T - 1) // 2
    return pairs * (2 * rank - nope - v) > (S - T) * rank * (nope + v)


class _Absorbed:
    """All heads look at the latents themselves.

    ``key_bytes`` is what a tile's keys and values take, by key, in both classes.
    """

    def __init__(self, q, latents, embed_q, unembed_out):
        rank, shared = latents.widths
        q_nope, self._q_rope = mx.split(q, [q.shape[-1] - shared], axis=-1)
        self._q, self._unembed_out = _multiply(embed_q, q_nope), unembed_out
        unpacked = 0 if latents.bits is None else 2 * (rank + shared)
        self.key_bytes = len(q) * unpacked * q.dtype.size

    def queries(self, rows):
        # The heads become rows of one product: else the latents would be read once for each.
        return _together(self._q[:, :, rows]), _together(self._q_rope[:, :, rows])

    def tile(self, latent, key):
        return (latent, key), latent

    def scores(self, query, keys, seen):
        """``[B, H, rows, seen]``."""
        (q, q_rope), (latent, key) = query, keys
        y = q @ latent[:, :, :seen].swapaxes(-1, -2)
        y = y + q_rope @ key[:, :, :seen].swapaxes(-1, -2)
        B, H = self._q.shape[:2]
        return y.reshape(B, H, -1, seen)

    def weigh(self, weights, latent, seen):
        """``[B, H, rows, rank]``."""
        y = _together(weights) @ latent[:, :, :seen]
        return y.reshape(*weights.shape[:3], -1)

    def output(self, y):
        return _multiply(self._unembed_out, y)


class _Expanded:
    """Every head has its own keys and values, made from a tile's latents."""

    def __init__(self, q, latents, embed_q, unembed_out):
        self._q = q
        self._up_k = dense_weight(embed_q, q.dtype)
        self._up_v = dense_weight(unembed_out, q.dtype).swapaxes(-1, -2)
        B, H, _, width = q.shape
        numbers = 2 * sum(latents.widths) + H * (2 * width + self._up_v.shape[-1])
        self.key_bytes = B * numbers * q.dtype.size

    def queries(self, rows):
        return mx.contiguous(self._q[:, :, rows])

    def tile(self, latent, key):
        k = latent @ self._up_k
        key = mx.broadcast_to(key, (*k.shape[:3], key.shape[-1]))
        return mx.concatenate([k, key], axis=-1), latent @ self._up_v

    def scores(self, query, keys, seen):
        """``[B, H, rows, seen]``."""
        return query @ keys[:, :, :seen].swapaxes(-1, -2)

    def weigh(self, weights, values, seen):
        """``[B, H, rows, v]``."""
        return weights @ values[:, :, :seen]

    def output(self, y):
        return y


def hide(scores: mx.array, query: int, key: int, starts: mx.array | None) -> mx.array:
    """Scores ``[B, H, T, N]`` of queries from place ``query`` and keys from place ``key`` on, in
    float32, with keys lowered that are ahead of a query or before a text's start."""
    T, N = scores.shape[2:]
    scores = scores.astype(mx.float32)
    places = mx.arange(key, key + N)
    if key + N - 1 > query:
        ahead = places > mx.arange(query, query + T)[:, None]
        scores = scores + ahead.astype(mx.float32) * LOWEST
    if starts is not None:
        before = places < starts[:, None]
        scores = scores + before[:, None, None].astype(mx.float32) * LOWEST
    return scores


def _together(x: mx.array) -> mx.array:
    """``[B, H, T, D]`` as ``[B, 1, H T, D]``."""
    B, H, T, D = x.shape
    return x.reshape(B, 1, H * T, D)


def _multiply(linear: HeadLinear, x: mx.array) -> mx.array:
    """``linear(x)`` for ``[B, H, T, in]``, by the way that is fast on the device."""
    if isinstance(linear, QuantizedMultiLinear) and expanding_pays(x.shape[2], linear.mode):
        return x @ dense_weight(linear, x.dtype).swapaxes(-1, -2)
    return linear(x)
