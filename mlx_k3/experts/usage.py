"""What happened between two moments: bytes asked for, bytes read, time waited, weight left out.

Owns the sums and the figures that follow from them. :meth:`Offload.usage` takes one.
"""

from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Sums since the model was loaded; the difference of two is what happened in between."""

    seconds: float
    """``time.perf_counter()``; of a difference, how long it took."""
    hit_bytes: int
    demand_bytes: int
    prefetch_bytes: int
    used_prefetch_bytes: int
    stall_seconds: float
    disk_bytes: int
    """Counted where a read returns."""
    disk_seconds: float
    """While at least one read was going on."""
    weight: float
    dropped_weight: float
    dropped_pairs: int

    def __sub__(self, earlier: "Usage") -> "Usage":
        return Usage(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))

    @property
    def read_bytes(self) -> int:
        """Everything that was read, useful or not."""
        return self.demand_bytes + self.prefetch_bytes

    @property
    def hit_rate(self) -> float:
        """Share of the needed bytes that were there without reading, now or ahead of time."""
        needed = self.hit_bytes + self.demand_bytes + self.used_prefetch_bytes
        return self.hit_bytes / needed if needed else 0.0

    @property
    def read_bytes_per_second(self) -> float:
        """Speed of the drive while it was reading."""
        return self.disk_bytes / self.disk_seconds if self.disk_seconds else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time spent waiting for reads."""
        return self.stall_seconds / self.seconds if self.seconds else 0.0

    @property
    def dropped_share(self) -> float:
        """Share of the experts' weight that levers left out."""
        return self.dropped_weight / self.weight if self.weight else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "hit_rate": self.hit_rate,
            "hit_bytes": self.hit_bytes,
            "read_bytes": self.read_bytes,
            "demand_bytes": self.demand_bytes,
            "prefetch_bytes": self.prefetch_bytes,
            "used_prefetch_bytes": self.used_prefetch_bytes,
            "read_bytes_per_second": self.read_bytes_per_second,
            "stall_seconds": self.stall_seconds,
            "stall_share": self.stall_share,
            "dropped_share": self.dropped_share,
            "dropped_experts": self.dropped_pairs,
            "seconds": self.seconds,
        }
