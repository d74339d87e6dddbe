"""A pool of threads that read experts into memory that somebody else owns.

Owns the queue (demand before prefetch), the threads, and the count of what was read. Knows
nothing about experts or slots, and leaves reading itself to :mod:`.disk`.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue
from types import TracebackType

from ..errors import CheckpointError, K3Error, UnsupportedError
from .disk import Block, Bounce, Disk, Files, Run, cut, fill


class Ticket:
    """One submitted read. It is done when nothing writes to its buffers any more."""

    def __init__(self, reader: "ExpertReader", blocks: deque[Block]) -> None:
        self.nbytes = sum(block.nbytes for block in blocks)
        self.error: K3Error | CancelledError | None = None
        """Why the buffers are not full, once done."""
        self.began: float | None = None
        self.ended: float | None = None
        """``time.perf_counter()`` when the first block was begun and the last one was over."""
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
            UnsupportedError: direct reads were asked for and do not work there.
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
        self._files = Files(disk or Disk(), direct)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._urgent: OrderedDict[Ticket, None] = OrderedDict()  # with blocks not begun
        self._prefetch: OrderedDict[Ticket, None] = OrderedDict()
        # One True for each block, so that a thread that takes one finds work, unless it was
        # dropped; one False for each thread at the end.
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._flying = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-reader-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy_seconds(self) -> float:
        """Time in which at least one read was going on."""
        with self._lock:
            going_on = time.perf_counter() - self._busy_since if self._flying else 0.0
            return self._busy_seconds + going_on

    def submit(self, runs: Sequence[Run], *, urgent: bool = True) -> Ticket:
        """Read ``runs``; if ``urgent``, before everything that is not. Keep the buffers alive.

        Raises:
            ValueError: a buffer is not writable or not contiguous, or the reader is closed.
        """
        ticket = Ticket(self, deque(block for run in runs for block in cut(*run)))
        blocks = len(ticket._blocks)
        with self._lock:
            if self._closed:
                raise ValueError("the reader is closed")
            if blocks:
                (self._urgent if urgent else self._prefetch)[ticket] = None
            else:
                ticket._over.set()
        for _ in range(blocks):
            self._permits.put(True)
        return ticket

    def mode(self, path: str) -> str:
        """How ``path`` is read: ``direct`` or ``buffered``.

        Raises:
            CheckpointError: it cannot be opened.
            UnsupportedError: direct reads were asked for and do not work there.
        """
        try:
            return "direct" if self._files.get(path).direct else "buffered"
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror}") from None

    def drain(self) -> None:
        """Drop what has not been begun, and wait until nothing is written to any buffer."""
        with self._lock:
            for ticket in (*self._urgent, *self._prefetch):
                self._drop(ticket, CancelledError("the read was cancelled"))
            self._idle.wait_for(lambda: not self._flying)

    def close(self) -> None:
        """Drop what has not been begun, wait for the rest, close the files. Idempotent."""
        with self._lock:
            self._closed = True
            for ticket in (*self._urgent, *self._prefetch):
                self._drop(ticket, CancelledError("the reader was closed"))
        for _ in self._threads:
            self._permits.put(False)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._files.close()

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
        with self._lock:
            if ticket in self._prefetch:
                del self._prefetch[ticket]
                self._urgent[ticket] = None

    def _drop(self, ticket: Ticket, error: K3Error | CancelledError) -> None:
        """Forget what has not been begun of ``ticket``. The lock is held."""
        ticket.error = ticket.error or error
        ticket._blocks.clear()
        self._urgent.pop(ticket, None)
        self._prefetch.pop(ticket, None)
        if not ticket._flying:
            ticket._over.set()

    def _work(self) -> None:
        bounce = Bounce()
        while self._permits.get():
            self._read_block(bounce)

    def _read_block(self, bounce: Bounce) -> None:
        # Not in the loop: a thread that waits there must not keep a former block's buffers alive.
        begun = self._begin()
        if begun is None:
            return
        ticket, block = begun
        error: K3Error | None = CheckpointError(f"{block.path}: a reader thread died")
        done = calls = 0
        try:
            file = self._files.get(block.path)
            for n in fill(self._files.disk, file, block, bounce):
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
            # Also if something else was raised: whoever waits must not wait for ever.
            self._end(ticket, error, done, calls)

    def _begin(self) -> tuple[Ticket, Block] | None:
        with self._lock:
            queue = self._urgent or self._prefetch
            if not queue:
                return None
            ticket = next(iter(queue))
            block = ticket._blocks.popleft()
            if not ticket._blocks:
                del queue[ticket]
            now = time.perf_counter()
            if ticket.began is None:
                ticket.began = now
            if not self._flying:
                self._busy_since = now
            ticket._flying += 1
            self._flying += 1
            return ticket, block

    def _end(self, ticket: Ticket, error: K3Error | None, nbytes: int, calls: int) -> None:
        with self._lock:
            self.read_bytes += nbytes
            self.read_calls += calls
            ticket.ended = time.perf_counter()
            ticket._flying -= 1
            self._flying -= 1
            if not self._flying:
                self._busy_seconds += ticket.ended - self._busy_since
            if error is not None:
                self._drop(ticket, error)
            elif not ticket._flying and not ticket._blocks:
                ticket._over.set()
            if not self._flying:
                self._idle.notify_all()
