"""A KDA layer's cache that keeps what its state was on the way.

A state belongs to all tokens before it and cannot be cut back. Who will want the one at some
place of a text has to say so before the text is read; then it costs nothing but its memory, even
where the whole text goes through a layer at once.
"""

from collections.abc import Collection

from mlx_lm.models.cache import ArraysCache


class RecordedState(ArraysCache):
    """Goes on where ``cache`` is, after ``position`` tokens, and keeps its content at ``stops``.

    A layer parts its input at :meth:`cuts`, so that the state passes every stop.
    """

    def __init__(self, cache: ArraysCache, position: int, stops: Collection[int]):
        super().__init__(len(cache.cache))
        self.state = cache.state
        self.position = position
        self._stops = frozenset(stops)
        self._kept: dict[int, list] = {}

    def cuts(self, tokens: int) -> list[int]:
        """Where among the next ``tokens`` there are stops."""
        ahead = (stop - self.position for stop in self._stops)
        return sorted(cut for cut in ahead if 0 < cut < tokens)

    def advance(self, N: int) -> None:
        """Called after ``N`` tokens have been taken up."""
        super().advance(N)
        self.position += N
        if self.position in self._stops:
            self._kept[self.position] = list(self.cache)

    def at(self, position: int) -> ArraysCache:
        """The cache as it was at the stop ``position``."""
        return _of(self._kept[position])

    def now(self) -> ArraysCache:
        """The cache as it is, without what was kept."""
        return _of(self.cache)


def _of(arrays: list) -> ArraysCache:
    cache = ArraysCache(len(arrays))
    cache.cache = list(arrays)
    return cache
