"""The prompt cache: what a model has read before, it does not read again.

The latents of MLA belong to tokens and are shared by all texts that begin alike. A KDA state
belongs to the whole text before it and cannot be cut back; states are kept where someone stored
one, and reading is taken up at the last of them on the way. Owns the two places they are kept in,
memory and a folder. Knows ids only; :mod:`mlx_k3.chat.reading` decides where states are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .cache_folder import CacheFolder, free_bytes
from .cache_identity import model_identity
from .cache_memory import CacheMemory
from .cache_parts import (
    Arrays,
    bytes_per_token,
    rebuild,
    state_arrays,
    token_arrays,
    tokens_held,
    total_bytes,
)
from .prefix_tree import BLOCK_TOKENS, KEY_DIGITS, Place, PrefixTree, path, states

_STATES_IN_MEMORY = 4
_STATES_ON_DISK = 32
_LEAST_DISK_BYTES = 10**9
_FREE_SHARE = 1 / 10  # of a disk's free space


class Found(NamedTuple):
    """A state that is to be kept: what ``cache`` knew when it held exactly ``ids``.

    ``cache`` may have gone on since; ``state`` is what :func:`~.cache_parts.state_arrays` gave
    then.
    """

    ids: list[int]
    cache: list[Any]
    state: Arrays

    @property
    def nbytes(self) -> int:
        """Of the state and of all tokens before it."""
        return total_bytes(self.state) + len(self.ids) * bytes_per_token(self.cache)


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
        state_bytes: of one state, where it is known; see :meth:`make_room`.
    """

    def __init__(
        self,
        model: Any,
        identity: str,
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
        disk_bytes: int | None = None,
        state_bytes: int | None = None,
    ):
        self._model, self._root = model, identity[:KEY_DIGITS]
        self._state_bytes = state_bytes
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
        # The last token has to be read, for what comes after it.
        while paths := self._paths(ids[:-1]):
            nodes = self._load(paths[-1])
            if nodes is None:
                continue  # What could not be read is forgotten: there may be an earlier place.
            end, state = paths[-1][-1].end, nodes[-1]
            spans = nodes if end % BLOCK_TOKENS else nodes[:-1]
            self._hits += 1
            self._kept += end
            return rebuild(self._model.make_cache(), spans, state, end), ids[end:]
        return self._model.make_cache(), ids

    def store(self, ids: Sequence[int], cache: Sequence[Any]) -> str:
        """Keep what ``cache``, which holds exactly ``ids``, knows of them; returns the state's key.

        The cache stays the caller's.

        Raises:
            ValueError: it does not hold exactly these.
        """
        held = tokens_held(cache)
        if held not in (None, len(ids)):
            raise ValueError(f"a cache of {held} tokens for {len(ids)} ids")
        return self.keep(Found(list(ids), list(cache), state_arrays(cache)))

    def keep(self, found: Found) -> str:
        """Keep a state and all that leads to it; returns its key.

        Raises:
            ValueError: there is nothing to keep.
        """
        if not found.ids:
            raise ValueError("a state of no tokens")
        tiers = [tier for tier in self._tiers if tier.tree.fits(found.nbytes)]
        places = path(self._root, found.ids, len(found.ids))
        for place in places:
            arrays = None
            for tier in tiers:
                if place.key in tier.tree:
                    tier.use(place)  # A file may turn out to be gone.
                if place.key not in tier.tree:
                    arrays = _content(place, found) if arrays is None else arrays
                    tier.write(place, arrays)
        return places[-1].key

    def make_room(self, states: int) -> int:
        """Free memory for states that are on their way; for how many of ``states`` there is.

        There always is for one: a prompt ends with it.
        """
        memory = self._tiers[0].tree
        if memory.limit_bytes is None or self._state_bytes is None:
            return states
        states = max(min(states, memory.limit_bytes // self._state_bytes), 1)
        memory.shrink(states * self._state_bytes)
        return states

    def fits_memory(self, found: Found) -> bool:
        """Whether it will be kept in memory, and so costs no more while it waits for that."""
        return self._tiers[0].tree.fits(found.nbytes)

    def forget(self, key: str) -> None:
        """Drop a state, and what only it needed."""
        for tier in self._tiers:
            tier.forget(key)

    def states_of(self, ids: Sequence[int]) -> list[str]:
        """Keys of all states on the way through ``ids``."""
        return [places[-1].key for places in self._paths(ids)]

    def usage(self) -> CacheUsage:
        """Sizes now, and sums since the beginning."""
        memory, disk = [*(tier.tree for tier in self._tiers), PrefixTree(0)][:2]
        return CacheUsage(
            memory_states=memory.states,
            memory_bytes=memory.nbytes,
            disk_states=disk.states,
            disk_bytes=disk.nbytes,
            fetches=self._fetches,
            hits=self._hits,
            tokens_asked=self._asked,
            tokens_kept=self._kept,
        )

    def _paths(self, ids: Sequence[int]) -> list[list[Place]]:
        trees = [tier.tree for tier in self._tiers]
        ends = {end for tree in trees for end in tree.ends}
        return [*states(self._root, ids, ends, lambda key: any(key in tree for tree in trees))]

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


def _content(place: Place, found: Found) -> Arrays:
    """What a node holds: a block its tokens, a state also the tokens behind the last block."""
    if place.is_state:
        first = place.end - place.end % BLOCK_TOKENS
        arrays = found.state | token_arrays(found.cache, first, place.end)
    else:
        arrays = token_arrays(found.cache, place.end - BLOCK_TOKENS, place.end)
    mx.eval(arrays)
    return arrays


def wanted_bytes(plan: Any) -> int:
    """What a prompt cache makes good use of in memory, by a model's memory plan.

    The ends of the last prompts and answers, and the beginning that conversations share.
    """
    return _STATES_IN_MEMORY * plan.state_bytes + plan.cache_bytes


def open_prompt_cache(
    folder: str | Path,
    model: Any,
    *,
    kept_in: Path | None = None,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> PromptCache:
    """The prompt cache of ``model``, which :func:`mlx_k3.load` gave for ``folder``.

    Args:
        folder: the model's.
        model: its memory plan gives the sizes below.
        kept_in: where states are kept from one process to the next; None keeps them in memory.
        memory_bytes: by default room for a few states, beside what the model was given.
        disk_bytes: by default room for some dozens of states, or a tenth of what is free.

    Raises:
        CheckpointError: the folder is no model.
    """
    plan = model.plan
    if disk_bytes is None and kept_in is not None:
        wanted = max(_STATES_ON_DISK * plan.state_bytes + 4 * plan.cache_bytes, _LEAST_DISK_BYTES)
        disk_bytes = min(wanted, int(free_bytes(kept_in) * _FREE_SHARE))
    return PromptCache(
        model,
        model_identity(folder, model),
        memory_bytes=wanted_bytes(plan) if memory_bytes is None else memory_bytes,
        folder=kept_in,
        disk_bytes=disk_bytes,
        state_bytes=plan.state_bytes,
    )
