"""How ``mlx-k3 plan`` shows its facts to people: a few lines, then a table for each memory."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ..units import format_bytes

_DEVICES = {"metal": "a Mac", "cuda": "a CUDA device", "cpu": "a CPU, in float32"}
_COLUMNS = (
    "trunk",
    "in use",
    "slots",
    "sets",
    "pruned",
    "reads",
    "SSD",
    "memory",
    "compute",
    "token",
    "prompt",
)


def print_plan(facts: dict[str, Any]) -> None:
    """Print what :func:`mlx_k3.experts.outlook.outlook` found, and a measured disk."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if measured := facts.get("measured"):
        console.print(
            f"{measured['path']}: {format_bytes(measured['bytes_per_second'])}/s, "
            f"{measured['mode']} reads, {format_bytes(measured['read_bytes'])} in "
            f"{measured['seconds']:.1f} s"
        )
    if "plans" not in facts:
        return
    for line in _about(facts):
        console.print(line)
    for memory_bytes, entries in groupby(facts["plans"], lambda entry: entry["memory_bytes"]):
        _print_memory(console, f"Memory {format_bytes(memory_bytes)}", list(entries))
    speeds = facts["speeds"]
    console.print()
    console.print(
        f"Times in seconds are bounds: bytes over {format_bytes(speeds['ssd_bytes'])}/s (SSD) and "
        f"{format_bytes(speeds['memory_bytes'])}/s (memory), operations over "
        f"{speeds['flops'] / 1e12:g} TFLOP/s; a token takes the largest of the three at least. "
        "Sets: slots over the experts of one token. Reads: as if all experts were equally likely "
        "and, below 1 set, none were still there. Pruned: experts a layer that would all stay."
    )


def _about(facts: dict[str, Any]) -> Iterator[str]:
    from ..experts.budget import format_at_least

    yield f"{facts['model']} on {_DEVICES[facts['device']]}, {facts['context_tokens']:,} tokens"
    if facts["experts"]:
        yield (
            f"{facts['experts']:,} experts of {facts['expert_bytes']:,} bytes; a token needs "
            f"{facts['experts_per_token']:,}: {format_bytes(facts['expert_bytes_per_token'])}"
        )
    yield (
        f"state {format_bytes(facts['state_bytes'])}; cache "
        f"{format_bytes(facts['cache_bytes_per_token'])} for every token"
    )
    if facts["vision_bytes"]:
        yield (
            f"vision tower and a picture: {format_bytes(facts['vision_bytes'])}, which --no-vision "
            "saves"
        )
    for name, sizes in facts["trunks"].items():
        yield (
            f"trunk {name}: {format_bytes(sizes['trunk_bytes'])}; works from "
            f"{format_at_least(sizes['minimum_bytes'])}, all in memory from "
            f"{format_at_least(sizes['resident_bytes'])}"
        )
    longest = facts["longest_context"]
    yield (
        f"at {longest['tokens']:,} tokens, trunk {facts['trunk']}: cache "
        f"{format_bytes(longest['cache_bytes'])}, works from "
        f"{format_at_least(longest['minimum_bytes'][facts['trunk']])}"
    )
    if longest["cache_bytes"]:
        packed = (
            f"--kv {bits}: {format_bytes(sizes['cache_bytes'])}, from "
            f"{format_at_least(sizes['minimum_bytes'])}"
            for bits, sizes in longest["packed"].items()
        )
        yield f"  cache packed with {'; '.join(packed)}"


def _print_memory(console: Any, title: str, entries: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from ..experts.budget import format_at_least

    fitting = [entry for entry in entries if entry["fits"]]
    console.print()
    if not fitting:
        least = min(entries, key=lambda entry: entry["minimum_bytes"])
        console.print(
            f"{title}: too little; trunk {least['trunk']} works from "
            f"{format_at_least(least['minimum_bytes'])}"
        )
        return
    table = Table(box=None, collapse_padding=True, title=title, title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "trunk" else "right", no_wrap=True)
    for entry in fitting:
        table.add_row(*_cells(entry))
    console.print(table)
    if refused := [entry["trunk"] for entry in entries if not entry["fits"]]:
        console.print(f"Too large: {', '.join(refused)}")
    if any(entry["beyond_default_limit"] for entry in fitting):
        console.print("* more than macOS lets a GPU hold, unless iogpu.wired_limit_mb is raised")


def _cells(entry: dict[str, Any]) -> list[str]:
    bounds, sets = entry["bounds"], entry["working_sets"]
    return [
        entry["trunk"] + ("*" if entry["beyond_default_limit"] else ""),
        format_bytes(entry["total_bytes"]),
        f"{entry['slots']:,}",
        "-" if sets is None else f"{sets:.2f}",
        f"{entry['pruned_experts']:,}",
        format_bytes(bounds["read_bytes"]),
        *(
            f"{bounds[f'{what}_seconds']:.3g}"
            for what in ("ssd", "memory", "compute", "token", "prefill")
        ),
    ]
