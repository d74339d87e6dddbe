"""``mlx-k3 doctor``: what this machine offers and whether the package computes right on it.

A check is a function that returns a :class:`Fact`; add one to ``CHECKS`` and it is shown.
"""

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import blas, nano
from ..errors import K3Error
from ..units import format_bytes
from ..version import __version__
from . import loading

if TYPE_CHECKING:
    from ..bench.run import Result

# Largest accepted error of the self check, relative to the largest logit, in float32.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Fact:
    """One line of the report. ``data`` is what ``--json`` shows, ``problem`` fails the command.

    ``details`` are lines below it.
    """

    name: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    advice: str | None = None
    details: tuple[str, ...] = ()


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, device, BLAS and disk, and check the arithmetic: each GPU kernel, a model.

    A kernel that is wrong on this device is not used any more, until doctor finds it right. Exit
    code 1 if a check fails.

    Examples:

        mlx-k3 doctor

        mlx-k3 doctor --json
    """
    # The self check compares in float32; some GPUs would else round what they multiply to TF32.
    os.environ["MLX_ENABLE_TF32"] = "0"
    facts = [check() for check in CHECKS]
    problems = [fact.problem for fact in facts if fact.problem]
    advice = [fact.advice for fact in facts if fact.advice]
    if as_json:
        data = {key: value for fact in facts for key, value in fact.data.items()}
        print(json.dumps({"ok": not problems, **data, "problems": problems, "advice": advice}))
    else:
        for fact in facts:
            print(f"{fact.name:12} {fact.text}")
            for line in fact.details:
                print(f"{'':12} {line}")
        for line in problems:
            print(f"Problem: {line}")
        for line in advice:
            print(f"Advice: {line}")
    if problems:
        raise typer.Exit(1)


def _package() -> Fact:
    return Fact("mlx-k3", __version__, {"mlx_k3": __version__})


def _libraries() -> Fact:
    found = {name: version(name) for name in ("mlx", "mlx-lm")}
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    return Fact("libraries", text, {name.replace("-", "_"): v for name, v in found.items()})


def _system() -> Fact:
    python = platform.python_version()
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system()
    data = {"python": python, "system": system, "machine": platform.machine()}
    return Fact("system", f"{system} {platform.machine()}, Python {python}", data)


def _device() -> Fact:
    try:
        import mlx.core as mx
    except ImportError as e:
        return Fact(
            "device",
            "none",
            {"device": None},
            problem=f"MLX cannot be loaded: {e}",
            advice="on Linux, install mlx-k3[cpu], mlx-k3[cuda12] or mlx-k3[cuda13]",
        )
    kind = "CPU"
    if mx.default_device().type == mx.gpu:
        kind = "Metal" if mx.metal.is_available() else "CUDA"
    info = mx.device_info()
    name = info.get("device_name", "unknown")
    memory_bytes = info.get("memory_size") or info.get("total_memory") or _system_memory_bytes()
    data = {"device": kind, "device_name": name, "memory_bytes": memory_bytes}
    limit_bytes = info.get("max_recommended_working_set_size")
    text = f"{kind}: {name}, {format_bytes(memory_bytes)}"
    if limit_bytes:
        data["gpu_limit_bytes"] = limit_bytes
        text += f", of which the GPU may hold {format_bytes(limit_bytes)}"
    return Fact("device", text, data)


def _system_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _blas() -> Fact:
    try:
        gflops = _measure_gflops()
    except ImportError:
        return Fact("BLAS", blas.name(), {"blas": blas.name()})
    text = f"{blas.name()}, {gflops:.0f} GFLOP/s in float32"
    return Fact("BLAS", text, {"blas": blas.name(), "gflops": gflops}, advice=blas.advice())


def _measure_gflops() -> float:
    """Speed of the CPU on a product of 64 rows with a weight of a K3 expert's size."""
    import mlx.core as mx

    rows, wide, narrow = 64, 3584, 3072
    with mx.stream(mx.cpu):
        a, b = mx.ones((rows, wide)), mx.ones((wide, narrow))
        mx.eval(a, b)
        seconds = []
        for _ in range(8):
            start = time.perf_counter()
            mx.eval(a @ b)
            seconds.append(time.perf_counter() - start)
    return round(2e-9 * rows * wide * narrow / min(seconds), 1)


def _disk() -> Fact:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(there).free
    text = f"{format_bytes(free_bytes)} free for downloads in {cache}"
    return Fact("disk", text, {"hub_cache": str(cache), "free_bytes": free_bytes})


def _expert_reads() -> Fact:
    """Whether experts on demand can be read past the system's cache, tried on a small file."""
    from ..experts.reader import ExpertReader

    try:
        file = loading.bundled_model() / "config.json"
        with ExpertReader(threads=1) as reader:
            mode = reader.mode(str(file))
    except K3Error:  # The self check tells what is wrong.
        return Fact("expert reads", "not tried", {"expert_reads": None})
    how = {"direct": "past the system's cache", "buffered": "through the system's cache"}[mode]
    folder = file.parent.parent
    return Fact("expert reads", f"{mode}, {how}, in {folder}", {"expert_reads": mode})


def _kernels() -> Fact:
    """Every kernel against plain MLX, on random numbers; what is wrong is not used from now on."""
    try:
        from ..kernels import backend
    except ImportError:
        return Fact("kernels", "none", {"kernels": None})
    if backend() == "reference":
        return Fact("kernels", "reference: plain MLX, as there is no GPU", {"kernels": backend()})
    from ..bench.cases import cases
    from ..bench.measure import rates
    from ..bench.run import try_kernel
    from ..bench.sizes import doctor_sizes
    from ..kernels.verdicts import record

    speed = rates()
    results = [try_kernel(case, speed) for case in cases(doctor_sizes())]
    faults = {name: r.fault for r in results for name in r.kernels if r.fault}
    names = {name for r in results for name in r.kernels}
    data = {
        "kernels": backend(),
        "copy_gb_per_s": round(speed.copy / 1e9, 1),
        "kernels_refused": sorted(faults),
        "kernel_checks": [
            {
                "name": r.name,
                "kernels": r.kernels,
                "error": r.error,
                "us": r.kernel_evaluated_us,
                "bandwidth_share": r.bandwidth_share,
                "fault": r.fault,
            }
            for r in results
        ],
    }
    text = f"{backend()}: {len(names - faults.keys())} of {len(names)} right; a copy runs at "
    problem = None
    if faults:
        problem = "kernels: " + "; ".join(f"{name} {why}" for name, why in faults.items())
    try:
        record(faults)
    except K3Error as e:
        problem = f"{problem}; {e}" if problem else str(e)
    return Fact(
        "kernels",
        f"{text}{format_bytes(int(speed.copy))}/s",
        data,
        problem,
        advice="plain MLX takes the place of those kernels; please report what doctor --json prints"
        if faults
        else None,
        details=tuple(_kernel_line(r) for r in results),
    )


def _kernel_line(result: "Result") -> str:
    if result.problem is not None:
        return f"{result.name:30} does not run"
    wrong = "  WRONG" if result.fault else ""
    share = f"{result.bandwidth_share:.0%} of a copy"
    return f"{result.name:30} {result.error:7.0e} {_time(result):>9}  {share}{wrong}"


def _time(result: "Result") -> str:
    us = result.kernel_evaluated_us
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _self_check() -> Fact:
    """Convert the bundled checkpoint, run it in float32 and compare with mlx-lm's logits."""
    try:
        error = _bundled_model_error()
    except (ImportError, K3Error) as e:
        return Fact("self check", "failed", {"self_check_error": None}, problem=f"self check: {e}")
    text = f"logits of the bundled model within {error:.0e} of the stored ones"
    problem = None
    if not error <= TOLERANCE:  # So that NaN fails.
        problem = f"self check: logits differ by {error:.1e}, more than {TOLERANCE:.0e}"
    return Fact("self check", text, {"self_check_error": error}, problem)


def _bundled_model_error() -> float:
    import mlx.core as mx

    from ..loader import load

    expected = mx.load(str(nano.EXPECTED))
    model, _ = load(loading.bundled_model(), dtype="float32")
    difference = mx.abs(model(expected["ids"])[:, -1] - expected["last_logits"])
    return (difference.max() / mx.abs(expected["last_logits"]).max()).item()


CHECKS: tuple[Callable[[], Fact], ...] = (
    _package,
    _libraries,
    _system,
    _device,
    _blas,
    _disk,
    _expert_reads,
    _kernels,
    _self_check,
)
