"""``mlx-k3 verify``: prove that a converted folder is what it should be."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckpointError
from ..units import format_bytes
from .convert import progress_bar


def verify(
    out: Annotated[Path, typer.Argument(help="A folder that mlx-k3 convert has written.")],
    against: Annotated[
        str | None,
        typer.Option(help="The release it came from: compare every tensor with it."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
) -> None:
    """Check a converted folder: every file by its checksum.

    With --against, experts and unquantized tensors must equal the source's to the byte, and
    quantized ones must be as close as their precision allows.

    Examples:

        mlx-k3 verify ~/kimi-k3-mlx

        mlx-k3 verify ~/kimi-k3-mlx --against ~/Kimi-K3
    """
    from mlx_k3.convert.verify import verify as check

    with progress_bar() as advance:
        report = check(out, against=against, progress=advance)
    problems = report["problems"]
    if as_json:
        print(json.dumps(report))
        if problems:
            raise typer.Exit(2)
        return
    for problem in problems:
        print(problem)
    if problems:
        raise CheckpointError(
            f"{out}: {len(problems)} problems; convert it again, or copy it again"
        )
    print(f"{out}: {report['files']} files, {format_bytes(report['bytes'])}, all as written")
    if "against" in report:
        print(
            f"{report['tensors_equal']:,} tensors equal those of {report['against']} to the byte, "
            f"{report['tensors_within_bound']:,} within their precision"
        )
