"""Replacement policies: which expert leaves when another needs its slot.

A policy sees uses, and which experts may leave; it knows neither slots nor files. The pool takes
an expert off the market while it is leased or being read and offers it again afterwards, so a
policy never has to search past experts that are in use.
"""

import heapq
import math
from collections import OrderedDict
from typing import Protocol

Key = tuple[int, int]
"""An expert: (layer, expert)."""


class Policy(Protocol):
    """Every method takes O(log n) or less, amortised."""

    def used(self, key: Key, hit: bool) -> None:
        """``key`` was asked for; ``hit`` if it lay in a slot. It need not be on offer."""

    def offer(self, key: Key) -> None:
        """``key`` may leave from now on. Offering twice changes nothing."""

    def hold(self, key: Key) -> None:
        """``key`` may not leave any more, or is gone. It need not be on offer."""

    def victim(self) -> Key | None:
        """The expert on offer that is missed least, no longer on offer; None if there is none."""


class LRU:
    """The expert that was used least recently leaves."""

    def __init__(self) -> None:
        self._offered: OrderedDict[Key, None] = OrderedDict()

    def used(self, key: Key, hit: bool) -> None:
        if key in self._offered:
            self._offered.move_to_end(key)

    def offer(self, key: Key) -> None:
        # Leases end soon after their use, and in the order of use: so does this order.
        self._offered.setdefault(key)

    def hold(self, key: Key) -> None:
        self._offered.pop(key, None)

    def victim(self) -> Key | None:
        return self._offered.popitem(last=False)[0] if self._offered else None


class LFU:
    """The expert that was used least often leaves; a use counts half after ``half_life`` uses.

    Uses are remembered when an expert leaves. With w_i = 2^(t_i / half_life) for a use at time
    t_i, all weights age alike, so the order changes only by uses: a heap holds log2(sum of w_i).
    """

    def __init__(self, half_life: int = 100_000) -> None:
        self._half_life = half_life
        self._time = 0
        self._score: dict[Key, float] = {}
        self._entry: dict[Key, tuple[float, int, Key]] = {}  # what is on offer
        self._heap: list[tuple[float, int, Key]] = []  # may hold outdated entries

    def used(self, key: Key, hit: bool) -> None:
        self._time += 1
        now = self._time / self._half_life
        before = self._score.get(key)
        self._score[key] = now if before is None else now + math.log2(1 + 2 ** (before - now))
        if key in self._entry:
            self._push(key)

    def offer(self, key: Key) -> None:
        if key not in self._entry:
            self._push(key)

    def hold(self, key: Key) -> None:
        self._entry.pop(key, None)

    def victim(self) -> Key | None:
        while self._heap:
            entry = self._heap[0]
            on_offer = self._entry.get(entry[2]) is entry
            # In this order: cut short between the two, the heap has one outdated entry more.
            if on_offer:
                del self._entry[entry[2]]
            heapq.heappop(self._heap)
            if on_offer:
                return entry[2]
        return None

    def _push(self, key: Key) -> None:
        # Among equals the one offered first leaves.
        entry = (self._score.get(key, -math.inf), self._time, key)
        heapq.heappush(self._heap, entry)
        self._entry[key] = entry
        if len(self._heap) > 64 + 2 * len(self._entry):
            heap = list(self._entry.values())
            heapq.heapify(heap)
            self._heap = heap


POLICIES: dict[str, type[Policy]] = {"lru": LRU, "lfu": LFU}
