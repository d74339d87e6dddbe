"""``mlx-k3 inspect``: what a model folder or a model on the Hub holds."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError
from ..units import format_bytes


def inspect(
    model: Annotated[str, typer.Argument(help="A model folder, or a Hub id (org/name).")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show architecture, parameters, bytes, precision, and what is missing.

    Reads only headers: a model on the Hub is not downloaded.

    Examples:

        mlx-k3 inspect ~/Kimi-K3

        mlx-k3 inspect moonshotai/Kimi-K3 --json
    """
    from mlx_k3.convert.journal import check_finished
    from mlx_k3.convert.source import open_source

    from ..checkpoint.extents import open_experts
    from ..checkpoint.summary import describe

    check_finished(Path(model))
    facts = describe(open_source(model, revision=revision))
    if facts["experts_in"]:
        try:
            open_experts(model)
        except CheckpointError as e:
            facts["problems"].append(str(e))
            facts["complete"] = False
    if as_json:
        print(json.dumps(facts))
        return
    _print_table(facts)
    for problem in facts["problems"]:
        print(f"Problem: {problem}")


def _print_table(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False, title=facts["path"], title_justify="left")
    for name, value in _rows(facts):
        table.add_row(name, value)
    Console().print(table)


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    shape, weights = facts["architecture"], facts["parameters"]
    rows = [
        ("form", facts["form"]),
        ("architecture", shape["model_type"]),
        (
            "layers",
            f"{shape['layers']}: {shape['kda_layers']} KDA, {shape['mla_layers']} gated MLA",
        ),
        ("width", f"{shape['hidden_size']}, {shape['heads']} heads"),
        ("vocabulary", f"{shape['vocabulary']:,}"),
        ("context", f"{shape['context']:,} tokens"),
    ]
    if shape["moe_layers"]:
        experts = shape["experts"]
        count = f"{min(experts)} to {max(experts)}" if isinstance(experts, list) else str(experts)
        rows.append(
            (
                "experts",
                f"{count} in each of {shape['moe_layers']} layers, {shape['experts_per_token']} "
                f"per token, {shape['shared_experts']} shared",
            )
        )
    rows += [
        ("parameters", f"{_count(weights['total'])}, {_count(weights['active'])} active per token"),
        (
            "precision",
            f"trunk {facts['precision']['trunk']}, experts {facts['precision']['experts']}",
        ),
    ]
    rows += [(f"bytes: {kind}", format_bytes(n)) for kind, n in facts["bytes"].items()]
    if facts["experts_in"]:
        rows.append(("experts in", facts["experts_in"]))
    return rows


def _count(n: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:,}"
