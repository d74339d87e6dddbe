"""``mlx-k3 trace``: what a recorded run asked for, what it read, and what would have helped."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..units import format_bytes


def trace(
    file: Annotated[Path, typer.Argument(help="A file that `--trace FILE` has recorded.")],
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Simulate the last N tokens; by default what takes seconds."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate and residency into a file (.png, .pdf).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show hit rates, bytes a token and waiting; simulate other pools and policies.

    A hit is a byte that was not read. "optimal" knows the future: no policy can do better.

    Examples:

        mlx-k3 generate ~/k3 --memory 96GB --trace run.trace --prompt "Hello"

        mlx-k3 trace run.trace

        mlx-k3 trace run.trace --plot run.png
    """
    from ..experts.trace import read_trace
    from ..experts.trace_report import report

    recorded = read_trace(file)
    if plot:
        from ..experts.trace_plot import check_plot

        check_plot(plot)
    facts = report(recorded, tokens, processes=os.cpu_count() or 1)
    if plot:
        from ..experts.trace_plot import draw

        draw(plot, recorded, facts)
    print(json.dumps(facts)) if as_json else _print(file, facts)


def _print(file: Path, facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=box.SIMPLE, title=str(file), title_justify="left")
    for column in ("", "prefill", "decode"):
        table.add_column(column, justify="right" if column else "left")
    for row in _measured(facts["prefill"], facts["decode"]):
        table.add_row(*row)
    console.print(table)
    if not facts["complete"]:
        console.print("The recording was cut off: the process was killed.")
    pools = facts["simulation"]["pools"]
    if not pools:
        console.print("No decode steps: nothing to simulate.")
        return
    reuse, distances = facts["reuse"], facts["reuse"]["distances"]
    size = facts["working_set"]
    console.print(
        f"A token needs {size['experts']:,} experts, {format_bytes(size['bytes'])}. "
        f"{_percent(reuse['first_use_share'])} of the uses are an expert's first.\n"
        "Between two uses of an expert, others used: "
        + ", ".join(f"{n:,} ({p})" for p, n in distances.items() if n is not None)
    )
    console.print(_pool_table(facts))


def _measured(*phases: dict[str, Any]) -> list[list[str]]:
    """What was recorded, a row of texts each."""
    rows = [
        ("tokens", "tokens", "{:,}".format),
        ("tokens a second", "tokens_per_second", "{:.3g}".format),
        ("hit rate (bytes not read)", "hit_rate", _percent),
        ("needed a token", "needed_bytes_per_token", format_bytes),
        ("read a token", "read_bytes_per_token", format_bytes),
        ("read in all", "read_bytes", format_bytes),
        ("of it ahead of time", "prefetch_bytes", format_bytes),
        ("ahead of time, and needed", "useful_prefetch_bytes", format_bytes),
        ("experts dropped", "dropped_experts", "{:,}".format),
        ("read speed, while reading", "read_bytes_per_second", lambda n: f"{format_bytes(n)}/s"),
        ("share of time waiting", "stall_share", _percent),
    ]
    return [
        [label, *("-" if phase[key] is None else show(phase[key]) for phase in phases)]
        for label, key, show in rows
    ]


def _pool_table(facts: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    pools = facts["simulation"]["pools"]
    title = f"Hit rate if the last {facts['simulation']['tokens']:,} tokens of decode met a pool of"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for column in ("tokens' worth", "slots", "bytes", *pools[0]["hit_rate"]):
        table.add_column(column, justify="right")
    for pool in pools:
        table.add_row(
            f"{pool['working_sets']:.2f}",
            f"{pool['slots']:,}" + (" *" if pool["slots"] == facts["model"].get("slots") else ""),
            format_bytes(pool["pool_bytes"]),
            *map(_percent, pool["hit_rate"].values()),
        )
    if facts["model"].get("slots"):
        table.caption, table.caption_justify = "* the recorded pool", "left"
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
