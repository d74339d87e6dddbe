"""The prompt cache's part in memory."""

from .cache_parts import Arrays, total_bytes
from .prefix_tree import Place, PrefixTree


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

    def forget(self, key: str) -> None:
        """Drop a state, and what only it needed."""
        self.tree.prune(key)
