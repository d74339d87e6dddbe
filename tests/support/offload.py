"""Golden models with experts on demand, and a disk that counts and fails when it is told to.

Their routers choose as the bundled model's did: see :mod:`.replay`.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_k3.experts.disk import Disk
from mlx_k3.experts.reader import ExpertReader
from mlx_k3.loader import assemble
from mlx_k3.models.kimi import Model

from .replay import replay

NAMES = ["tiny-text", "tiny-kimi-linear", "tiny-multimodal"]
TOP_K = {"tiny-text": 4, "tiny-kimi-linear": 2, "tiny-multimodal": 3}


class WatchedDisk(Disk):
    """A disk that notes every read, and first calls ``before`` with the number of the read."""

    def __init__(self, before: Callable[[int], None] | None = None):
        self.reads: list[tuple[str, int, int]] = []
        """Path, offset and bytes of every read that succeeded."""
        self.before = before
        self._calls = 0
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def open(self, path: str, direct: bool) -> int:
        fd = super().open(path, direct)
        self._paths[fd] = path
        return fd

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._calls += 1
            call, before = self._calls, self.before
        if before is not None:
            before(call)
        n = super().read(fd, buffers, offset)
        with self._lock:
            self.reads.append((self._paths[fd], offset, n))
        return n

    def fail(self, *calls: int) -> None:
        """From now on the reads numbered ``calls``, counted from here, fail."""

        def before(call: int) -> None:
            if call in calls:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.do(before)

    def do(self, before: Callable[[int], None] | None) -> None:
        """Call something else before each read; counts from 1 again."""
        with self._lock:
            self._calls, self.before = 0, before


def in_memory(folder: Path, **options: Any) -> Model:
    """The model in ``folder`` with all its experts in memory: what an offloaded one must equal."""
    return replay(assemble(folder, **options))


@contextmanager
def offloaded(
    folder: Path, slots: int, disk: Disk | None = None, **options: Any
) -> Iterator[Model]:
    """The model in ``folder`` with its experts in ``slots`` slots, read through ``disk``."""
    model = replay(assemble(folder, slots=slots, **options))
    if disk is not None:
        model.offload.store.reader.close()
        # Not directly: then a read is exactly the bytes that were asked for.
        model.offload.store.reader = ExpertReader(direct=False, disk=disk)
    try:
        yield model
    finally:
        model.offload.close()


def experts_in(model: Model) -> int:
    """How many routed experts all layers have together."""
    return sum(model.config.expert_counts)


def prompt(n: int, seed: int = 0) -> mx.array:
    """Ids ``[1, n]``."""
    return mx.array(np.random.default_rng([seed, n]).integers(0, 490, (1, n)))


def answer(model: Model, ids: mx.array, steps: int, cache: list[Any] | None = None) -> mx.array:
    """Logits ``[B, T + steps, vocab]`` of a prompt and of greedy decoding after it."""
    cache = model.make_cache() if cache is None else cache
    rows = [model(ids, cache=cache)]
    for _ in range(steps):
        rows.append(model(mx.argmax(rows[-1][:, -1:], axis=-1), cache=cache))
        mx.eval(rows)
    return mx.concatenate(rows, axis=1)


def assert_nothing_in_use(model: Model) -> None:
    """Every slot is free or filled, none leased or loading, and each key is in one slot."""
    store = model.offload.store
    store.reset()
    pool, residents = store.pool, store.pool.resident()
    slots = [pool.find(key) for key in residents]
    assert len(set(slots)) == len(residents) <= len(pool)
    assert sorted([*slots, *pool._free]) == list(range(len(pool)))
    assert not pool._loading and not any(pool._leases)
