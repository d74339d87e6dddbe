"""The offloaded bank: an MoE layer's experts, fetched from the SSD when a token asks for them.

Same call and same numbers as the resident bank. The ids must reach the host, so a layer is
evaluated once, at the router. A few tokens need all their experts at once: all reads are issued
together and what does not depend on them is computed meanwhile. A prompt visits each of its
experts once, in the order of the file, reading ahead as far as the pool has room.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..models.bank import (
    GROUP_FROM,
    PAIRS_AT_ONCE,
    Experts,
    add_weighted,
    sort_pairs,
    split_pairs,
    weighted_sum,
)
from .lossy import Levers
from .store import ExpertStore, Key

EXPERTS_AT_ONCE = 32  # of a prompt's experts, computed together


class OffloadedBank:
    """One layer's routed experts, through an :class:`ExpertStore` that all layers share.

    ``slots`` runs the experts that lie in the store's slots.
    """

    def __init__(
        self,
        layer: int,
        next_layer: int | None,
        store: ExpertStore,
        slots: Experts,
        levers: Levers,
    ):
        self._layer, self._next_layer = layer, next_layer
        self._store, self._slots, self._levers = store, slots, levers

    def __call__(
        self,
        z: mx.array,
        indices: mx.array,
        weights: mx.array,
        alongside: mx.array | None = None,
        ahead: mx.array | None = None,
    ) -> mx.array:
        """The experts' weighted sum; see :class:`mlx_k3.models.bank.ResidentBank`.

        Args:
            z: ``[..., D]``, what the experts read.
            indices: ``[..., k]``, the chosen experts.
            weights: ``[..., k]`` float32.
            alongside: computed while experts are read.
            ahead: ids of the next MoE layer that are worth reading already.

        Raises:
            CheckpointError: an expert could not be read.
            BudgetError: the pool is smaller than what one layer needs.
        """
        mx.eval(indices, weights, *([] if ahead is None else [ahead]))
        chosen, shares = np.array(indices), np.array(weights)
        self._store.begin(self._layer, chosen, shares)
        ids, kept = self._levers.apply(chosen, shares, self._is_there)
        if ids is not chosen:
            weights = mx.array(kept)
            self._store.note_dropped(self._layer, np.setdiff1d(chosen, ids).tolist())
        pairs = sort_pairs(ids)
        if ids.size >= GROUP_FROM or len(pairs.experts) > len(self._store.pool):
            y = self._in_groups(z, weights, pairs, self._group_size())
        else:
            y = self._at_once(z, ids, weights, pairs, alongside, ahead)
        self._store.end()
        return y

    def _at_once(self, z, ids, weights, pairs, alongside, ahead):
        store, keys = self._store, self._keys(pairs.experts)
        # What is there first: then no claim for what is missing can evict it.
        for key in sorted(keys, key=store.has, reverse=True):
            self._hold(key)
        if alongside is not None:
            mx.async_eval(alongside)
        if ahead is not None and self._next_layer is not None:
            store.prefetch([(self._next_layer, e) for e in np.unique(np.array(ahead)).tolist()])
        if mx.default_device() == mx.cpu and any(store.pool.find(key) is None for key in keys):
            # A CPU takes as long to multiply as a disk to read: one expert while the next comes.
            return self._in_groups(z, weights, pairs, 1)
        slots = store.wait(keys)
        place = np.zeros(pairs.experts[-1] + 1, np.uint32)
        place[pairs.experts] = slots
        y = self._slots.summed(z, mx.array(place[ids]), weights)
        store.release_after(slots, y)
        return y

    def _in_groups(self, z, weights, pairs, group_size):
        store, slots, k = self._store, self._slots, weights.shape[-1]
        rows, flat = z.reshape(-1, z.shape[-1]), weights.reshape(-1)
        by_expert, many = slots.works_by_expert(flat.size), flat.size >= GROUP_FROM
        keys, held, done = self._keys(pairs.experts), 0, 0
        total, outputs = mx.zeros(rows.shape, mx.float32), []
        # What is there stays until its turn, as far as that leaves room for two groups.
        there = [key for key in keys if store.has(key)]
        for key in there[: max(len(store.pool) - 2 * group_size, 0)]:
            self._hold(key)
        for part in split_pairs(pairs, PAIRS_AT_ONCE, group_size):
            done += len(part.experts)
            held = self._hold_ahead(keys, held, done)
            places = store.wait(keys[done - len(part.experts) : done])
            order = mx.array(part.order)
            if by_expert:
                y = slots.run(rows[order // k], places, part.starts)
            else:
                ids = np.repeat(np.array(places, np.uint32), np.diff(part.starts))
                y = slots.select(rows[order // k], mx.array(ids))
            store.release_after(places, y)
            if many:
                total = add_weighted(total, y, flat[order], order // k)
                mx.async_eval(total)
            else:
                outputs.append(y)
        if many:
            return total.reshape(z.shape).astype(z.dtype)
        unsort = np.empty_like(pairs.order)
        unsort[pairs.order] = np.arange(len(unsort))
        y = mx.concatenate(outputs)[mx.array(unsort)].reshape(*weights.shape, -1)
        return weighted_sum(y, weights).astype(z.dtype)

    def _is_there(self, expert: int) -> bool:
        return self._store.pool.find((self._layer, expert)) is not None

    def _keys(self, experts: Sequence[int]) -> list[Key]:
        return [(self._layer, expert) for expert in experts]

    def _group_size(self) -> int:
        """A part of the pool, so that the next experts are read while these are computed."""
        return max(min(len(self._store.pool) // 4, EXPERTS_AT_ONCE), 1)

    def _hold(self, key: Key) -> None:
        while self._store.hold(key) is None:
            self._store.make_room()

    def _hold_ahead(self, keys: list[Key], held: int, needed: int) -> int:
        """Hold ``keys`` from ``held`` to ``needed``, whatever it takes, then while there is room.

        Returns how many are held in all.
        """
        while held < len(keys):
            if held < needed:
                self._hold(keys[held])
            elif self._store.hold(keys[held]) is None:
                break
            held += 1
        return held
