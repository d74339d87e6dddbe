"""MLA's cache: the latent and the shared key of every token, in blocks, in mlx-lm's protocol.

Owns how these rows are kept: as computed, or packed in 8 or 4 bits and expanded only where they
are read. Only the last block ever grows, so that a long text is never copied. Knows nothing of
heads or queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

KV_BITS = (8, 4)
GROUP = 32  # numbers that share a scale and an offset where rows are packed
BLOCK_ROWS = 8192  # tokens of a full block
STEP_ROWS = 256  # tokens by which the last block grows

Rows = tuple[mx.array, mx.array]
"""Latents ``[B, 1, n, *]`` and shared keys ``[B, 1, n, *]``: as computed, or packed."""


@dataclass(frozen=True)
class Latents:
    """What queries look at: the rows of ``length`` tokens in blocks, and what they stand for."""

    blocks: Sequence[Rows]
    length: int
    widths: tuple[int, int]
    """Of a latent and of a shared key."""
    dtype: mx.Dtype
    bits: int | None = None
    starts: mx.array | None = None
    """``[B]``, where each text begins in a left-padded batch."""

    @classmethod
    def of(cls, rows: Rows) -> "Latents":
        """Rows as computed, and no others."""
        latent, key = rows
        return cls([rows], latent.shape[2], (latent.shape[-1], key.shape[-1]), latent.dtype)

    def tiles(self, most_rows: int) -> Iterator[tuple[int, mx.array, mx.array]]:
        """Everything in order, at most ``most_rows`` at a time: first row, latents, shared keys."""
        start = 0
        for block in self.blocks:
            held = min(block[0].shape[2], self.length - start)
            for first in range(0, held, most_rows):
                rows = _part(block, first, min(first + most_rows, held))
                yield start + first, *self._unpacked(rows)
            start += held

    def _unpacked(self, rows: Rows) -> Rows:
        if self.bits is None:
            return rows
        latent, key = (
            _unpack(packed, width, self.bits, self.dtype)
            for packed, width in zip(rows, self.widths, strict=True)
        )
        return latent, key


class LatentCache:
    """The rows of one text, or of texts that are read in step.

    ``bits`` is None (rows as computed), 8 or 4. ``state`` is a snapshot: it shares the blocks, and
    what the cache takes up later does not show in it.
    """

    def __init__(self, bits: int | None = None):
        self.bits = bits
        self.offset = 0
        self._blocks: list[Rows] = []

    def append(self, latent: mx.array, key: mx.array) -> Latents:
        """Take up ``latent [B, 1, n, rank]`` and ``key [B, 1, n, shared]``; all there is now."""
        rows, n, done = _packed(latent, key, self.bits), latent.shape[2], 0
        while done < n:
            first, room = self._make_room(rows, n - done)
            at = mx.array([first])
            old, new = self._blocks[-1], _part(rows, done, done + room)
            # Not in place: who holds a state holds these arrays. Where nobody does, MLX writes
            # into the old one's memory.
            self._blocks[-1] = (
                mx.slice_update(old[0], new[0], at, axes=[2]),
                mx.slice_update(old[1], new[1], at, axes=[2]),
            )
            self.offset += room
            done += room
        widths = latent.shape[-1], key.shape[-1]
        return Latents(tuple(self._blocks), self.offset, widths, latent.dtype, self.bits)

    def _make_room(self, rows: Rows, wanted: int) -> tuple[int, int]:
        """Have a last block with room for rows like ``rows``; where it begins, and how many."""
        held = [block[0].shape[2] for block in self._blocks]
        used = self.offset - sum(held[:-1])
        if not held or used == held[-1] >= BLOCK_ROWS:
            self._blocks.append(_part(rows, 0, 0))
            held.append(0)
            used = 0
        if used == held[-1]:
            size = min(-(-(used + wanted) // STEP_ROWS) * STEP_ROWS, BLOCK_ROWS)
            latent, key = self._blocks[-1]
            self._blocks[-1] = _lengthened(latent, size), _lengthened(key, size)
            held[-1] = size
        return used, min(wanted, held[-1] - used)

    def rows(self, start: int, stop: int) -> Rows:
        """What is kept of the tokens from ``start`` to ``stop``, in arrays of its own."""
        parts, first = [], 0
        for block in self._blocks:
            held = block[0].shape[2]
            low, high = max(start - first, 0), min(stop - first, held)
            if low < high:
                parts.append(_part(block, low, high))
            first += held
        if len(parts) == 1:
            return mx.contiguous(parts[0][0]), mx.contiguous(parts[0][1])
        latents, keys = zip(*parts, strict=True)
        return mx.concatenate(latents, axis=2), mx.concatenate(keys, axis=2)

    def set_rows(self, latents: mx.array, keys: mx.array) -> None:
        """Hold these rows, as :meth:`rows` gave them, and nothing else."""
        self.offset = latents.shape[2]
        starts = range(0, self.offset, BLOCK_ROWS)
        ends = (min(start + BLOCK_ROWS, self.offset) for start in starts)
        self._blocks = [_part((latents, keys), *part) for part in zip(starts, ends, strict=True)]

    # mlx-lm's protocol

    @property
    def state(self) -> tuple[list[mx.array], list[mx.array], int, int | None]:
        latents, keys = ([block[i] for block in self._blocks] for i in (0, 1))
        return latents, keys, self.offset, self.bits

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        latents, keys, self.offset, self.bits = state
        self._blocks = list(zip(latents, keys, strict=True))

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> "LatentCache":
        """A cache that goes on where another one was."""
        cache = cls()
        cache.state = state
        return cache

    @property
    def keys(self) -> mx.array | None:
        """All latents, packed if they are; None if there are none."""
        return self.rows(0, self.offset)[0] if self.offset else None

    @property
    def values(self) -> mx.array | None:
        """All shared keys, likewise."""
        return self.rows(0, self.offset)[1] if self.offset else None

    def size(self) -> int:
        """How many tokens there are."""
        return self.offset

    def empty(self) -> bool:
        """Whether there is none."""
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Memory of all blocks, with what is free in the last."""
        return sum(latents.nbytes + keys.nbytes for latents, keys in self._blocks)

    def is_trimmable(self) -> bool:
        """Whether :meth:`trim` works: rows belong to their tokens alone."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens; returns how many there were to forget."""
        n = min(n, self.offset)
        self.offset -= n
        before = sum(block[0].shape[2] for block in self._blocks)
        while self._blocks and before - self._blocks[-1][0].shape[2] >= self.offset:
            before -= self._blocks.pop()[0].shape[2]
        return n

    @classmethod
    def merge(cls, caches: Sequence["LatentCache"]) -> "BatchLatentCache":
        """Several texts side by side, padded on the left to one length."""
        return BatchLatentCache.merge(caches)


# mlx-lm looks for the classes of a saved cache among its own.
mlx_lm_cache.LatentCache = LatentCache


class BatchLatentCache(mlx_lm_cache.BatchKVCache):
    """The rows of several texts, padded on the left; mlx-lm's, which takes any rows for keys."""

    def __init__(self, left_padding: list[int], bits: int | None = None):
        super().__init__(left_padding)
        self.bits = bits

    def append(self, latent: mx.array, key: mx.array) -> Latents:
        """Take up rows of every text; see :meth:`LatentCache.append`."""
        rows = self.update_and_fetch(*_packed(latent, key, self.bits))
        widths = latent.shape[-1], key.shape[-1]
        return Latents([rows], self._idx, widths, latent.dtype, self.bits, self.left_padding)

    @classmethod
    def merge(cls, caches: Sequence[LatentCache]) -> "BatchLatentCache":
        """Several texts side by side, padded on the left to one length."""
        if any(cache.size() for cache in caches):
            merged = super().merge(caches)
        else:
            merged = cls([0] * len(caches))
        merged.bits = caches[0].bits
        return merged

    def extract(self, idx: int) -> LatentCache:
        """One of the texts by itself, in its own memory."""
        text, first = slice(idx, idx + 1), self.left_padding[idx].item()
        cache = LatentCache(self.bits)
        if self.keys is not None and first < self._idx:
            rows = (x[text, :, first : self._idx] for x in (self.keys, self.values))
            cache.set_rows(*map(mx.contiguous, rows))
        return cache


def row_bytes(width: int, number_bytes: int, bits: int | None) -> int:
    """What a row of ``width`` numbers takes: of ``number_bytes`` each, or packed."""
    return width * number_bytes if bits is None else -(-width // GROUP) * (bits + 1) * 4


def _packed(latent: mx.array, key: mx.array, bits: int | None) -> Rows:
    return (latent, key) if bits is None else (_pack(latent, bits), _pack(key, bits))


def _pack(x: mx.array, bits: int) -> mx.array:
    """Rows ``[.., n, width]`` as uint32 ``[.., n, groups * (bits + 1)]``.

    The codes come first, then every group's scale, then every group's offset, these in float16.
    """
    missing = -x.shape[-1] % GROUP
    if missing:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    largest = mx.finfo(mx.float16).max
    x = mx.clip(x.astype(mx.float32), -largest, largest)
    codes, scales, offsets = mx.quantize(x, group_size=GROUP, bits=bits)
    how = mx.concatenate([scales, offsets], axis=-1).astype(mx.float16)
    return mx.concatenate([codes, how.view(mx.uint32)], axis=-1)


def _unpack(packed: mx.array, width: int, bits: int, dtype: mx.Dtype) -> mx.array:
    """The rows ``[.., n, width]`` that :func:`_pack` was given, nearly."""
    groups = packed.shape[-1] // (bits + 1)
    codes, how = mx.split(packed, [groups * bits], axis=-1)
    how = how.view(mx.float16)
    if dtype == mx.float32:
        how = how.astype(dtype)  # A CPU has no float16 arithmetic.
    scales, offsets = mx.split(how, 2, axis=-1)
    rows = mx.dequantize(codes, scales, offsets, group_size=GROUP, bits=bits, dtype=dtype)
    return rows[..., :width]


def _part(rows: Rows, start: int, stop: int) -> Rows:
    latents, keys = rows
    if start == 0 and stop == latents.shape[2]:
        return rows
    return latents[:, :, start:stop], keys[:, :, start:stop]


def _lengthened(x: mx.array, rows: int) -> mx.array:
    B, _, held, width = x.shape
    return mx.concatenate([x, mx.zeros((B, 1, rows - held, width), x.dtype)], axis=2)
