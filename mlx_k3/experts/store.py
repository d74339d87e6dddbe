"""The expert store: what is in memory, what is on its way, and what it cost.

Brings slots, reader and policy together for the banks of all layers. Used by the thread that runs
the model; only the reader's threads touch slots meanwhile, and only slots that are loading.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..checkpoint.extents import ExpertExtents, merge
from ..errors import BudgetError
from .heat import Heat
from .reader import ExpertReader, Ticket
from .slots import Lease, SlotPool
from .trace import TraceWriter

Key = tuple[int, int]  # layer, expert


@dataclass
class Counters:
    """Sums since the store was opened; a hit is bytes that were not read."""

    hit_bytes: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    used_prefetch_bytes: int = 0
    stall_seconds: float = 0.0

    @property
    def read_bytes(self) -> int:
        """Everything that was read, useful or not."""
        return self.demand_bytes + self.prefetch_bytes

    @property
    def hit_rate(self) -> float:
        """Share of the experts' bytes that were there without reading."""
        asked = self.hit_bytes + self.demand_bytes + self.used_prefetch_bytes
        return self.hit_bytes / asked if asked else 0.0


@dataclass
class _Load:
    """An expert on its way into a slot."""

    key: Key
    slot: int
    ticket: Ticket
    prefetch: bool
    held: bool = False
    start: float = field(default_factory=time.perf_counter)


class ExpertStore:
    """Fetches experts into slots.

    A bank holds the slots it uses (:meth:`hold`), waits for them, and hands the array that its
    use ends in to :meth:`release_after`; until that array is computed no slot of it is refilled.
    """

    def __init__(
        self,
        experts: ExpertExtents,
        pool: SlotPool,
        reader: ExpertReader,
        trace: TraceWriter | None = None,
    ):
        self.experts, self.pool, self.reader, self.trace = experts, pool, reader, trace
        self.counters = Counters()
        self.on_layer: Callable[[int], None] | None = None
        """Called before each layer with its number; what it raises ends the forward pass."""
        self.heat: Heat | None = None
        """Counts what is chosen, if there is one."""
        self._position, self._step = 0, 0  # of the forward pass at work: first token, tokens
        self._loads: dict[Key, _Load] = {}
        self._unused: set[Key] = set()  # read ahead and not asked for yet
        self._holds: dict[int, Lease] = {}  # slot -> lease, of the layer at work
        self._pending: list[tuple[list[Lease], mx.array]] = []
        self._at_work = False  # between begin and end

    def begin(self, layer: int, indices: np.ndarray, weights: np.ndarray) -> None:
        """Before a layer: take note of its routing and of finished reads; free what was used."""
        if self._at_work:
            self.reset()
        self._at_work = True
        if self.on_layer:
            self.on_layer(layer)
        if self.heat:
            self.heat.add(layer, indices)
        if self.trace:
            self._record(layer, indices, weights)
        self._settle()
        self.reclaim()

    def end(self) -> None:
        """After a layer. A layer that was cut short never gets here; then :meth:`reset` follows."""
        self._at_work = False

    def reset(self) -> None:
        """Nothing is held, on its way or in use any more; what was read in full stays.

        Puts everything right after an exception at any point, Ctrl-C included.
        """
        self._at_work = True  # and so it stays if this, too, is cut short
        self.reader.drain()
        for load in self._loads.values():
            load.held = False
        self._settle()
        while self._pending:
            mx.eval(self._pending.pop()[1])
        self._loads.clear()
        self._holds.clear()
        self.pool.release_all()
        self._at_work = False

    def has(self, key: Key) -> bool:
        """Whether expert ``key`` is in a slot or on its way into one."""
        return self.pool.find(key) is not None or key in self._loads

    def hold(self, key: Key) -> int | None:
        """The slot that has, or will have, expert ``key``; None if no slot can be had yet.

        The slot stays until :meth:`release_after`. Call :meth:`wait` before using it.
        """
        slot = self.pool.find(key)
        if slot is not None:
            if slot not in self._holds:
                self._count_use(key)
                self.pool.touch(key)
                self._holds[slot] = self.pool.lease([slot])
            return slot
        load = self._loads.get(key)
        if load is None:
            load = self._start(key, prefetch=False)
        if load is None:
            return None
        if load.prefetch and not load.held:
            load.ticket.promote()
        load.held = True
        return load.slot

    def make_room(self) -> None:
        """After :meth:`hold` found no room: free what can be freed, by waiting if need be.

        Raises:
            BudgetError: everything is held; the pool is smaller than one layer's demand.
        """
        if self._pending:
            return self.reclaim()
        guesses = [load for load in self._loads.values() if not load.held]
        for load in guesses:
            load.ticket.cancel()
        if guesses:
            guesses[0].ticket.wait_quietly()
            return self._settle()
        raise BudgetError(
            f"{len(self.pool)} slots cannot hold what one layer needs at once; raise --memory"
        )

    def wait(self, keys: Sequence[Key]) -> list[int]:
        """The slots of held ``keys``, once their experts are in them.

        Raises:
            CheckpointError: an expert could not be read.
        """
        start = time.perf_counter()
        waiting = [load for key in keys if (load := self._loads.get(key))]
        for load in waiting:
            load.ticket.wait_quietly()
            self._finish(load)
        if waiting:
            stall = time.perf_counter() - start
            self.counters.stall_seconds += stall
            if self.trace:
                self.trace.stall(keys[0][0], stall)
        return [self.pool.find(key) for key in keys]

    def release_after(self, slots: Sequence[int], result: mx.array) -> None:
        """Give ``slots`` back once ``result``, which uses them, has been computed."""
        self._pending.append(([self._holds[slot] for slot in slots], result))
        # Under way from here on: so nobody computes it later, from slots that were refilled, and
        # any thread can wait for it.
        mx.async_eval(result)
        for slot in slots:
            del self._holds[slot]

    def reclaim(self) -> None:
        """Free the slots in use, by waiting for the end of their use."""
        for leases, result in self._pending:
            mx.eval(result)
            for lease in leases:
                lease.check()
                lease.release()
        self._pending.clear()

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Start reading experts that may be needed, behind everything that is."""
        for key in keys:
            if not self.has(key) and self._start(key, prefetch=True) is None:
                return

    def note_dropped(self, layer: int, experts: Sequence[int]) -> None:
        """Record that ``experts`` were chosen and left out."""
        if self.trace:
            now = time.perf_counter()
            for expert in experts:
                self.trace.io(layer, expert, 0, "drop", now, 0.0)

    def resize(self, slots: int) -> None:
        """Another number of slots, at once; keeps as many experts as fit."""
        self.reset()
        self._at_work = True
        self.pool.resize(slots)
        self._at_work = False

    def close(self) -> None:
        """Stop the reader and close the trace."""
        self.reader.close()
        if self.trace:
            self.trace.close()

    def _record(self, layer: int, indices: np.ndarray, weights: np.ndarray) -> None:
        if layer == self.experts.layers[0]:
            self._position += self._step
        k = indices.shape[-1]
        self._step = indices.size // k
        self.trace.route(self._position, layer, indices.reshape(-1, k), weights.reshape(-1, k))

    def _count_use(self, key: Key) -> None:
        """A hit, unless this is the first use of what was read ahead for it."""
        nbytes = self.experts.expert_bytes(key[0])
        if key in self._unused:
            self._unused.remove(key)
            self.counters.used_prefetch_bytes += nbytes
        else:
            self.counters.hit_bytes += nbytes

    def _start(self, key: Key, *, prefetch: bool) -> _Load | None:
        slot = self.pool.claim(key)
        if slot is None:
            return None
        self._unused.discard(key)
        buffers = self.pool.buffers(slot)
        runs = [
            (run.path, run.offset, [buffers[i] for i in run.pieces])
            for run in merge(self.experts.extents(*key))
        ]
        load = _Load(key, slot, self.reader.submit(runs, urgent=not prefetch), prefetch)
        self._loads[key] = load
        return load

    def _settle(self) -> None:
        """Take note of loads that are over. A guess that failed is forgotten."""
        for load in [load for load in self._loads.values() if load.ticket.done]:
            if load.held or load.ticket.error is None:
                self._finish(load)
            else:
                self._drop(load)

    def _finish(self, load: _Load) -> None:
        if load.ticket.error is not None:
            self._drop(load)
            raise load.ticket.error
        del self._loads[load.key]
        self.pool.filled(load.slot)
        if load.held:
            self._holds[load.slot] = self.pool.lease([load.slot])
        nbytes = load.ticket.nbytes
        if load.prefetch:
            self.counters.prefetch_bytes += nbytes
            self._unused.add(load.key)
            if load.held:
                self._count_use(load.key)
        else:
            self.counters.demand_bytes += nbytes
        if self.trace:
            kind = "prefetch" if load.prefetch else "demand"
            seconds = time.perf_counter() - load.start
            self.trace.io(*load.key, nbytes, kind, load.start, seconds)

    def _drop(self, load: _Load) -> None:
        del self._loads[load.key]
        self.pool.abandon(load.slot)
