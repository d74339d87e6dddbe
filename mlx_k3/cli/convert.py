"""``mlx-k3 convert``: from a release to a folder that MLX loads."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..units import format_bytes


def convert(
    source: Annotated[str, typer.Argument(help="A model folder, or a Hub id (org/name).")],
    out: Annotated[Path, typer.Argument(help="The folder to write: new, empty or unfinished.")],
    experts: Annotated[
        str,
        typer.Option(
            help="copy: into OUT, byte for byte. reference: leave them in the source folder. "
            "mxfp4: quantize experts that are bfloat16."
        ),
    ] = "copy",
    trunk: Annotated[
        str,
        typer.Option(help="Precision of everything else: bf16 (as it is), mxfp8, q8, q6 or q4."),
    ] = "q8",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    free_source: Annotated[
        bool, typer.Option("--free-source", help="Delete each downloaded shard once it is used.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
) -> None:
    """Convert a release to an MLX model folder, in flat memory.

    Interrupted (Ctrl-C, a full disk, a power failure), run the same command again: it goes on
    from where it stopped. From the Hub, shards are downloaded to OUT.source one at a time.

    Examples:

        mlx-k3 convert ~/Kimi-K3 ~/kimi-k3-mlx

        mlx-k3 convert ~/Kimi-K3 ~/kimi-k3-mlx --experts reference --trunk q4

        mlx-k3 convert moonshotai/Kimi-K3 ~/kimi-k3-mlx --free-source

        mlx-k3 convert ~/Kimi-K3 ~/kimi-k3-mlx --dry-run
    """
    from mlx_k3.convert.plan import NothingToDo
    from mlx_k3.convert.stream import open_conversion

    try:
        conversion = open_conversion(
            source,
            out,
            experts=experts,
            trunk=trunk,
            revision=revision,
            free_source=free_source,
        )
        conversion.check()
    except NothingToDo as e:
        print(json.dumps({"done": True, "nothing_to_do": str(e)}) if as_json else e)
        return
    if dry_run:
        summary = conversion.plan.summary()
        print(json.dumps(summary) if as_json else _plan_text(summary))
        return
    with progress_bar() as advance:
        report = conversion.run(advance)
    print(json.dumps(report) if as_json else _report_text(report))


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A bar on stderr, with speed and time left; the callback that moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("preparing", total=None)

        def advance(done: int, total: int, file: str) -> None:
            bar.update(task, completed=done, total=total, description=file)

        yield advance


def _plan_text(summary: dict[str, Any]) -> str:
    lines = [f"{f['file']}  {format_bytes(f['bytes'])}" for f in summary["files"]]
    lines.append(f"{len(lines)} weight files, {format_bytes(summary['total_bytes'])} in all")
    return "\n".join(lines)


def _report_text(report: dict[str, Any]) -> str:
    sizes, trunk = report["bytes"], report["trunk"]
    lines = [
        f"{report['out']}: {report['files']} weight files, {format_bytes(sum(sizes.values()))} "
        f"({', '.join(f'{kind} {format_bytes(n)}' for kind, n in sizes.items() if n)})"
    ]
    if written := report["written_bytes"]:
        rate = format_bytes(written / max(report["seconds"], 1e-9))
        lines.append(f"wrote {format_bytes(written)} in {report['seconds']:.1f} s, {rate}/s")
    if "relative_error" in report["experts"]:
        error = report["experts"]["relative_error"]
        lines.append(f"  {'experts':28} mxfp4  relative error {error:.2e}")
    for kind, error in trunk["relative_error"].items():
        lines.append(f"  {kind:28} {trunk['profile']}  relative error {error:.2e}")
    for kind, count in trunk["left_exact"].items():
        lines.append(f"  {kind:28} as it was in {count} layers: its width does not fill the groups")
    if report["ignored_tensors"]:
        lines.append(
            f"{report['ignored_tensors']} tensors that the model does not use were left out"
        )
    return "\n".join(lines)
