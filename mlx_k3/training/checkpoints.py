"""Checkpoints of a run: its whole state in one file, which appears complete or not at all."""

import os
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoint.writer import sync_folder
from ..errors import CheckpointError
from .data import Position
from .step import State

KEPT = 2


class Saved(NamedTuple):
    """A state, the number of steps it took, and the position of the next batch."""

    state: State
    step: int
    position: Position


def save(folder: Path, run: str, saved: Saved) -> None:
    """Write a checkpoint of ``run`` (its identity) and drop all but the last few."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{saved.step:08}.safetensors"
    partial = target.with_name(f".{target.name}")
    metadata = {
        "run": run,
        "step": str(saved.step),
        "chunk": str(saved.position.chunk),
        "batch": str(saved.position.batch),
    }
    mx.save_safetensors(str(partial), dict(tree_flatten(saved.state._asdict())), metadata)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
    sync_folder(folder)
    for old in _files(folder)[:-KEPT]:
        old.unlink()


def latest(folder: Path, run: str) -> Saved | None:
    """The last checkpoint in ``folder``, or None.

    Raises:
        CheckpointError: it belongs to a run with other settings, or is damaged.
    """
    files = _files(folder)
    if not files:
        return None
    try:
        arrays, metadata = mx.load(str(files[-1]), return_metadata=True)
    except RuntimeError as e:
        raise CheckpointError(
            f"{files[-1]}: {e}; delete it, and the run continues from the one before"
        ) from None
    if metadata.get("run") != run:
        raise CheckpointError(
            f"{files[-1]} is of a run with other settings; give another `out`, or delete {folder}"
        )
    tree = tree_unflatten(list(arrays.items()))
    state = State(tree["parameters"], tree.get("biases", []), tree["optimizer"])
    position = Position(int(metadata["chunk"]), int(metadata["batch"]))
    return Saved(state, int(metadata["step"]), position)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.safetensors"))
