#!/usr/bin/env python3
"""KDA's kernels at K3's sizes, beside flash-linear-attention where torch and fla are installed.

    python scripts/bench_kda.py           # needs a GPU
    python scripts/bench_kda.py --tiny    # a dry run in small, on a CPU as well

Times are of steps that depend on each other, as in bench_kernels.py, whose table this script prints
for its own cases. flash-linear-attention is timed in CUDA graphs, without its launches.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx

from mlx_k3.kernels import backend, kda, l2norm
from mlx_k3.kernels.kda_conv import kda_conv
from mlx_k3.kernels.kda_decode import kda_decode

HEADS, WIDTH, TAPS = 96, 128, 4  # K3's
SIXTEEN = mx.bfloat16
ROUNDS = 9

# A name, the state of a chain, its step, the least bytes a step moves, and the chain's length.
KdaCase = tuple[str, Sequence[mx.array], Callable[..., Sequence[mx.array]], int, int]


def kda_cases(tiny: bool) -> list[KdaCase]:
    """The cases of bench_kernels.py: a layer's few tokens, and the parts of a prompt."""
    H, D = (2, 32) if tiny else (HEADS, WIDTH)
    few = [(1, 1), (1, 3)] if tiny else [(1, 1), (8, 1), (1, 2), (1, 4), (1, 8)]
    many = [40] if tiny else [1024, 4096, 16384]
    cases = [decode_case(B, T, H, D) for B, T in few]
    for T in many:
        cases += [prefill_case(T, H, D, SIXTEEN), conv_case(T, H, D)]
    return [*cases, prefill_case(many[-1] if tiny else 4096, H, D, mx.float32)]


def decode_case(B: int, T: int, H: int, D: int) -> KdaCase:
    """All of a layer between its projections; state and convolution go from step to step."""

    def projection(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(SIXTEEN)

    qkv, a, g = (projection(B, T, n * H * D) for n in (3, 1, 1))
    b, conv = projection(B, T, H), projection(B, TAPS - 1, 3 * H * D)
    weight = 0.5 * mx.random.normal((3 * H * D, TAPS))
    A_log, dt_bias, norm = (mx.random.normal((n,)) for n in (H, H * D, D))
    state = mx.random.normal((B, H, D, D))

    def step(_: mx.array, conv: mx.array, state: mx.array) -> Sequence[mx.array]:
        inputs = qkv, conv, weight, a, A_log, dt_bias, b, g, norm, state
        return kda_decode(*inputs, lower_bound=-5.0, eps=1e-5)

    once = (qkv, a, g, b, weight, A_log, dt_bias, norm, a)
    least = sum(x.nbytes for x in once) + 2 * (conv.nbytes + state.nbytes)
    return f"kda_decode {B} x {T} tokens", (a, conv, state), step, least, 32


def prefill_case(T: int, H: int, D: int, dtype: mx.Dtype) -> KdaCase:
    """The delta rule over a prompt; the state goes from step to step."""
    q, k = (l2norm(mx.random.normal((1, T, H, D))) for _ in range(2))
    v = mx.random.normal((1, T, H, D))
    q, k, v = (x.astype(dtype) for x in (D**-0.5 * q, k, v))
    log_decay = -5 * mx.random.uniform(shape=(1, T, H, D))
    beta = mx.random.uniform(shape=(1, T, H))
    output, state = mx.zeros((1, T, H, D)), mx.random.normal((1, H, D, D))
    mx.eval(q, k, v, log_decay, beta, output, state)

    def step(_: mx.array, state: mx.array) -> Sequence[mx.array]:
        return kda(q, k, v, log_decay, beta, state)

    once = (q, k, v, log_decay, beta, output)
    least = sum(x.nbytes for x in once) + 2 * state.nbytes
    name = "" if dtype == SIXTEEN else f" {str(dtype).rpartition('.')[2]}"
    return f"kda {T} tokens{name}", (output, state), step, least, 4


def conv_case(T: int, H: int, D: int) -> KdaCase:
    """Convolution and norm over a prompt; the convolution's inputs go from step to step."""
    qkv = mx.random.normal((1, T, 3 * H * D)).astype(SIXTEEN)
    weight = 0.5 * mx.random.normal((3 * H * D, TAPS))
    conv, heads = mx.zeros((1, TAPS - 1, 3 * H * D), SIXTEEN), mx.zeros((1, T, H, D), SIXTEEN)

    def step(q: mx.array, k: mx.array, v: mx.array, conv: mx.array) -> Sequence[mx.array]:
        # The inputs depend on the step before, for one small operation.
        return kda_conv(qkv, weight + q[0, 0, 0, 0], conv, H)

    return f"kda_conv {T} tokens", (heads, heads, heads, conv), step, 2 * qkv.nbytes, 4


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
    from bench_kernels import COPY_BYTES, Case, copy_bandwidth, run, table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes and few rounds")
    tiny = parser.parse_args().tiny
    if backend() == "reference" and not tiny:
        sys.exit("no GPU: there is nothing to time; --tiny is a dry run")
    mx.random.seed(0)
    rounds = 2 if tiny else ROUNDS
    bandwidth = copy_bandwidth(rounds, 1 << 20 if tiny else COPY_BYTES)
    results = []
    for name, state, step, least_bytes, length in kda_cases(tiny):
        case = Case(name, state, step, least_bytes, length)
        results.append(run(case, backend(), bandwidth, rounds))
        print(name, file=sys.stderr)
    print(f"copy {bandwidth / 1e9:.0f} GB/s", table(results), *fla_lines(tiny), sep="\n\n")


if __name__ == "__main__":
    main()
