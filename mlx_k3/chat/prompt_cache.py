"""The prompt cache: what a model has read before, it does not read again.

The latents of MLA belong to tokens and are shared by all texts that begin alike. A KDA state
belongs to the whole text before it and cannot be cut back; states are kept where someone stored
one, and reading is taken up at the last of them on the way. Owns the two places they are kept in,
memory and a folder. Knows ids only; :mod:`mlx_k3.chat.reading` decides where states are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .cache_parts import Arrays, rebuild, state_arrays, token_arrays, tokens_held
from .prefix_tree import BLOCK_TOKENS, Place, PrefixTree, longest, path


@dataclass(frozen=True)
class CacheUsage:
    """What a prompt cache holds, and what came of it so far."""

    states: int
    memory_bytes: int
    disk_bytes: int
    fetches: int
    hits: int
    tokens_asked: int
    tokens_kept: int
    """Of the tokens asked for, how many had not to be read again."""


class PromptCache:
    """Remembers prompts and answers of one model.

    >>> prompts = PromptCache(model, identity, memory_bytes=2 * 10**9)
    >>> cache, rest = prompts.fetch(ids)  # `cache` holds all of `ids` but `rest`
    >>> prompts.store(ids + answer, cache)

    Args:
        model: only its ``make_cache`` is used.
        identity: of the model, from :func:`model_identity`; others' states are never used.
        memory_bytes: kept in memory, at most. None is any number, 0 nothing.
        folder: kept there as well. It may be deleted at any time.
        disk_bytes: kept in the folder, at most.
    """

    def __init__(
        self,
        model: Any,
        identity: str,
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
        disk_bytes: int | None = None,
    ):
        self._model, self._root = model, identity
        self._memory = PrefixTree(memory_bytes)
        self._fetches = self._hits = self._asked = self._kept = 0

    def fetch(self, ids: Sequence[int]) -> tuple[list[Any], list[int]]:
        """A cache that holds the beginning of ``ids``, and the ids it lacks: at least the last.

        The cache is the caller's to go on with.
        """
        ids = list(ids)
        self._fetches += 1
        self._asked += len(ids)
        found = longest(self._root, ids, self._memory.ends, self._memory.__contains__)
        if found is None:
            return self._model.make_cache(), ids
        *spans, last = (self._memory[place.key] for place in found)
        for place in found:
            self._memory.use(place.key)
        end = found[-1].end
        spans = [*spans, last] if end % BLOCK_TOKENS else spans
        cache = rebuild(self._model.make_cache(), spans, last, end)
        self._hits += 1
        self._kept += end
        return cache, ids[end:]

    def store(self, ids: Sequence[int], cache: Sequence[Any], state: Arrays | None = None) -> str:
        """Keep what ``cache`` knows of ``ids``; returns the key under which it is kept.

        The cache stays the caller's. It holds exactly ``ids``, or more of them and ``state`` is
        what :func:`~.cache_parts.state_arrays` gave when it held exactly these.

        Raises:
            ValueError: it does not.
        """
        ids = list(ids)
        held = tokens_held(cache)
        if not ids or (held is not None and (held < len(ids) or (held > len(ids) and not state))):
            raise ValueError(f"a cache of {held} tokens for {len(ids)} ids")
        places = path(self._root, ids, len(ids))
        state = state_arrays(cache) if state is None else state
        for place in places:
            if place.key not in self._memory:
                arrays = self._content(place, cache, state)
                self._memory.add(place, sum(x.nbytes for x in arrays.values()), arrays)
            self._memory.use(place.key)
        self._memory.shrink()
        return places[-1].key

    def usage(self) -> CacheUsage:
        """Sizes now, and sums since the beginning."""
        return CacheUsage(
            states=self._memory.ends.total(),
            memory_bytes=self._memory.nbytes,
            disk_bytes=0,
            fetches=self._fetches,
            hits=self._hits,
            tokens_asked=self._asked,
            tokens_kept=self._kept,
        )

    def _content(self, place: Place, cache: Sequence[Any], state: Arrays) -> Arrays:
        if place.is_state:
            arrays = state | token_arrays(cache, place.end - place.end % BLOCK_TOKENS, place.end)
        else:
            arrays = token_arrays(cache, place.end - BLOCK_TOKENS, place.end)
        mx.eval(arrays)
        return arrays
