"""``mlx-k3 bench``: how fast the kernels are on this device, beside what else there is."""

import os
from typing import Annotated

import typer

from ..errors import UnsupportedError
from .terminal import note


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="One group: situ, residual, router, experts, kda, mla or layer. Repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time every kernel at K3's sizes: beside plain MLX, mlx-lm, and what the device can do.

    The floor is what a step's bytes take at the speed of a large copy, or its products at the speed
    of a large one. Without a GPU no kernel runs, and plain MLX is timed.

    Examples:

        mlx-k3 bench

        mlx-k3 bench --only router --only kda --json
    """
    # Errors are of float32, which some GPUs would else round to TF32 in products.
    os.environ["MLX_ENABLE_TF32"] = "0"
    from ..bench import report
    from ..bench.measure import rates

    unknown = [name for name in only or () if name not in report.NAMES]
    if unknown:
        raise UnsupportedError(
            f"bench --only {unknown[0]}: there is no such group; there are "
            + ", ".join(report.NAMES)
        )
    found = report.Report(rates())
    report.measure(found, report.sizes_here(), only or None, on_done=note)
    print(found.json() if as_json else found.text())
