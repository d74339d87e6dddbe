"""Pictures of a trace: hit rate over pool size, and where the pool's slots went.

Owns matplotlib. Computes nothing but the residency that it draws.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import K3Error
from .policy import POLICIES
from .simulate import Requests, decode_requests, simulate
from .trace import Trace
from .trace_report import OPTIMAL


def check_plot(path: Path) -> None:
    """Find out before any work whether ``path`` can be drawn.

    Raises:
        K3Error: matplotlib is missing, the suffix is none it knows, or there is no such folder.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise K3Error("drawing needs matplotlib; install mlx-k3[plot]") from None
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise K3Error(f"{path}: cannot draw {path.suffix or 'without a suffix'}; use .png or .pdf")
    if not path.absolute().parent.is_dir():
        raise K3Error(f"{path.absolute().parent} is no folder")


def draw(path: Path, trace: Trace, facts: dict[str, Any]) -> None:
    """Write a picture of ``facts``, a report of ``trace``, to ``path``.

    Raises:
        K3Error: there is nothing to draw, or the file cannot be written.
    """
    # The object interface: pyplot would choose a window system.
    from matplotlib.figure import Figure

    pools = facts["simulation"]["pools"]
    if not pools:
        raise K3Error("the trace holds no decode steps: there is nothing to draw")
    figure = Figure(figsize=(10, 9), layout="constrained")
    rates, residency = figure.subplots(2, 1)
    _draw_rates(rates, facts)
    _draw_residency(figure, residency, trace, facts)
    try:
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise K3Error(f"{path}: {e.strerror}") from None


def residency(requests: Requests, slots: int, policy: str) -> tuple[list[int], np.ndarray]:
    """The share of steps that each expert spent in a simulated pool.

    Returns:
        The layers, and [layers, experts] float64; NaN for experts that were never asked for.
    """
    outcome = simulate(requests, slots, POLICIES[policy]())
    layers = sorted({layer for layer, _ in requests.names})
    rows = {layer: row for row, layer in enumerate(layers)}
    shares = np.full((len(layers), 1 + max(e for _, e in requests.names)), np.nan)
    calls = len(requests.starts) - 1
    used = np.bincount(requests.experts, minlength=len(requests.names)) > 0
    for (layer, expert), steps, seen in zip(
        requests.names, outcome.calls_resident, used, strict=True
    ):
        if seen:
            shares[rows[layer], expert] = steps / calls
    return layers, shares


def _draw_rates(axes: Any, facts: dict[str, Any]) -> None:
    pools = facts["simulation"]["pools"]
    sizes = [pool["working_sets"] for pool in pools]
    for name in pools[0]["hit_rate"]:
        style = "k--" if name == OPTIMAL else "o-"
        axes.plot(sizes, [100 * pool["hit_rate"][name] for pool in pools], style, label=name)
    slots, measured = facts["model"].get("slots"), facts["decode"]["hit_rate"]
    if slots is not None and measured is not None:
        place = slots / facts["working_set"]["experts"]
        axes.plot([place], [100 * measured], "r*", markersize=12, label="measured")
    axes.set(
        title=f"Decode, the last {facts['simulation']['tokens']:,} tokens",
        xlabel="pool size, in experts that one token needs",
        ylabel="hit rate, %",
        ylim=(-2, 102),
    )
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_residency(figure: Any, axes: Any, trace: Trace, facts: dict[str, Any]) -> None:
    requests = decode_requests(trace).last_tokens(facts["simulation"]["tokens"])
    policy = facts["model"].get("policy")
    if policy not in POLICIES:
        policy = next(iter(POLICIES))
    slots = facts["model"].get("slots") or requests.working_set
    slots = max(slots, requests.largest_call)
    layers, shares = residency(requests, slots, policy)
    image = axes.imshow(100 * shares, aspect="auto", interpolation="nearest", vmin=0)
    figure.colorbar(image, ax=axes, label="share of time in the pool, %")
    ticks = range(0, len(layers), max(len(layers) // 10, 1))
    axes.set_yticks(ticks, [layers[i] for i in ticks])
    axes.set(
        title=f"Residency with {slots:,} slots, {policy} (white: never asked for)",
        xlabel="expert",
        ylabel="layer",
    )
