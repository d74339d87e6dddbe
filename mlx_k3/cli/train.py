"""``mlx-k3 train``: a training run as a configuration file says."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .terminal import note

if TYPE_CHECKING:
    from ..training.config import TrainConfig


def train(
    config: Annotated[
        Path, typer.Argument(help="What to train, and how: a TOML file, see docs/nano.md.")
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Draw the losses of the run in this file, as losses.png.")
    ] = None,
) -> None:
    """Train a small model of the family on generated conversations.

    The result is a checkpoint in the release's format: mlx-k3 convert makes it usable. A run that
    was stopped (Ctrl-C, a power failure) continues when the command is given again, and ends with
    the same weights.

    Examples:

        mlx-k3 train nano.toml

        mlx-k3 train nano.toml --plot losses.png
    """
    from ..training.config import TrainConfig

    run = TrainConfig.from_file(config)
    from ..training.plot import plot_losses
    from ..training.trainer import Trainer

    trainer = Trainer(run)
    with progress(run) as report:
        out = trainer.run(report)
    if plot is not None:
        plot_losses(run.out / "log.jsonl", plot)
    print(out)


@contextmanager
def progress(run: "TrainConfig") -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar with the loss, speed and time left on stderr; lines now and then where there is no
    terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    is_terminal = sys.stderr.isatty()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(),
        console=Console(file=sys.stderr),
        disable=not is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=run.steps)

        def report(record: dict[str, Any]) -> None:
            text = f"loss {record['loss']:.4f}, {record['tokens_per_second']:,} tokens/s"
            if "held_out_loss" in record:
                text += f", held-out loss {record['held_out_loss']:.4f}"
            if is_terminal:
                bar.update(task, completed=record["step"], description=text)
            elif "held_out_loss" in record:
                note(f"step {record['step']} of {run.steps}: {text}")

        yield report
