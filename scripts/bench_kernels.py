#!/usr/bin/env python3
"""Every kernel beside its reference on the device at hand, and beside what its bytes cost at least.

    python scripts/bench_kernels.py                  # K3's sizes; needs a GPU
    python scripts/bench_kernels.py --only router
    python scripts/bench_kernels.py --tiny           # a dry run in small, on a CPU as well

A step's inputs are the outputs of the step before, in chains evaluated at once, so that nothing
overlaps: a figure is what a step adds to a token, launches included. Medians of several chains. The
floor is the least a step can move, over the bandwidth of a large copy measured in the same run.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import mlx.core as mx
from bench_kda import kda_cases

import mlx_k3
import mlx_k3.kernels as kernels
from mlx_k3.config import K3Config
from mlx_k3.errors import UnsupportedError
from mlx_k3.models.bank import Experts

State = Sequence[mx.array]

CHAIN = 32  # steps evaluated at once
ROUNDS = 9
COPY_BYTES = 1 << 30
SIXTEEN = mx.bfloat16


@dataclass(frozen=True)
class Case:
    """One operation at one size: ``step`` takes a state of arrays to the next."""

    name: str
    state: State
    step: Callable[..., State]
    least_bytes: int  # read and written by a step at least
    chain: int = CHAIN


@dataclass(frozen=True)
class Result:
    """Microseconds a step, and the kernel's error of the output's scale."""

    name: str
    kernel_us: float
    reference_us: float
    floor_us: float
    error: float


def normal(*shape: int, dtype: mx.Dtype = SIXTEEN) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def nbytes(*arrays: mx.array) -> int:
    return sum(x.nbytes for x in arrays)


def situ_cases(tiny: bool) -> list[Case]:
    """Of the 16 experts of a token, of the shared experts, and of a block of a prompt."""
    cases = []
    for rows, width in ((16, 3072), (1, 6144), (512, 6144)):
        shape = (2, 64) if tiny else (rows, width)
        gate, up = normal(*shape), normal(*shape)
        cases.append(
            Case(
                f"situ {shape[0]} x {shape[1]}",
                (gate,),
                lambda gate, up=up: (kernels.situ(gate, up, 4.0, 25.0),),
                nbytes(gate, up, gate),
            )
        )
    return cases


def residual_cases(tiny: bool) -> list[Case]:
    """K3's mix of 8 blocks and the running sum: alone, and with the addition and norm around it."""
    M, D = (3, 64) if tiny else (8, 7168)
    weight, norm = normal(D, dtype=mx.float32), normal(D)
    cases = []
    for N in (1, 8, 512):
        blocks, update = normal(N, M, D), normal(N, D)
        candidates = normal(N, M + 1, D)

        def mix(last: mx.array, candidates=candidates) -> State:
            # The weight depends on the step before; it costs both paths the same two operations.
            near = weight + last[0].astype(mx.float32)
            return (kernels.attention_residual(candidates, near, 1e-5),)

        def step(last: mx.array, blocks=blocks, update=update) -> State:
            return (kernels.residual_step(blocks, last, update, weight, norm, 1e-5)[0],)

        row = nbytes(update)
        cases.append(Case(f"attention_residual {N} tokens", (update,), mix, (M + 2) * row))
        cases.append(Case(f"residual_step {N} tokens", (update,), step, (M + 4) * row))
    return cases


def router_cases(tiny: bool) -> list[Case]:
    """K3's 16 of 896; two operations more carry a step's weights into the next one's logits."""
    E, top_k = (33, 4) if tiny else (896, 16)
    bias = normal(E, dtype=mx.float32)
    cases = []
    for N in (1, 512):
        logits = normal(N, E, dtype=mx.float32)

        def step(logits: mx.array) -> State:
            _, weights = kernels.route(logits, bias, top_k, scale=2.5)
            return (logits + weights.max(-1, keepdims=True),)

        moved = nbytes(logits, bias) + N * top_k * 8
        cases.append(Case(f"router {N} tokens", (logits,), step, moved))
    return cases


def experts_cases(tiny: bool) -> list[Case]:
    """16 of K3's 896 experts a token; the reference is MLX's gathered product, expert by expert.

    Beyond a few tokens MLX sorts; on CUDA it compiles that for more than a minute, once.
    """
    config = K3Config.from_file(Path(mlx_k3.__file__).parent / "experts" / "kimi-k3-config.json")
    if tiny:
        config = replace(config, routed_expert_hidden_size=96, moe_intermediate_size=64)
    E, k = (5, 3) if tiny else (896, config.num_experts_per_token)
    D, H = config.expert_dim, config.moe_intermediate_size
    stacks = {}
    for name, rows, columns in (("gate", H, D), ("up", H, D), ("down", D, H)):
        codes = mx.random.randint(0, 256, (E, rows, columns // 2), mx.uint8)
        stacks[f"{name}_proj.weight"] = codes.view(mx.uint32)
        # Such that the outputs stay near the size of the inputs.
        stacks[f"{name}_proj.scales"] = mx.full((E, rows, columns // 32), 120, mx.uint8)
    mx.eval(stacks)
    experts = Experts.over(config, stacks)
    expert_bytes = nbytes(*stacks.values()) // E
    cases = []
    for N in (1, 4) if tiny else (1, 2, 3, 8, 64):
        indices = mx.argsort(mx.random.uniform(shape=(N, E)), axis=-1)[:, :k].astype(mx.uint32)
        weights = mx.full((N, k), 1 / k)
        distinct = len(set(indices.flatten().tolist()))

        def step(z: mx.array, indices=indices, weights=weights) -> State:
            return (experts.summed(z, indices, weights),)

        z = normal(N, D)
        cases.append(
            Case(f"experts {N} tokens", (z,), step, distinct * expert_bytes + 2 * z.nbytes)
        )
    return cases


CASES: dict[str, Callable[[bool], list[Case]]] = {
    "situ": situ_cases,
    "residual": residual_cases,
    "router": router_cases,
    "experts": experts_cases,
    "kda": lambda tiny: [Case(*case) for case in kda_cases(tiny)],
}


def seconds_a_step(case: Case, rounds: int) -> float:
    """The median over ``rounds`` chains, after one that compiles."""

    def chain() -> float:
        start = time.perf_counter()
        state = case.state
        for _ in range(case.chain):
            state = case.step(*state)
        mx.eval(state)
        return (time.perf_counter() - start) / case.chain

    mx.eval(case.state)
    chain()
    return median(chain() for _ in range(rounds))


def error_of(case: Case, backend: str) -> float:
    """The largest error of one step's outputs, of the reference's scale."""
    outputs = []
    for path in (backend, "reference"):
        with kernels.using(path):
            outputs.append([x.astype(mx.float32) for x in case.step(*case.state)])
    errors = [
        (mx.abs(got - want).max() / mx.abs(want).max()).item()
        for got, want in zip(*outputs, strict=True)
    ]
    return max(errors)


def run(case: Case, backend: str, bandwidth: float, rounds: int) -> Result:
    """``case`` by way of both paths."""
    times = []
    for path in (backend, "reference"):
        with kernels.using(path):
            times.append(seconds_a_step(case, rounds) * 1e6)
    floor_us = case.least_bytes / bandwidth * 1e6
    return Result(case.name, *times, floor_us, error_of(case, backend))


def copy_bandwidth(rounds: int, size_bytes: int) -> float:
    """Bytes read and written a second by a large copy: by torch where it is, else by MLX."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        x = mx.zeros((size_bytes,), mx.uint8)
        one = Case("copy", (x,), lambda x: (x + 1,), 2 * size_bytes, chain=4)
        return one.least_bytes / seconds_a_step(one, rounds)
    source = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 8)
    return 2 * size_bytes / median(times[1:])


def table(results: list[Result]) -> str:
    """Markdown."""
    lines = [
        "| step | kernel | reference | times | floor | of the floor | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        lines.append(
            f"| {r.name} | {r.kernel_us:.1f} us | {r.reference_us:.1f} us "
            f"| {r.reference_us / r.kernel_us:.1f} | {r.floor_us:.2f} us "
            f"| {100 * r.floor_us / r.kernel_us:.0f} % | {r.error:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CASES, action="append", help="one group of cases")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    backend = kernels.backend()
    if backend == "reference" and not arguments.tiny:
        raise UnsupportedError("no GPU: there is nothing to time; --tiny is a dry run")

    mx.random.seed(0)
    rounds = 2 if arguments.tiny else ROUNDS
    bandwidth = copy_bandwidth(rounds, 1 << 20 if arguments.tiny else COPY_BYTES)
    about = {
        "device": mx.device_info().get("device_name", platform.processor()),
        "backend": backend,
        "mlx": version("mlx"),
        "copy_gb_per_s": round(bandwidth / 1e9),
    }
    results = []
    for name in arguments.only or CASES:
        for case in CASES[name](arguments.tiny):
            results.append(run(case, backend, bandwidth, rounds))
            print(results[-1].name, file=sys.stderr)
    if arguments.json:
        print(json.dumps(about | {"results": [asdict(r) for r in results]}))
    else:
        print(
            ", ".join(f"{key} {value}" for key, value in about.items()), table(results), sep="\n\n"
        )


if __name__ == "__main__":
    try:
        main()
    except UnsupportedError as e:
        sys.exit(str(e))
