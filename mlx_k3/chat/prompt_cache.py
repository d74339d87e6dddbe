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

from .cache_folder import CacheFolder
from .cache_parts import (
    Arrays,
    bytes_per_token,
    rebuild,
    state_arrays,
    token_arrays,
    tokens_held,
    total_bytes,
)
from .prefix_tree import BLOCK_TOKENS, KEY_DIGITS, Place, PrefixTree, longest, path


@dataclass(frozen=True)
class CacheUsage:
    """What a prompt cache holds, and what came of it so far."""

    memory_states: int
    memory_bytes: int
    disk_states: int
    disk_bytes: int
    fetches: int
    hits: int
    tokens_asked: int
    tokens_kept: int
    """Of the tokens asked for, how many had not to be read again."""


class CacheMemory:
    """Nodes of the prompt cache in memory, of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int | None):
        self.tree = PrefixTree(limit_bytes)

    def read(self, place: Place) -> Arrays | None:
        """What is at ``place``."""
        return self.tree[place.key]

    def write(self, place: Place, arrays: Arrays) -> None:
        """Put ``arrays`` there."""
        self.tree.add(place, total_bytes(arrays), arrays)
        self.tree.shrink()

    def use(self, place: Place) -> None:
        """Note that they were of use."""
        self.tree.use(place.key)


class PromptCache:
    """Remembers prompts and answers of one model.

    >>> prompts = PromptCache(model, identity, memory_bytes=2 * 10**9)
    >>> cache, rest = prompts.fetch(ids)  # `cache` holds all of `ids` but `rest`
    >>> prompts.store(ids + answer, cache)

    Args:
        model: only its ``make_cache`` is used.
        identity: hexadecimal digits that stand for the model and its precision, from
            :func:`~.cache_identity.model_identity`; what has another identity is never used.
        memory_bytes: kept in memory, at most. None is any number, 0 nothing.
        folder: where more is kept, for later processes too. It may be deleted at any time.
        disk_bytes: kept in the folder, at most, for all models together.
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
        self._model, self._root = model, identity[:KEY_DIGITS]
        self._tiers: list[CacheMemory | CacheFolder] = [CacheMemory(memory_bytes)]
        if folder is not None and disk_bytes != 0:
            self._tiers.append(CacheFolder(folder, identity, disk_bytes))
        self._fetches = self._hits = self._asked = self._kept = 0

    def fetch(self, ids: Sequence[int]) -> tuple[list[Any], list[int]]:
        """A cache that holds the beginning of ``ids``, and the ids it lacks: at least the last.

        The cache is the caller's to go on with.
        """
        ids = list(ids)
        self._fetches += 1
        self._asked += len(ids)
        while (places := self._longest(ids)) is not None:
            nodes = self._load(places)
            if nodes is None:
                continue  # What could not be read is forgotten: there may be an earlier place.
            end, state = places[-1].end, nodes[-1]
            spans = nodes if end % BLOCK_TOKENS else nodes[:-1]
            self._hits += 1
            self._kept += end
            return rebuild(self._model.make_cache(), spans, state, end), ids[end:]
        return self._model.make_cache(), ids

    def store(self, ids: Sequence[int], cache: Sequence[Any], state: Arrays | None = None) -> str:
        """Keep what ``cache`` knows of ``ids``; returns the key under which it is kept.

        The cache stays the caller's. It holds exactly ``ids``; or it holds more, and ``state`` is
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
        nbytes = total_bytes(state) + len(ids) * bytes_per_token(cache)
        tiers = [tier for tier in self._tiers if tier.tree.fits(nbytes)]
        for place in places:
            arrays = None
            for tier in tiers:
                if place.key in tier.tree:
                    tier.use(place)  # A file may turn out to be gone.
                if place.key not in tier.tree:
                    arrays = _content(place, cache, state) if arrays is None else arrays
                    tier.write(place, arrays)
        return places[-1].key

    def usage(self) -> CacheUsage:
        """Sizes now, and sums since the beginning."""
        memory, disk = [*(tier.tree for tier in self._tiers), PrefixTree(0)][:2]
        return CacheUsage(
            memory_states=memory.ends.total(),
            memory_bytes=memory.nbytes,
            disk_states=disk.ends.total(),
            disk_bytes=disk.nbytes,
            fetches=self._fetches,
            hits=self._hits,
            tokens_asked=self._asked,
            tokens_kept=self._kept,
        )

    def _longest(self, ids: list[int]) -> list[Place] | None:
        trees = [tier.tree for tier in self._tiers]
        ends = {end for tree in trees for end in tree.ends}
        return longest(self._root, ids, ends, lambda key: any(key in tree for tree in trees))

    def _load(self, places: list[Place]) -> list[Arrays] | None:
        """The contents of all ``places``, or None if one cannot be had any more."""
        nodes = []
        for place in places:
            arrays = None
            for tier in self._tiers:
                if place.key in tier.tree:
                    tier.use(place)
                if place.key in tier.tree and arrays is None:
                    arrays = tier.read(place)
            if arrays is None:
                return None
            nodes.append(arrays)
        memory = self._tiers[0]
        if memory.tree.fits(sum(map(total_bytes, nodes))):
            for place, arrays in zip(places, nodes, strict=True):
                if place.key not in memory.tree:
                    memory.write(place, arrays)
        return nodes


def _content(place: Place, cache: Sequence[Any], state: Arrays) -> Arrays:
    """What a node holds: a block its tokens, a state also the tokens behind the last block."""
    if place.is_state:
        arrays = state | token_arrays(cache, place.end - place.end % BLOCK_TOKENS, place.end)
    else:
        arrays = token_arrays(cache, place.end - BLOCK_TOKENS, place.end)
    mx.eval(arrays)
    return arrays
