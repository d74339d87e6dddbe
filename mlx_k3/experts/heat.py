"""Heat: how often each expert was chosen, kept from one run to the next.

Owns the counts and their file. What is chosen often is read into free slots before anyone asks.
A damaged or outdated file counts as none: it is made again.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..files import replace_file

AGEING = 0.5  # what a use of an earlier run counts, for each run since


class Heat:
    """Uses of every expert, ``counts [layers, experts]`` float32.

    >>> heat = Heat.load(file, layers, experts)
    >>> heat.add(layer, ids); heat.hottest(100); heat.save(file)
    """

    def __init__(self, layers: Sequence[int], experts: Sequence[int]):
        self._row = {layer: row for row, layer in enumerate(layers)}
        self.counts = np.zeros((len(layers), max(experts)), np.float32)

    @classmethod
    def load(cls, file: Path, layers: Sequence[int], experts: Sequence[int]) -> "Heat":
        """What ``file`` holds, aged by a run; nothing if there is no such file or another model's.

        Args:
            file: what :meth:`save` wrote.
            layers: numbers of the MoE layers.
            experts: how many each has.
        """
        heat = cls(layers, experts)
        try:
            counts = np.load(file, allow_pickle=False)
        except (OSError, EOFError, ValueError):
            return heat
        if isinstance(counts, np.ndarray) and counts.shape == heat.counts.shape:
            counts = counts.astype(np.float32)
            if np.isfinite(counts).all() and (counts >= 0).all():
                heat.counts = counts * AGEING
                for row, n in zip(heat.counts, experts, strict=True):
                    row[n:] = 0
        return heat

    def add(self, layer: int, ids: np.ndarray) -> None:
        """Count the experts that ``layer`` chose."""
        row = self.counts[self._row[layer]]
        row += np.bincount(ids.reshape(-1), minlength=len(row))

    def hottest(self, n: int) -> list[tuple[int, int]]:
        """Up to ``n`` experts ``(layer, expert)`` that were used, the most used first."""
        flat, layers = self.counts.reshape(-1), list(self._row)
        best = np.argsort(-flat, kind="stable")[: max(n, 0)]
        rows, experts = np.divmod(best[flat[best] > 0], self.counts.shape[1])
        return [(layers[row], expert) for row, expert in zip(rows, experts.tolist(), strict=True)]

    def save(self, file: Path) -> None:
        """Write the counts, at once or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.save(content, self.counts, allow_pickle=False)
        replace_file(file, content.getvalue())


def heat_file(cache: Path, model: Path) -> Path:
    """Where in the ``cache`` folder the heat of the model in folder ``model`` is kept."""
    digest = hashlib.sha256(os.fsencode(model.resolve()) + b"\0")
    digest.update((model / "config.json").read_bytes())
    return cache / "heat" / f"{digest.hexdigest()[:16]}.npy"
