"""How fast a disk gives experts: the reader's own speed on files that are there.

Reads each place once, in random order, with as many requests at a time as decoding makes.
"""

import mmap
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.extents import merge, open_experts
from ..errors import CheckpointError
from .disk import ALIGNMENT
from .reader import ExpertReader, Ticket

SPAN_BYTES = 17_547_264  # an expert of K3
IN_FLIGHT = 16  # the experts of one layer
SECONDS = 5.0

_Span = list[tuple[str, int, int]]  # path, offset, nbytes


@dataclass(frozen=True)
class DiskSpeed:
    """What came of a measurement. ``mode`` is ``direct`` or ``buffered``."""

    path: str
    mode: str
    read_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate."""
        return self.read_bytes / self.seconds


def measure_disk(path: str | Path, seconds: float = SECONDS, seed: int = 0) -> DiskSpeed:
    """Read experts of the converted folder ``path``, or spans of that size of a file.

    Of another folder its largest file is read. Stops after ``seconds`` (but reads one), or when
    all was read.

    Raises:
        CheckpointError: nothing there is large enough, or it cannot be read.
    """
    spans = list(_spans(Path(path)))
    random.Random(seed).shuffle(spans)
    for name in {run[0] for span in spans for run in span}:
        _forget(name)
    largest = max(sum(run[2] for run in span) for span in spans)
    room = -(-largest // ALIGNMENT) * ALIGNMENT
    memory = memoryview(mmap.mmap(-1, room * IN_FLIGHT))
    memory[:: mmap.PAGESIZE] = bytes(len(memory[:: mmap.PAGESIZE]))  # there before the clock runs
    free = [memory[i * room : (i + 1) * room] for i in range(IN_FLIGHT)]
    flying: deque[tuple[Ticket, memoryview]] = deque()
    with ExpertReader() as reader:
        mode = reader.mode(spans[0][0][0])
        start = time.perf_counter()
        for span in spans:
            if flying and time.perf_counter() - start > seconds:
                break
            if not free:
                ticket, place = flying.popleft()
                ticket.wait()
                free.append(place)
            place = free.pop()
            flying.append((reader.submit(_into(span, place)), place))
        for ticket, _ in flying:
            ticket.wait()
        took = time.perf_counter() - start
    return DiskSpeed(str(path), mode, reader.read_bytes, took)


def _spans(path: Path) -> Iterator[_Span]:
    if path.is_dir() and (path / "config.json").is_file():
        experts = open_experts(path)
        for layer in experts.layers:
            for expert in range(experts.count(layer)):
                yield [run[:3] for run in merge(experts.extents(layer, expert))]
        if experts.layers:
            return
    if path.is_dir():
        files = [p for p in path.iterdir() if p.is_file()]
        path = max(files, key=lambda p: p.stat().st_size, default=path)
    if not path.is_file() or path.stat().st_size < SPAN_BYTES:
        raise CheckpointError(
            f"{path} holds no file of {SPAN_BYTES:,} bytes or more to measure with; "
            "name a model folder or a large file"
        )
    for offset in range(0, path.stat().st_size - SPAN_BYTES + 1, SPAN_BYTES):
        yield [(str(path), offset, SPAN_BYTES)]


def _into(span: _Span, place: memoryview) -> list[tuple[str, int, list[memoryview]]]:
    runs, begin = [], 0
    for path, offset, nbytes in span:
        runs.append((path, offset, [place[begin : begin + nbytes]]))
        begin += nbytes
    return runs


def _forget(path: str) -> None:
    """Drop what the system's cache holds of a file, where that is possible."""
    if not hasattr(os, "posix_fadvise"):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
