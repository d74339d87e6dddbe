"""A picture ready for the model: its patches, and the ids that stand for it in a prompt."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Medium:
    """An image, or a clip of a few frames. ``width`` and ``height`` are as it was given."""

    pixels: np.ndarray
    """Patches frame by frame and row by row: ``[t * rows * columns, 3, p, p]`` uint8."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of patches."""
    tokens: int
    """Vectors that the model sees of it. A clip has as many as a frame."""
    width: int
    height: int
    table: np.ndarray
    """``[256, 3]`` float32: what the tower reads for a byte, in each colour."""

    def values(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """What the tower reads for patches ``start`` to ``stop``: ``[N, 3, p, p]`` float32."""
        colours = np.arange(3)[:, None, None]
        return self.table[self.pixels[start:stop], colours]

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digits that stand for all that the tower sees."""
        digest = hashlib.sha256(repr((self.grid, self.pixels.shape, self.tokens)).encode())
        digest.update(self.table.tobytes())
        digest.update(self.pixels.tobytes())
        return digest.hexdigest()

    @cached_property
    def ids(self) -> list[int]:
        """A negative number for every vector, that no token has and no other medium's vector.

        In a prompt they stand where the vectors will, so that whoever compares or digests ids
        compares pictures too.
        """
        # 60 bits of the digest; the bit above keeps clear of small numbers, and fits 64 bits.
        first = -(1 << 61) - int(self.digest[:15], 16)
        return list(range(first, first - self.tokens, -1))
