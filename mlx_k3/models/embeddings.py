"""A prompt with pictures as embeddings, made piece by piece as the prompt is read.

Ids below zero are places of pictures' vectors; see :mod:`mlx_k3.media.placing`. Owns which vector
goes where. Knows media by their ``ids`` only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..errors import K3Error


class PromptEmbeddings:
    """Stands for the array ``[T, hidden]`` that a prompt of ``T`` ids embeds to.

    mlx-lm's loop, which would have that array, asks for its length, for slices, and for what it
    hands to the model, ``[None]``: only then is anything computed, and only of that slice. Of
    pictures, the vectors of the last one are kept, for the next slice may begin in its middle.

    Args:
        embed: ids ``[n]`` -> ``[n, hidden]``, for those that the vocabulary has.
        encode: a medium -> its vectors, ``[tokens, hidden]``.
        ids: the prompt.
        media: all that ``ids`` have places of; more do no harm.
    """

    def __init__(
        self,
        embed: Callable[[mx.array], mx.array],
        encode: Callable[[Any], mx.array],
        ids: Sequence[int],
        media: Sequence[Any],
    ):
        self._embed, self._ids = embed, list(ids)
        self._vectors = _LastVectors(encode, media)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, key: slice | None) -> "PromptEmbeddings | mx.array":
        """A part of it, or all of it as an array ``[1, T, hidden]``.

        Raises:
            K3Error: a place of a picture that is not among the media.
        """
        if key is None:
            return self._compute()[None]
        part = PromptEmbeddings.__new__(PromptEmbeddings)
        part._embed, part._ids, part._vectors = self._embed, self._ids[key], self._vectors
        return part

    def _compute(self) -> mx.array:
        ids, pieces, start = self._ids, [], 0
        while start < len(ids):
            stop = start + 1
            if ids[start] >= 0:
                while stop < len(ids) and ids[stop] >= 0:
                    stop += 1
                pieces.append(self._embed(mx.array(ids[start:stop])))
            else:
                while stop < len(ids) and ids[stop] == ids[stop - 1] - 1:
                    stop += 1
                pieces.append(self._vectors.rows(ids[start], stop - start))
            start = stop
        dtype = self._embed(mx.array([0])).dtype
        return mx.concatenate([piece.astype(dtype) for piece in pieces])


class _LastVectors:
    """Vectors of media, of which the last one's stay in memory."""

    def __init__(self, encode: Callable[[Any], mx.array], media: Sequence[Any]):
        self._encode, self._media = encode, media
        self._first, self._last = 0, mx.zeros((0, 0))

    def rows(self, first: int, count: int) -> mx.array:
        """The vectors with ids ``first``, ``first - 1``, and so on."""
        medium = next((m for m in self._media if 0 <= m.ids[0] - first < m.tokens), None)
        if medium is None:
            raise K3Error("the prompt has a place for a picture that is not there; give it again")
        if self._first != medium.ids[0]:
            self._last = mx.zeros((0, 0))  # before there is another
            vectors = self._encode(medium)
            if len(vectors) != medium.tokens:
                raise K3Error(
                    f"a picture of {medium.tokens} places gave {len(vectors)} vectors; "
                    "preprocessor_config.json does not fit the tower"
                )
            self._first, self._last = medium.ids[0], vectors
        row = self._first - first
        return self._last[row : row + count]
