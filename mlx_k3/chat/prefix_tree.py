"""A tree of token prefixes with a budget of bytes: what is kept for which beginning of a text.

A block node stands for ``BLOCK_TOKENS`` ids that follow its parent's, a state node for a place
somewhere behind a block, where reading can be taken up again. A node's key digests all ids up to
its end, so that texts which begin alike meet in the same nodes. Owns keys, look-up and eviction;
knows neither arrays nor files.
"""

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

BLOCK_TOKENS = 512
KEY_DIGITS = 32


class Place(NamedTuple):
    """A node's place: ``end`` ids lead to it. Blocks have children, states do not."""

    key: str
    parent: str
    end: int
    is_state: bool


def path(root: str, ids: Sequence[int], end: int) -> list[Place]:
    """The blocks that cover ``ids[:end]`` as far as whole ones do, and the state at ``end``."""
    places = list(islice(_blocks(root, ids), end // BLOCK_TOKENS))
    parent = places[-1].key if places else root
    return [*places, _state(parent, ids, end)]


def states(
    root: str, ids: Sequence[int], ends: Collection[int], has: Callable[[str], bool]
) -> Iterator[list[Place]]:
    """The paths to all states that ``has`` knows and ``ids`` reach, the shortest first.

    ``ends`` are all places where there are states, of whatever text.
    """
    places: list[Place] = []
    blocks = _blocks(root, ids)
    for end in sorted(end for end in ends if 0 < end <= len(ids)):
        while len(places) < end // BLOCK_TOKENS:
            block = next(blocks)
            if not has(block.key):
                return
            places.append(block)
        state = _state(places[-1].key if places else root, ids, end)
        if has(state.key):
            yield [*places, state]


def _blocks(root: str, ids: Sequence[int]) -> Iterator[Place]:
    parent = root
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        key = _digest(parent, "block", ids[end - BLOCK_TOKENS : end])
        yield Place(key, parent, end, is_state=False)
        parent = key


def _state(parent: str, ids: Sequence[int], end: int) -> Place:
    tail = ids[end - end % BLOCK_TOKENS : end]
    return Place(_digest(parent, "state", tail), parent, end, is_state=True)


def _digest(parent: str, kind: str, ids: Sequence[int]) -> str:
    text = f"{parent} {kind} ".encode() + array("q", ids).tobytes()
    return hashlib.sha256(text).hexdigest()[:KEY_DIGITS]


@dataclass
class _Node:
    place: Place
    nbytes: int
    content: Any
    used: int


class PrefixTree:
    """Nodes with contents, of at most ``limit_bytes`` together (None: any number).

    What was used longest ago goes first, and only what nothing else needs: a block stays as long
    as anything lies behind it.
    """

    def __init__(self, limit_bytes: int | None):
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._nodes: dict[str, _Node] = {}
        # Kept for parents that are not there, too: those may still come.
        self._children: defaultdict[str, set[str]] = defaultdict(set)
        self._clock = 0
        self.ends: Counter[int] = Counter()
        """Where there are states, and how many."""
        self.states = 0

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def __getitem__(self, key: str) -> Any:
        return self._nodes[key].content

    def fits(self, nbytes: int) -> bool:
        """Whether a path of this size can be kept at all."""
        return self.limit_bytes is None or nbytes <= self.limit_bytes

    def nbytes_of(self, key: str) -> int:
        """Size of a node."""
        return self._nodes[key].nbytes

    def path_to(self, key: str) -> list[Place]:
        """The places that lead to a node, itself the last; none if any is missing."""
        places: list[Place] = []
        while key in self._nodes:
            places.insert(0, self._nodes[key].place)
            key = places[0].parent
        is_whole = places and places[0].end // BLOCK_TOKENS == (0 if places[0].is_state else 1)
        return places if is_whole else []

    def add(self, place: Place, nbytes: int, content: Any = None) -> None:
        """Put a node in its place, as the one used last."""
        self.remove(place.key)
        self._nodes[place.key] = _Node(place, nbytes, content, self._tick())
        self._children[place.parent].add(place.key)
        self.nbytes += nbytes
        if place.is_state:
            self.ends[place.end] += 1
            self.states += 1

    def use(self, key: str) -> None:
        """Note that a node was of use."""
        self._nodes[key].used = self._tick()

    def remove(self, key: str) -> None:
        """Take a node away, if it is there."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        self.nbytes -= node.nbytes
        siblings = self._children[node.place.parent]
        siblings.discard(key)
        if not siblings:
            del self._children[node.place.parent]
        if node.place.is_state:
            self.states -= 1
            self.ends[node.place.end] -= 1
            if not self.ends[node.place.end]:
                del self.ends[node.place.end]

    def prune(self, key: str) -> list[Place]:
        """Take a node away, and the blocks before it that led only there."""
        removed = []
        while key in self._nodes and key not in self._children:
            place = self._nodes[key].place
            self.remove(key)
            removed.append(place)
            key = place.parent
        return removed

    def shrink(self, spare_bytes: int = 0) -> list[Place]:
        """Take nodes away until the limit is kept with ``spare_bytes`` to spare."""
        removed: list[Place] = []
        if self.limit_bytes is None:
            return removed
        while self._nodes and self.nbytes > self.limit_bytes - spare_bytes:
            leaves = (n for key, n in self._nodes.items() if key not in self._children)
            oldest = min(leaves, key=lambda n: n.used)
            removed += self.prune(oldest.place.key)
        return removed

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
