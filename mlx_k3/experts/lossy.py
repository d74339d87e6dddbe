"""Levers that trade exactness for reads: fewer active experts, light misses left out.

Both are off by default. What a lever leaves out, it counts; the other experts of the token take
over its share of the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import K3Error


@dataclass
class Levers:
    """What may be left out, and what was.

    ``active_experts`` keeps a token's heaviest experts; ``drop_missed`` leaves out experts that
    would have to be read, lightest first, up to this share of the token's weight.
    """

    active_experts: int | None = None
    drop_missed: float = 0.0
    dropped_pairs: int = 0
    dropped_weight: float = 0.0
    weight: float = 0.0

    def __post_init__(self) -> None:
        if self.active_experts is not None and self.active_experts < 1:
            raise K3Error(f"--active-experts {self.active_experts}: a token needs at least one")
        if not 0 <= self.drop_missed < 1:
            raise K3Error(f"--drop-missed {self.drop_missed} is not a share from 0 to below 1")

    @property
    def on(self) -> bool:
        """Whether anything may be left out."""
        return self.active_experts is not None or self.drop_missed > 0

    @property
    def dropped_share(self) -> float:
        """Weight left out over all weight."""
        return self.dropped_weight / self.weight if self.weight else 0.0

    def apply(
        self, ids: np.ndarray, weights: np.ndarray, is_there: Callable[[int], bool]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Leave out what the levers allow.

        Args:
            ids: ``[..., k]``, the chosen experts.
            weights: ``[..., k]``.
            is_there: whether an expert needs no read.

        Returns:
            Ids ``[..., n]`` and weights ``[..., n]`` of each token's former sum. An expert left
            out as a miss has weight 0 and another expert's id.
        """
        if not self.on:
            return ids, weights
        before, pairs = weights.sum(-1, keepdims=True), weights.size
        self.weight += float(before.sum())
        if self.active_experts is not None and self.active_experts < ids.shape[-1]:
            heaviest = np.argsort(-weights, axis=-1, kind="stable")[..., : self.active_experts]
            ids = np.take_along_axis(ids, heaviest, axis=-1)
            weights = np.take_along_axis(weights, heaviest, axis=-1)
        if self.drop_missed:
            ids, weights = self._without_light_misses(ids, weights, before, is_there)
        kept = weights.sum(-1, keepdims=True)
        self.dropped_weight += float((before - kept).sum())
        self.dropped_pairs += pairs - int(np.count_nonzero(weights))
        return ids, weights * (before / kept)

    def _without_light_misses(self, ids, weights, total, is_there):
        there = np.vectorize(is_there, otypes=[bool])(ids)
        order = np.argsort(weights, axis=-1, kind="stable")
        missed = np.take_along_axis(np.where(there, 0, weights), order, axis=-1)
        light = (np.cumsum(missed, axis=-1) <= self.drop_missed * total) & (missed > 0)
        drop = np.zeros_like(there)
        np.put_along_axis(drop, order, light, axis=-1)
        # The heaviest expert always stays: its id stands in for those that are left out.
        heaviest = weights.argmax(-1)[..., None]
        np.put_along_axis(drop, heaviest, False, axis=-1)
        stand_in = np.take_along_axis(ids, heaviest, axis=-1)
        return np.where(drop, stand_in, ids), np.where(drop, 0, weights)
