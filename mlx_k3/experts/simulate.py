"""What another pool size or replacement policy would have done on a recorded trace.

Owns the pool that is simulated, the best that any policy could do, and reuse distances. Only
decode counts: a prompt reads each of its experts once, whatever the policy.
"""

from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from .policy import Key, Policy
from .trace import Trace

# Rows compared at once for stack distances: wide enough for numpy, small enough for the cache.
_BLOCK = 256


@dataclass(frozen=True)
class Requests:
    """The experts that decode asked for; an expert is a number, its place in ``names``."""

    experts: np.ndarray
    """[accesses], those of all calls one after another, ascending within a call."""
    starts: np.ndarray
    """[calls + 1]: call ``i`` needs ``experts[starts[i]:starts[i + 1]]`` all at the same time."""
    names: list[Key]
    """(layer, expert) of each number, in this order."""
    tokens: int

    @property
    def largest_call(self) -> int:
        """The least number of slots that works."""
        return int(np.diff(self.starts).max(initial=0))

    @property
    def working_set(self) -> int:
        """Experts that one token needs, on average."""
        return round(len(self.experts) / self.tokens) if self.tokens else 0

    def last_tokens(self, tokens: int) -> "Requests":
        """The last ``tokens``, or all where there are fewer."""
        tokens = min(tokens, self.tokens)
        first = (len(self.starts) - 1) * (self.tokens - tokens) // max(self.tokens, 1)
        starts = self.starts[first:]
        return Requests(self.experts[starts[0] :], starts - starts[0], self.names, tokens)


def decode_requests(trace: Trace) -> Requests:
    """Who asked for what, step by step: the calls for a single token."""
    decode = trace.calls["tokens"] == 1
    sizes = np.where(decode, trace.calls["k"], 0).astype(np.int64)
    of_decode = np.repeat(decode, np.diff(trace.offsets))
    layers = np.repeat(trace.calls["layer"][decode].astype(np.int64), sizes[decode])
    keys = layers << 16 | trace.experts[of_decode]
    # A call that names an expert twice needs it once.
    calls = np.repeat(np.arange(np.count_nonzero(decode)), sizes[decode])
    pairs = distinct(calls << 32 | keys)
    keys = pairs & 0xFFFFFFFF
    present = np.zeros(int(keys.max(initial=-1)) + 1, bool)
    present[keys] = True
    names = np.flatnonzero(present)
    numbers = np.cumsum(present, dtype=np.int32) - 1
    starts = np.searchsorted(pairs, np.arange(np.count_nonzero(decode) + 1) << 32)
    return Requests(
        experts=numbers[keys],
        starts=starts,
        names=[(key >> 16, key & 0xFFFF) for key in names.tolist()],
        tokens=int(np.bincount(trace.calls["layer"][decode]).max(initial=0)),
    )


@dataclass(frozen=True)
class Outcome:
    """What a simulated pool did."""

    hits: int
    calls_resident: np.ndarray
    """[names] int64: at the end of how many calls each expert was in the pool."""


def simulate(requests: Requests, slots: int, policy: Policy) -> Outcome:
    """Run ``policy``, a new one, with a pool of ``slots`` that starts empty.

    As the bank does it: what is there is used first, and all experts of a call stay until its end.

    Raises:
        ValueError: there are fewer slots than a call needs.
    """
    _check_slots(requests, slots)
    experts = [requests.names[expert] for expert in requests.experts]
    starts = requests.starts.tolist()
    since: dict[Key, int] = {}  # resident -> the call that loaded it
    resident = Counter()
    hits = 0
    for number, (start, end) in enumerate(pairwise(starts)):
        call = experts[start:end]
        missing = []
        for key in call:
            if key in since:
                policy.used(key, True)
                policy.hold(key)
            else:
                missing.append(key)
        hits += len(call) - len(missing)
        for key in missing:
            if len(since) == slots:
                victim = policy.victim()
                resident[victim] += number - since.pop(victim)
            policy.used(key, False)
            since[key] = number
        for key in call:
            policy.offer(key)
    for key, number in since.items():
        resident[key] += len(starts) - 1 - number
    return Outcome(hits, np.array([resident[key] for key in requests.names], np.int64))


def optimal_hits(requests: Requests, slots: int) -> int:
    """Hits of the best possible decisions, which know the future (Belady): an upper bound.

    Evicts what is needed last. No policy does better, for calls need all their experts at once
    and all experts cost the same to read.

    Raises:
        ValueError: there are fewer slots than a call needs.
    """
    _check_slots(requests, slots)
    count, following = len(requests.experts), _next_use(requests.experts).tolist()
    experts = requests.experts.tolist()
    starts = requests.starts.tolist()
    resident: dict[int, int] = {}  # expert -> when it is needed next
    # Minus the time of next use, so that the last comes first. Times are distinct and name the
    # expert. What was used meanwhile leaves an entry in the past behind, which never comes up:
    # more recent ones suffice for every eviction. (The call's own entries are the present.)
    heap: list[int] = []
    hits = 0
    for start, end in pairwise(starts):
        call = experts[start:end]
        missing = sum(expert not in resident for expert in call)
        hits += end - start - missing
        for _ in range(len(resident) + missing - slots):
            time = -heappop(heap)
            del resident[experts[time] if time < count else time - count]
        for expert, time in zip(call, following[start:end], strict=True):
            resident[expert] = time
            heappush(heap, -time)
        if len(heap) > 4 * slots + 1000:
            heap = [-time for time in resident.values()]
            heapify(heap)
    return hits


def stack_distances(experts: np.ndarray) -> np.ndarray:
    """How many other experts were used since each one's previous use; -1 at its first.

    [accesses] -> [accesses] int64. With strict LRU an access hits if its distance is less than
    the number of slots.
    """
    previous = _previous_use(experts)
    distances = np.full(len(experts), -1, np.int64)
    last_uses = np.empty(0, np.int64)  # of every expert before the block, ascending
    earlier = np.tri(_BLOCK, k=-1, dtype=bool)
    for start in range(0, len(experts), _BLOCK):
        before = previous[start : start + _BLOCK]
        size = len(before)
        # Uses in the block that are the first of their expert since `before` ...
        counts = np.count_nonzero((before < before[:, None]) & earlier[:size, :size], axis=1)
        # ... and experts last used between `before` and the block. Where `before` is in the block
        # itself, all up to it were counted as such first uses.
        place = np.searchsorted(last_uses, before)
        old, again = (before >= 0) & (before < start), before >= start
        counts[old] += len(last_uses) - 1 - place[old]
        counts[again] -= before[again] - start + 1
        distances[start : start + size] = np.where(before < 0, -1, counts)
        used_last = np.ones(size, bool)
        used_last[before[again] - start] = False
        last_uses = np.concatenate(
            [np.delete(last_uses, place[old]), start + np.flatnonzero(used_last)]
        )
    return distances


def distinct(values: np.ndarray) -> np.ndarray:
    """[n] integers of at least 0 -> ascending, each once."""
    # What comes here is nearly in order: sorting it is many times faster than np.unique.
    values = np.sort(values, kind="stable")
    return values[np.diff(values, prepend=-1) > 0]


def _check_slots(requests: Requests, slots: int) -> None:
    if slots < requests.largest_call:
        raise ValueError(f"{slots} slots cannot hold the {requests.largest_call} that a call needs")


def _next_use(experts: np.ndarray) -> np.ndarray:
    """[accesses]: when the same expert is used next; the number of accesses + expert if never."""
    order = np.argsort(experts, kind="stable")
    result = len(experts) + experts.astype(np.int64)
    same = experts[order[1:]] == experts[order[:-1]]
    result[order[:-1][same]] = order[1:][same]
    return result


def _previous_use(experts: np.ndarray) -> np.ndarray:
    """[accesses]: when the same expert was used last; -1 if never."""
    order = np.argsort(experts, kind="stable")
    result = np.full(len(experts), -1, np.int64)
    same = experts[order[1:]] == experts[order[:-1]]
    result[order[1:][same]] = order[:-1][same]
    return result
