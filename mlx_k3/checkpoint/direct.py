"""Reading and writing past the system's page cache.

Gigabytes that pass once through the cache cost a copy and push out what is worth keeping. Linux
asks for aligned addresses, offsets and lengths in return (``O_DIRECT``); macOS for nothing
(``F_NOCACHE``). Where a file system cannot, the caller goes through the cache.
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

# The largest sector in use; every page size is a multiple of it.
SECTOR_BYTES = 4096
_WINDOW_BYTES = 8 * 2**20
# What direct calls answer where they are not possible.
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def aligned_buffer(nbytes: int) -> memoryview:
    """Memory that begins on a page; it costs nothing until it is used."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def set_direct(fd: int, on: bool) -> bool:
    """Ask for direct access to ``fd``, or give it up; whether the system agrees."""
    try:
        if hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(fd, fcntl.F_NOCACHE, int(on))
        elif hasattr(os, "O_DIRECT"):
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        else:
            return False
    except OSError as e:
        if e.errno not in _REFUSED:
            raise
        return False
    return True


class DirectReader:
    """A second, direct way into a file, for large reads at any offset."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._works = set_direct(self._fd, True)
        self._window = aligned_buffer(_WINDOW_BYTES)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` on as far as possible; how many bytes that was."""
        done = 0
        while self._works and done < len(buffer):
            skip = (offset + done) % SECTOR_BYTES
            wanted = -(-(skip + len(buffer) - done) // SECTOR_BYTES) * SECTOR_BYTES
            try:
                n = os.preadv(self._fd, [self._window[:wanted]], offset + done - skip)
            except OSError as e:
                if e.errno not in _REFUSED:
                    raise
                self._works = False
                break
            n = min(n - skip, len(buffer) - done)
            if n <= 0:
                break
            buffer[done : done + n] = self._window[skip : skip + n]
            done += n
        return done

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class DirectWriter:
    """Appends to a new file, past the page cache where a block's place and size allow it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._works = True
        self._is_direct = False
        self._position = 0

    def write(self, block: memoryview | bytes) -> None:
        """Append ``block``.

        Raises:
            OSError: as writing does.
        """
        view = memoryview(block)
        while view:
            self._choose(self._works and _is_aligned(view, self._position))
            try:
                n = os.write(self._fd, view[: 2**30])
            except OSError as e:
                if not self._is_direct or e.errno not in _REFUSED:
                    raise
                self._works = False
                continue
            self._position += n
            view = view[n:]

    def _choose(self, direct: bool) -> None:
        if direct != self._is_direct:
            self._works = set_direct(self._fd, direct)
            self._is_direct = direct and self._works


def _is_aligned(view: memoryview, offset: int) -> bool:
    if offset % SECTOR_BYTES or len(view) % SECTOR_BYTES:
        return False
    return np.frombuffer(view, np.uint8).ctypes.data % SECTOR_BYTES == 0
