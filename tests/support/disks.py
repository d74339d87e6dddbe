"""Disks that fail, stall and dawdle on request, and write down what was asked of them."""

import errno
import os
import random
import threading
from collections.abc import Sequence

import numpy as np

from mlx_k3.experts.disk import Disk


class FaultyDisk(Disk):
    """A real disk with faults.

    The reads numbered in ``fail_at``, from 0, raise EIO at once. With ``short`` every read brings
    a random part of what was asked, in units of ``short`` bytes. While ``gate`` is clear, reads
    wait for it, and release ``waiting`` first. Without ``direct`` it refuses direct reads as a
    file system would. ``reads`` lists (offset, bytes asked for, address of the first buffer).
    """

    def __init__(self, *, fail_at: Sequence[int] = (), short: int = 0, direct: bool = True) -> None:
        self.fail_at, self.short, self.direct = set(fail_at), short, direct
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)
        self.opened: list[tuple[str, bool]] = []
        self.reads: list[tuple[int, int, int]] = []
        self._random = random.Random(0)
        self._lock = threading.Lock()

    def open(self, path: str, direct: bool) -> int:
        if direct and not self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.opened.append((path, direct))
        return super().open(path, direct)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        asked = sum(len(buffer) for buffer in buffers)
        with self._lock:
            call = len(self.reads)
            self.reads.append((offset, asked, address(buffers[0])))
            units = self._random.randint(1, max(1, asked // self.short)) if self.short else 0
        if call in self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not self.gate.is_set():
            self.waiting.release()
            assert self.gate.wait(30)
        if self.short and units * self.short < asked:
            buffers = list(_first(buffers, units * self.short))
        return super().read(fd, buffers, offset)


def address(buffer: memoryview) -> int:
    """Where the buffer's first byte lies."""
    return np.frombuffer(buffer, np.uint8).ctypes.data


def _first(buffers: Sequence[memoryview], nbytes: int):
    for buffer in buffers:
        if nbytes > 0:
            yield buffer[:nbytes]
        nbytes -= len(buffer)
