"""The picture of a training run: its losses, and how evenly the experts were used.

Owns matplotlib. Reads the run's log, one JSON object a line, and knows of it only the fields
``step``, ``loss``, ``held_out_loss`` and ``max_load``; the last two may be missing in any line.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import K3Error


def plot_losses(log: Path, out: Path) -> None:
    """Draw the run that ``log`` tells of into ``out``, a .png, .pdf or .svg file.

    Raises:
        K3Error: matplotlib is missing, the log cannot be read or tells of no step, or the picture
            cannot be written.
    """
    try:
        # The object interface: pyplot would choose a window system.
        from matplotlib.figure import Figure
    except ImportError:
        raise K3Error("drawing needs matplotlib; install mlx-k3[plot]") from None
    records = _read(log)
    figure = Figure(figsize=(10, 8), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if out.suffix[1:].lower() not in kinds:
        raise K3Error(f"{out}: cannot draw {out.suffix or 'without a suffix'}; use .png or .pdf")
    losses, loads = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _draw_losses(losses, records)
    _draw_loads(loads, records)
    try:
        figure.savefig(out, dpi=150)
    except OSError as e:
        raise K3Error(f"{out}: {e.strerror}") from None


def _read(log: Path) -> list[dict[str, Any]]:
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise K3Error(f"{log}: {e.strerror}; give the log of a training run") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append(record | {"step": int(record["step"]), "loss": float(record["loss"])})
        except (ValueError, TypeError, KeyError):
            raise K3Error(
                f"{log}, line {number} is no JSON object with a step and a loss; "
                "give the log of a training run"
            ) from None
    if not records:
        raise K3Error(f"{log} tells of no step: there is nothing to draw")
    return records


def _draw_losses(axes: Any, records: list[dict[str, Any]]) -> None:
    axes.plot(*_series(records, "loss"), linewidth=0.8, label="training")
    held_out = _series(records, "held_out_loss")
    if held_out[0]:
        axes.plot(*held_out, "o-", markersize=3, label="held out")
    axes.set(title="Loss", ylabel="nats a token", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def _draw_loads(axes: Any, records: list[dict[str, Any]]) -> None:
    loads = _series(records, "max_load")
    if loads[0]:
        axes.plot(*loads, linewidth=0.8)
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set(
        title="Load of the busiest expert, in the worst layer (1 is perfect balance)",
        xlabel="step",
        ylabel="times the mean",
    )
    axes.grid(alpha=0.3)


def _series(records: list[dict[str, Any]], field: str) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that have ``field``."""
    told = [record for record in records if record.get(field) is not None]
    return [record["step"] for record in told], [record[field] for record in told]
