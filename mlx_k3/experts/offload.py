"""Put a model's experts on demand: build the store and give every MoE layer its offloaded bank."""

import time
import weakref
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.extents import ExpertExtents
from ..config import K3Config
from ..errors import UnsupportedError
from ..models.bank import Experts
from .bank import OffloadedBank
from .lossy import Levers
from .policy import POLICIES
from .reader import ExpertReader
from .slots import SlotPool
from .store import ExpertStore
from .trace import TraceWriter
from .usage import Usage

WARM_SHARE = 3 / 4  # of the slots, at most, for experts that were hot before


class Offload:
    """A model's experts on demand: one store for all layers, and the arithmetic on its slots."""

    def __init__(
        self,
        config: K3Config,
        experts: ExpertExtents,
        slots: int,
        *,
        policy: str = "lru",
        levers: Levers | None = None,
        trace: TraceWriter | None = None,
        reader: ExpertReader | None = None,
    ):
        pieces = {experts.pieces(layer) for layer in experts.layers}
        if len(pieces) != 1:
            raise UnsupportedError("experts of different shapes or precisions cannot share slots")
        if policy not in POLICIES:
            raise UnsupportedError(f"policy {policy!r}; there are {' and '.join(POLICIES)}")
        pool = SlotPool(pieces.pop(), slots, POLICIES[policy]())
        self.store = ExpertStore(experts, pool, reader or ExpertReader(), trace)
        self.levers = levers or Levers()
        self._experts_per_token = config.num_experts_per_token * len(config.moe_layers)
        self._arithmetic = Experts.over(config, pool.arrays)
        # A model that is dropped takes the reader's threads and open files with it.
        self._close = weakref.finalize(self, self.store.close)

    def place(self, moe_layers: Sequence[tuple[int, nn.Module]], *, prefetch: bool = True) -> None:
        """Give each MoE layer ``(number, module)`` its bank, and a look ahead to the next layer."""
        following = [*moe_layers[1:], (None, None)]
        for (layer, moe), (next_layer, next_moe) in zip(moe_layers, following, strict=True):
            moe.switch_mlp = OffloadedBank(
                layer, next_layer, self.store, self._arithmetic, self.levers
            )
            if prefetch and next_moe is not None:
                moe.look_ahead = next_moe.guess

    def round_inputs(self) -> None:
        """See :meth:`mlx_k3.models.bank.Experts.round_inputs`."""
        self._arithmetic.round_inputs()

    @property
    def slots(self) -> int:
        """How many experts fit at a time."""
        return len(self.store.pool)

    @property
    def working_sets(self) -> float:
        """Slots over the experts of one token. Below 1 a pool hits next to nothing."""
        return self.slots / self._experts_per_token

    def usage(self) -> Usage:
        """All sums so far; subtract an earlier one to have what happened since."""
        counters, reader, levers = self.store.counters, self.store.reader, self.levers
        return Usage(
            seconds=time.perf_counter(),
            hit_bytes=counters.hit_bytes,
            demand_bytes=counters.demand_bytes,
            prefetch_bytes=counters.prefetch_bytes,
            used_prefetch_bytes=counters.used_prefetch_bytes,
            stall_seconds=counters.stall_seconds,
            disk_bytes=reader.read_bytes,
            disk_seconds=reader.busy_seconds,
            weight=levers.weight,
            dropped_weight=levers.dropped_weight,
            dropped_pairs=levers.dropped_pairs,
        )

    def warm_up(self) -> None:
        """Start reading what the store's heat says is used most, behind all else."""
        hottest = self.store.heat.hottest(int(self.slots * WARM_SHARE))
        # The hottest last: an LRU pool then keeps it longest.
        self.store.prefetch(hottest[::-1])

    def resize(self, slots: int) -> None:
        """Another number of slots, between two tokens; keeps as many experts as fit."""
        arrays = self.store.pool.arrays
        # Nothing else refers to an old array, so it is freed as soon as its content has moved.
        self._arithmetic.bind(dict.fromkeys(arrays, mx.array(0)))
        try:
            self.store.resize(slots)
        finally:
            self._arithmetic.bind(arrays)

    def close(self) -> None:
        """Stop the reader; the model cannot run afterwards. Idempotent."""
        self._close()
