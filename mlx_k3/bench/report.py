"""All of a benchmark, for people and for scripts: which cases, on what, and what came out.

``mlx-k3 bench`` and ``scripts/bench_kernels.py`` print it.
"""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

import mlx.core as mx

from ..kernels import backend
from . import layer, run
from .cases import GROUPS, cases
from .layer import LayerResult
from .measure import ROUNDS, Rates
from .run import Result
from .sizes import Sizes, cpu_sizes, k3_sizes

LAYER = "layer"
NAMES = (*GROUPS, LAYER)
NO_KERNELS = "No kernel runs here: without a GPU all is plain MLX, which is what these figures are."
EXPERT_BYTES = 17_547_264
LONG_PROMPTS_FROM_BYTES = 64 << 30


@dataclass
class Report:
    """What was measured, on which device."""

    rates: Rates
    results: list[Result] = field(default_factory=list)
    layers: list[LayerResult] = field(default_factory=list)

    def data(self) -> dict:
        """For ``--json``."""
        return {
            **_about(self.rates),
            "results": [asdict(r) | {"fault": r.fault} for r in self.results],
            "layers": [asdict(r) for r in self.layers],
        }

    def text(self) -> str:
        """For people: Markdown."""
        about = ", ".join(f"{key} {value}" for key, value in _about(self.rates).items())
        parts = [about] if backend() != "reference" else [about, NO_KERNELS]
        if self.results:
            parts.append(run.table(self.results))
        if self.layers:
            parts.append(layer.table(self.layers))
        return "\n\n".join(parts)

    def json(self) -> str:
        """:meth:`data` in one line."""
        return json.dumps(self.data())


def measure(
    report: Report,
    sizes: Sizes,
    only: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    on_done: Callable[[str], None] = lambda name: None,
) -> None:
    """Fill ``report`` with the groups in ``only``; ``on_done`` is told each case's name.

    By default all groups, but a whole layer only where there is a GPU.
    """
    default = NAMES if backend() != "reference" else tuple(GROUPS)
    for group in default if only is None else only:
        if group == LAYER:
            report.layers += layer.run_layers(sizes, report.rates, rounds)
            on_done(LAYER)
            continue
        for case in cases(sizes, [group]):
            report.results.append(run.run(case, report.rates, rounds=rounds))
            on_done(case.name)


def sizes_here() -> Sizes:
    """K3's sizes, as far as this device's memory goes; experts take a quarter of it at most."""
    if backend() == "reference":
        return cpu_sizes()
    info = mx.device_info()
    memory_bytes = info.get("memory_size") or info.get("total_memory") or 0
    sizes = k3_sizes(max(32, min(896, memory_bytes // 4 // EXPERT_BYTES)))
    if memory_bytes < LONG_PROMPTS_FROM_BYTES:
        sizes = sizes._replace(prompts=sizes.prompts[:2], contexts=sizes.contexts[:2])
    return sizes


def _about(rates: Rates) -> dict:
    return {
        "device": mx.device_info().get("device_name", platform.processor()),
        "backend": backend(),
        "mlx": version("mlx"),
        "copy_gb_per_s": round(rates.copy / 1e9, 1),
        "product_tflops": round(rates.flops / 1e12, 2),
    }
