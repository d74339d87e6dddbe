"""Reading experts from disk into memory that somebody else owns: a pool of reader threads.

Owns the queue (demand before prefetch), direct and buffered reads, and what was read. Knows
nothing about experts or slots: a read is a file, an offset, and buffers to fill.
"""

import contextlib
import fcntl
import mmap
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError, UnsupportedError

# A run is read in equal parts of at most this, by several threads: few calls, no long tail.
# Far below the 2 GiB that no system reads in one call.
BLOCK_BYTES = 8 * 2**20
# O_DIRECT wants addresses, offsets and lengths that are multiples of the drive's block.
ALIGNMENT = 4096
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


class Ticket:
    """One submitted read. It is done when nothing writes to its buffers any more."""

    def __init__(self, reader: "ExpertReader", blocks: deque["_Block"]) -> None:
        self.nbytes = sum(block.nbytes for block in blocks)
        self.error: CheckpointError | CancelledError | None = None
        """Why the buffers are not full, once done."""
        self.began: float | None = None
        self.ended: float | None = None
        """``time.perf_counter()`` when the first read began and the last one ended."""
        self._reader = reader
        self._blocks = blocks  # not begun
        self._flying = 0
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has been read, has failed or was cancelled."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the buffers are full; False if that takes more than ``timeout`` seconds.

        Raises:
            CheckpointError: a file ended early or could not be read.
            CancelledError: it was cancelled, or the reader closed.
        """
        over = self._over.wait(timeout)
        if over and self.error is not None:
            raise self.error
        return over

    def wait_quietly(self, timeout: float | None = None) -> bool:
        """Like :meth:`wait`, but raises nothing: look at :attr:`error`."""
        return self._over.wait(timeout)

    def cancel(self) -> bool:
        """Drop it if no part of it has been begun; else it goes on, and False is returned."""
        return self._reader._cancel(self)

    def promote(self) -> None:
        """Somebody waits for it now: let it go before every prefetch."""
        self._reader._promote(self)


class _File(NamedTuple):
    path: str
    fd: int
    direct: bool


class _Block(NamedTuple):
    """What one thread reads at a time."""

    path: str
    offset: int
    nbytes: int
    buffers: list[memoryview]


class ExpertReader:
    """``threads`` threads that fill buffers from files.

    ``direct`` reads go past the system's cache, straight into the buffers where these and the
    file's offsets are aligned to 4 KiB, else by way of a small buffer. None tries it on each file
    system and falls back to buffered reads: :meth:`mode` says what came of it.

    >>> with ExpertReader() as reader:
    ...     ticket = reader.submit([(path, 4096, [memoryview(buffer)])])
    ...     ticket.wait()
    """

    def __init__(
        self, threads: int = 8, direct: bool | None = None, *, disk: Disk | None = None
    ) -> None:
        self.read_bytes = 0
        """Bytes put into buffers, counted where a read returns."""
        self.read_calls = 0
        self.busy_seconds = 0.0
        """Time in which at least one read was going on."""
        self._direct = direct
        self._disk = disk or Disk()
        self._files: dict[str, _File] = {}
        self._direct_works: dict[int, bool] = {}  # by file system
        self._files_lock = threading.Lock()
        self._lock = threading.Lock()
        self._queues: tuple[OrderedDict[Ticket, None], ...] = (OrderedDict(), OrderedDict())
        self._permits: SimpleQueue[bool] = SimpleQueue()  # one for each block, then one to quit
        self._flying = 0
        self._busy_since = 0.0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-reader-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, runs: Sequence[Run], *, urgent: bool = True) -> Ticket:
        """Read ``runs``, before everything that is not ``urgent``. The buffers must stay alive.

        Raises:
            ValueError: a buffer is not writable or not contiguous, or the reader is closed.
        """
        blocks = deque(block for run in runs for block in _cut(*run))
        ticket = Ticket(self, blocks)
        count = len(blocks)
        with self._lock:
            if self._closed:
                raise ValueError("the reader is closed")
            if blocks:
                self._queues[0 if urgent else 1][ticket] = None
            else:
                ticket._over.set()
        for _ in range(count):
            self._permits.put(True)
        return ticket

    def mode(self, path: str) -> str:
        """How ``path`` is read: ``direct`` or ``buffered``.

        Raises:
            CheckpointError: it cannot be opened.
            UnsupportedError: direct reads were asked for and do not work there.
        """
        try:
            return "direct" if self._file(path).direct else "buffered"
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror}") from None

    def close(self) -> None:
        """Drop what has not been begun, wait for the rest, close the files. Idempotent."""
        with self._lock:
            self._closed = True
            tickets = [ticket for queue in self._queues for ticket in queue]
            for ticket in tickets:
                self._drop(ticket, CancelledError("the reader was closed"))
        for _ in self._threads:
            self._permits.put(False)
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        self._threads.clear()

    def __enter__(self) -> "ExpertReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.done or ticket.began is not None:
                return False
            self._drop(ticket, CancelledError("the read was cancelled"))
            return True

    def _promote(self, ticket: Ticket) -> None:
        urgent, prefetch = self._queues
        with self._lock:
            if ticket in prefetch:
                del prefetch[ticket]
                urgent[ticket] = None

    def _drop(self, ticket: Ticket, error: CheckpointError | CancelledError) -> None:
        """Forget what has not been begun of ``ticket``. The lock is held."""
        ticket.error = ticket.error or error
        ticket._blocks.clear()
        for queue in self._queues:
            queue.pop(ticket, None)
        if not ticket._flying:
            ticket._over.set()

    def _work(self) -> None:
        bounce = _Bounce()
        while self._permits.get():
            begun = self._begin()
            if begun is None:  # Its ticket was dropped.
                continue
            ticket, block = begun
            error: CheckpointError | None = CheckpointError(f"{block.path}: a reader thread died")
            done = calls = 0
            try:
                file = self._file(block.path)
                for n in _read(self._disk, file, block, bounce):
                    done, calls = done + n, calls + 1
                error = None
            except OSError as e:
                error = CheckpointError(
                    f"{block.path}: reading at byte {block.offset + done:,} failed: {e.strerror}; "
                    "check the drive"
                )
            except (CheckpointError, UnsupportedError) as e:
                error = e
            finally:
                self._end(ticket, error, done, calls)

    def _begin(self) -> tuple[Ticket, _Block] | None:
        with self._lock:
            queue = self._queues[0] or self._queues[1]
            if not queue:
                return None
            ticket = next(iter(queue))
            block = ticket._blocks.popleft()
            if not ticket._blocks:
                del queue[ticket]
            ticket._flying += 1
            self._flying += 1
            now = time.perf_counter()
            if ticket.began is None:
                ticket.began = now
            if self._flying == 1:
                self._busy_since = now
            return ticket, block

    def _end(self, ticket: Ticket, error: CheckpointError | None, nbytes: int, calls: int) -> None:
        with self._lock:
            self.read_bytes += nbytes
            self.read_calls += calls
            now = time.perf_counter()
            ticket._flying -= 1
            self._flying -= 1
            if not self._flying:
                self.busy_seconds += now - self._busy_since
            if error is not None:
                self._drop(ticket, error)
            if not ticket._flying and not ticket._blocks:
                ticket.ended = now
                ticket._over.set()

    def _file(self, path: str) -> _File:
        """``path``, opened once; raises OSError and UnsupportedError."""
        with self._files_lock:
            if path not in self._files:
                self._files[path] = self._open(path)
            return self._files[path]

    def _open(self, path: str) -> _File:
        if self._direct is False:
            return _File(path, self._disk.open(path, False), False)
        system = os.stat(path).st_dev
        if system not in self._direct_works:
            self._direct_works[system] = _direct_works(self._disk, path)
        direct = self._direct_works[system]
        if self._direct and not direct:
            raise UnsupportedError(f"{path}: its file system allows no direct reads")
        return _File(path, self._disk.open(path, direct), direct)


class _Bounce:
    """Aligned memory of one thread, for direct reads of what is not aligned; made when needed."""

    _array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
        return self._array


def _cut(path: str, offset: int, buffers: Sequence[memoryview]) -> Iterator[_Block]:
    """A run in equal blocks, cut at aligned places of the file so that no two blocks overlap."""
    buffers = [_as_bytes(buffer) for buffer in buffers if len(buffer)]
    total = sum(map(len, buffers))
    end = offset + total
    parts = max(1, -(-total // BLOCK_BYTES))
    size = -(-total // parts // ALIGNMENT) * ALIGNMENT
    while offset < end:
        want = min(end, (offset + size) // ALIGNMENT * ALIGNMENT) - offset
        part, taken = _take(buffers, want)
        yield _Block(path, offset, taken, part)
        offset += taken


def _as_bytes(buffer: memoryview) -> memoryview:
    if buffer.readonly or not buffer.c_contiguous:
        raise ValueError("a buffer to read into must be writable and contiguous")
    return buffer.cast("B")


def _take(buffers: list[memoryview], nbytes: int) -> tuple[list[memoryview], int]:
    """The first ``nbytes`` of ``buffers``, or fewer if that is too many buffers; removes them."""
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
    return part, taken


def _read(disk: Disk, file: _File, block: _Block, bounce: _Bounce) -> Iterator[int]:
    """Fill the block's buffers; yields, for each call, how many bytes it brought."""
    offset, left, buffers = block.offset, block.nbytes, list(block.buffers)
    while left:
        if file.direct and not _aligned(offset, buffers):
            start = offset // ALIGNMENT * ALIGNMENT
            span = min(BOUNCE_BYTES, -(-(offset + left) // ALIGNMENT) * ALIGNMENT - start)
            n = disk.read(file.fd, [bounce.array[:span].data], start)
            n = min(start + n - offset, left)
            source = bounce.array[offset - start :]
            for part in _take(buffers, max(n, 0))[0]:
                # Unlike a slice assignment, this lets other threads run.
                np.copyto(np.frombuffer(part, np.uint8), source[: len(part)])
                source = source[len(part) :]
        else:
            n = disk.read(file.fd, buffers, offset)
            _take(buffers, n)
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


def _direct_works(disk: Disk, path: str) -> bool:
    """Whether one block of ``path`` can be read directly."""
    with contextlib.suppress(OSError):
        fd = disk.open(path, True)
        try:
            with mmap.mmap(-1, 2 * ALIGNMENT) as memory:
                # At an address that is aligned, but no more than that.
                disk.read(fd, [memoryview(memory)[ALIGNMENT:]], 0)
                return True
        finally:
            os.close(fd)
    return False
