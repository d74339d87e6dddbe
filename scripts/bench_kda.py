#!/usr/bin/env python3
"""KDA's kernels at K3's sizes, beside flash-linear-attention where torch and fla are installed.

    python scripts/bench_kda.py           # needs a GPU
    python scripts/bench_kda.py --tiny    # a dry run in small, on a CPU as well

The table is ``bench_kernels.py --only kda``. flash-linear-attention is timed in CUDA graphs,
without its launches.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

from bench_kernels import require_gpu, timed

HEADS, WIDTH = 96, 128  # K3's
ROUNDS = 9


def fla_lines(tiny: bool) -> list[str]:
    """Milliseconds of flash-linear-attention's own kernels for the same work."""
    try:
        import torch
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except ImportError as e:
        return [f"flash-linear-attention: not timed ({e})"]
    if tiny or not torch.cuda.is_available():
        return ["flash-linear-attention: not timed (a dry run, or no GPU for torch)"]

    def inputs(B: int, T: int) -> dict[str, Any]:
        q, k, v = (
            torch.randn(B, T, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        return {
            "q": q,
            "k": k,
            "v": v,
            "g": -5 * torch.rand(B, T, HEADS, WIDTH, device="cuda"),
            "beta": torch.rand(B, T, HEADS, device="cuda"),
            "initial_state": torch.randn(B, HEADS, WIDTH, WIDTH, device="cuda"),
            "output_final_state": True,
        }

    def milliseconds(function: Callable[..., Any], arguments: dict[str, Any]) -> float:
        with torch.no_grad():
            for _ in range(3):
                function(**arguments)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function(**arguments)
        times = []
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 4)
        return median(times)

    lines = []
    for T in (1024, 4096, 16384):
        for how in ({}, {"safe_gate": True, "lower_bound": -5.0}):
            time_ms = milliseconds(chunk_kda, inputs(1, T) | how)
            bounded = ", safe_gate" if how else ""
            lines.append(f"flash-linear-attention chunk_kda {T} tokens{bounded}: {time_ms:.3f} ms")
    for B in (1, 8):
        time_ms = milliseconds(fused_recurrent_kda, inputs(B, 1))
        lines.append(f"flash-linear-attention fused_recurrent_kda {B} x 1: {time_ms:.4f} ms")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes and few rounds")
    tiny = parser.parse_args().tiny
    require_gpu(tiny)
    print(timed(["kda"], tiny).text(), *fla_lines(tiny), sep="\n\n")


if __name__ == "__main__":
    main()
