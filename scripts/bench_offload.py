#!/usr/bin/env python3
"""Decode and prefill with experts on demand, beside both floors: the reads and the arithmetic.

    python scripts/make_wide_checkpoint.py /data/wide --moe-layers 3
    mlx-k3 convert /data/wide /data/wide-mlx --experts reference --trunk bf16
    python scripts/bench_offload.py /data/wide-mlx --slots 192 --prompt 512 --decode 24

Experts are chosen as the bundled model chose its own while it answered (tests/support/replay.py);
--random-routing leaves that to the checkpoint's random routers, for comparison.

The read floor is a bare reader's: threads that only pread the same experts' bytes, direct, from
the same files. The arithmetic floor is the same model with all experts resident (--no-resident
leaves it out where they do not fit). Every measurement starts with the files out of the system's
cache (as root), and with an empty pool.
"""

import argparse
import json
import mmap
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import mlx_k3  # noqa: F401  # isort: skip  # Loads OpenBLAS, before MLX.
import mlx.core as mx
import numpy as np
from recorded_routing import replay, routing

from mlx_k3.checkpoint.extents import ExpertExtents, merge, open_experts
from mlx_k3.config import K3Config
from mlx_k3.experts.disk import ALIGNMENT
from mlx_k3.loader import assemble
from mlx_k3.models.kimi import Model
from mlx_k3.version import __version__

THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a converted folder")
    parser.add_argument("--slots", type=int, default=192, help="of the pool")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--decode", type=int, default=24, help="tokens")
    parser.add_argument("--no-resident", action="store_true", help="no arithmetic floor")
    parser.add_argument("--random-routing", action="store_true", help="that of random weights")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    experts, k = open_experts(args.model), K3Config.from_file(args.model).num_experts_per_token
    figures, rates = {}, []
    for prefetch in (True, False):
        name = "prefetch" if prefetch else "no prefetch"
        # Before and after each run: a disk's speed drifts.
        rates.append(bare_reader(experts, k))
        figures[name] = offloaded(args, prefetch)
        rates.append(bare_reader(experts, k))
        print(name, json.dumps(figures[name]), f"bare reader {rates[-2:]} GB/s", flush=True)
    figures["bare_reader_gbs"] = rates
    if not args.no_resident:
        figures["resident"] = resident(args)
        print("resident", json.dumps(figures["resident"]), flush=True)
    report(figures, args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def offloaded(args: argparse.Namespace, prefetch: bool) -> dict[str, float]:
    model = opened(args, slots=args.slots, prefetch=prefetch)
    store = model.offload.store
    ids = prompt(model, args.prompt)
    warm_up(model, ids)
    empty(store)
    drop_caches()
    before = store.counters.read_bytes
    cache, start = model.make_cache(), time.perf_counter()
    mx.eval(model(ids, cache=cache))
    prefill = time.perf_counter() - start
    read = store.counters.read_bytes - before
    empty(store)
    drop_caches()
    times, demand, prefetched, stall = [], [], [], []
    half = args.decode // 2  # the pool has filled by then
    for t in range(args.decode):
        if t == half:
            filled = model.offload.usage()
        c = store.counters
        marks = c.demand_bytes, c.prefetch_bytes, c.stall_seconds
        start = time.perf_counter()
        mx.eval(model(ids[:, t % args.prompt, None], cache=cache))
        times.append(time.perf_counter() - start)
        demand.append(c.demand_bytes - marks[0])
        prefetched.append(c.prefetch_bytes - marks[1])
        stall.append(c.stall_seconds - marks[2])
    result = {
        "prefill_s": prefill,
        "prefill_bytes": read,
        "decode_s": median(times[half:]),
        "decode_demand_bytes": float(np.mean(demand[half:])),
        "decode_prefetch_bytes": float(np.mean(prefetched[half:])),
        "stall_share": sum(stall[half:]) / sum(times[half:]),
        "decode_hit_rate": (model.offload.usage() - filled).hit_rate,
    }
    model.offload.close()
    return result


def resident(args: argparse.Namespace) -> dict[str, float]:
    model = opened(args)
    ids = prompt(model, args.prompt)
    warm_up(model, ids)
    cache, start = model.make_cache(), time.perf_counter()
    mx.eval(model(ids, cache=cache))
    prefill, times = time.perf_counter() - start, []
    for t in range(args.decode):
        start = time.perf_counter()
        mx.eval(model(ids[:, t % args.prompt, None], cache=cache))
        times.append(time.perf_counter() - start)
    return {"prefill_s": prefill, "decode_s": median(times)}


def opened(args: argparse.Namespace, **options: Any) -> Model:
    model = assemble(args.model, **options)
    return model if args.random_routing else replay(model)


def prompt(model, tokens: int) -> mx.array:
    rng = np.random.default_rng(0)
    return mx.array(rng.integers(3, model.config.vocab_size, (1, tokens)))


def warm_up(model, ids: mx.array) -> None:
    """Kernels are compiled at their first use, which can take a minute."""
    cache = model.make_cache()
    mx.eval(model(ids[:, :32], cache=cache))
    mx.eval(model(ids[:, :1], cache=cache))


def empty(store) -> None:
    slots = len(store.pool)
    store.resize(1)
    store.resize(slots)


def bare_reader(experts: ExpertExtents, k: int, count: int = 160) -> float:
    """GB/s of threads that only read tokens' experts, direct, into memory of their own."""
    drop_caches()
    layers = experts.layers
    tokens = routing(count, len(layers), experts.count(layers[0]), k)
    called = (zip(layers, token, strict=True) for token in tokens.tolist())
    keys = dict.fromkeys((layer, e) for token in called for layer, ids in token for e in ids)
    keys = [*keys][:count]
    runs = [run for key in keys for run in merge(experts.extents(*key))]
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    fds = {path: os.open(path, flags) for path in {run.path for run in runs}}

    def read(run) -> int:
        buffer = buffers.pop()
        begin = run.offset // ALIGNMENT * ALIGNMENT
        n = os.preadv(fds[run.path], [buffer[: -(-run.nbytes // ALIGNMENT) * ALIGNMENT]], begin)
        buffers.append(buffer)
        return n

    largest = max(run.nbytes for run in runs) + 2 * ALIGNMENT
    buffers = [memoryview(mmap.mmap(-1, largest)) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:: mmap.PAGESIZE] = bytes(len(buffer[:: mmap.PAGESIZE]))
    with ThreadPoolExecutor(THREADS) as pool:
        start = time.perf_counter()
        total = sum(pool.map(read, runs))
        seconds = time.perf_counter() - start
    for fd in fds.values():
        os.close(fd)
    return total / seconds / 1e9


def drop_caches() -> None:
    if hasattr(os, "geteuid") and os.geteuid() == 0 and platform.system() == "Linux":
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")


def report(figures: dict, args: argparse.Namespace) -> None:
    rate = median(figures["bare_reader_gbs"]) * 1e9
    floor = figures.get("resident")
    versions = f"mlx-k3 {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    how = "random" if args.random_routing else "recorded"
    print(f"\n{mx.default_device()}, {os.cpu_count()} cores; {versions}; {args.slots} slots; {how}")
    print("bare reader: " + ", ".join(f"{r:.2f}" for r in figures["bare_reader_gbs"]), "GB/s\n")
    print("| what | time | read | hits | read floor | arithmetic floor | over the higher floor |")
    print("| --- " * 7 + "|")
    for name in ("prefetch", "no prefetch"):
        row = figures[name]
        decode_bytes = row["decode_demand_bytes"] + row["decode_prefetch_bytes"]
        hits = f"{100 * row['decode_hit_rate']:.0f} %"
        for what, nbytes, key, found in (
            (f"prefill of {args.prompt}", row["prefill_bytes"], "prefill_s", ""),
            ("a token", decode_bytes, "decode_s", hits),
        ):
            seconds, read, compute = row[key], nbytes / rate, floor[key] if floor else 0.0
            print(
                f"| {what}, {name} | {seconds:.3f} s | {nbytes / 1e9:.2f} GB | {found} "
                f"| {read:.3f} s | {compute:.3f} s | {seconds / max(read, compute):.2f} |"
            )


if __name__ == "__main__":
    main()
