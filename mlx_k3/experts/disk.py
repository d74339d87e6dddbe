"""Bytes of files into buffers, past the system's cache where that works.

Owns direct and buffered reading, alignment, short reads and the errors. Knows nothing about
threads, experts or slots: a run is a file, an offset, and buffers to fill.
"""

import contextlib
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError, UnsupportedError

# A run is read in equal parts of at most this, by several threads: few calls, no long tail.
# Far below the 2 GiB that no system reads in one call.
BLOCK_BYTES = 8 * 2**20
# Direct reads want addresses, offsets and lengths that are multiples of this: of the drive's block
# on Linux; of a page on macOS, which otherwise goes through its cache.
ALIGNMENT = 16384 if sys.platform == "darwin" else 4096
BOUNCE_BYTES = 2 * 2**20
# Buffers in one call: what Linux and macOS allow.
MAX_BUFFERS = 1024

Run = tuple[str, int, Sequence[memoryview]]
"""A file, an offset, and writable buffers to fill from there on, back to back."""


class Disk:
    """The system calls of a reader; tests put one that fails in its place."""

    def open(self, path: str, direct: bool) -> int:
        """A descriptor for reading, past the system's cache if ``direct``."""
        fd = os.open(path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0))
        if direct and sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return fd

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill ``buffers`` from ``offset`` on; how many bytes came, 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)


class File(NamedTuple):
    """An open file."""

    path: str
    fd: int
    direct: bool


class Files:
    """Files by path, each opened once and kept. May be used from any thread."""

    def __init__(self, disk: Disk, direct: bool | None) -> None:
        """``direct`` None: wherever one direct read works, tried once a file system."""
        self.disk = disk
        self._direct = direct
        self._direct_works: dict[int, bool] = {}  # by file system
        self._files: dict[str, File] = {}
        self._lock = threading.Lock()

    def get(self, path: str) -> File:
        """The open file at ``path``.

        Raises:
            OSError: it cannot be opened.
            UnsupportedError: direct reads were asked for and do not work there.
        """
        with self._lock:
            file = self._files.get(path)
            if file is None:
                direct = self._reads_directly(path)
                file = self._files[path] = File(path, self.disk.open(path, direct), direct)
            return file

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            for file in self._files.values():
                os.close(file.fd)
            self._files.clear()

    def _reads_directly(self, path: str) -> bool:
        if self._direct is False:
            return False
        system = os.stat(path).st_dev
        if system not in self._direct_works:
            self._direct_works[system] = _direct_works(self.disk, path)
        if self._direct and not self._direct_works[system]:
            raise UnsupportedError(f"{path}: its file system allows no direct reads")
        return self._direct_works[system]


def _direct_works(disk: Disk, path: str) -> bool:
    """Whether one block of ``path`` can be read directly."""
    with contextlib.suppress(OSError):
        fd = disk.open(path, True)
        try:
            with mmap.mmap(-1, 2 * ALIGNMENT) as memory, memoryview(memory) as buffer:
                # At an address that is aligned, but no better than that.
                disk.read(fd, [buffer[ALIGNMENT:]], 0)
                return True
        finally:
            os.close(fd)
    return False


class Block(NamedTuple):
    """What one thread reads at a time."""

    path: str
    offset: int
    nbytes: int
    buffers: list[memoryview]


def cut(path: str, offset: int, buffers: Sequence[memoryview]) -> Iterator[Block]:
    """A run in equal blocks, cut at aligned places of the file so that no two overlap there.

    Raises:
        ValueError: a buffer is not writable or not contiguous.
    """
    if any(buffer.readonly or not buffer.c_contiguous for buffer in buffers):
        raise ValueError("a buffer to read into must be writable and contiguous")
    buffers = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    total = sum(map(len, buffers))
    end = offset + total
    parts = max(1, -(-total // BLOCK_BYTES))
    size = -(-(offset % ALIGNMENT + total) // parts // ALIGNMENT) * ALIGNMENT
    while offset < end:
        want = min(end, (offset + size) // ALIGNMENT * ALIGNMENT) - offset
        block = Block(path, offset, *take(buffers, want))
        yield block
        offset += block.nbytes


def take(buffers: list[memoryview], nbytes: int) -> tuple[int, list[memoryview]]:
    """Remove the first ``nbytes`` from ``buffers``, or fewer if they come in too many pieces."""
    part: list[memoryview] = []
    taken = 0
    while taken < nbytes and len(part) < MAX_BUFFERS:
        piece = buffers[0][: nbytes - taken]
        part.append(piece)
        taken += len(piece)
        if len(piece) == len(buffers[0]):
            buffers.pop(0)
        else:
            buffers[0] = buffers[0][len(piece) :]
    return taken, part


class Bounce:
    """Aligned memory of one thread, for direct reads of what is not aligned; made when needed."""

    _array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        """[BOUNCE_BYTES] uint8, at the start of a page."""
        if self._array is None:
            self._array = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
        return self._array


def fill(disk: Disk, file: File, block: Block, bounce: Bounce) -> Iterator[int]:
    """Fill the block's buffers; yields, for each call, how many bytes it brought.

    Raises:
        CheckpointError: the file ends first.
        OSError: it cannot be read.
    """
    offset, left, buffers = block.offset, block.nbytes, list(block.buffers)
    while left:
        if file.direct and not _aligned(offset, buffers):
            n = _fill_by_bounce(disk, file.fd, offset, left, buffers, bounce)
        else:
            n = disk.read(file.fd, buffers, offset)
            take(buffers, n)
        if n <= 0:
            raise CheckpointError(
                f"{file.path} ends {left:,} bytes early, at byte {offset:,}; "
                "it was cut since it was opened: convert or download it again"
            )
        offset, left = offset + n, left - n
        yield n


def _aligned(offset: int, buffers: list[memoryview]) -> bool:
    return offset % ALIGNMENT == 0 and not any(
        len(b) % ALIGNMENT or np.frombuffer(b, np.uint8).__array_interface__["data"][0] % ALIGNMENT
        for b in buffers
    )


def _fill_by_bounce(
    disk: Disk, fd: int, offset: int, left: int, buffers: list[memoryview], bounce: Bounce
) -> int:
    """Read the aligned span around ``offset`` and copy what is wanted of it."""
    start = offset // ALIGNMENT * ALIGNMENT
    span = min(BOUNCE_BYTES, -(-(offset + left) // ALIGNMENT) * ALIGNMENT - start)
    end = start + disk.read(fd, [bounce.array[:span].data], start)
    n = min(end - offset, left)
    source = bounce.array[offset - start :]
    for part in take(buffers, n)[1]:
        # Unlike the assignment of a slice, this lets other threads run.
        np.copyto(np.frombuffer(part, np.uint8), source[: len(part)])
        source = source[len(part) :]
    return n
