#!/usr/bin/env python3
"""Experts on demand, beside mlx-vlm's `moe_offload`, on the same weights, in one run.

    pip install --no-deps mlx-vlm==0.7.10
    python scripts/bench_peers.py --folder /data/peers
    python scripts/bench_peers.py --folder /data/peers --shape large --tokens 256 --rounds 5

Two random checkpoints in the release's format, both much larger than the pool:

  many   K3's counts: 896 experts a layer, 16 active; every width a quarter of K3's
  large  K3's own experts of 17.5 MB, 16 active of 112; everything else a quarter as wide

Both are converted by `mlx-k3 convert`, and that package once more by `python -m mlx_vlm.moe_offload
--build PACKAGE --out FOLDER`, mlx-vlm's own step. Everyone then gets the same bytes for experts
(two working sets by default), the same ids, the same routing (as the bundled model chose its own
experts while it answered: tests/support/replay.py), and the same loop: the prompt up to its logits,
then one token after the other. mlx-vlm takes 2048 tokens of a prompt at once, its default; mlx-k3
takes these all. mlx-vlm runs as it loads itself (bfloat16) and recast to float32, which is what
mlx-k3 does by itself on a CPU; each is a process of its own, in turn, `--rounds` times, and medians
are taken. Processor time is reported too: on a shared machine it is the steadier figure.

The files are out of the system's cache before the prompt and before every decoded token, as they
are for a model that is many times larger than memory: mlx-vlm's reads go through that cache and
would find there, beyond its budget, what this small checkpoint left (Linux; elsewhere see to it).
"""

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

PEERS = ("mlx-k3", "mlx-vlm", "mlx-vlm, float32")
STEP = 2048  # tokens of a prompt that mlx-vlm's generate takes at once
DISK_BYTES = 1 << 30  # that the bare reader reads
WARM_UP = 24  # tokens; kernels are compiled at their first use


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints of 14 GB")
    parser.add_argument("--shape", choices=["many", "large"], action="append", help="default: both")
    parser.add_argument("--moe-layers", type=int, default=0, help="instead of the shape's own")
    parser.add_argument("--tokens", type=int, action="append", help="prompt; default 64 and 256")
    parser.add_argument("--decode", type=int, default=16, help="tokens")
    parser.add_argument("--working-sets", type=float, default=2.0, help="of experts in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    parser.add_argument("--json", type=Path, help="write all figures here as well")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(measure(json.loads(args.one))))
    figures = []
    for shape in args.shape or ["many", "large"]:
        folder = args.folder / shape
        jobs = prepare(folder, shape, args)
        figures += [run_in_turn(shape, job, args.rounds) for job in jobs]
        if not args.keep:
            shutil.rmtree(folder)
    report(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def config_of(shape: str, moe_layers: int) -> dict[str, Any]:
    """K3's configuration made small; see above."""
    from make_wide_checkpoint import wide_config

    config = wide_config(moe_layers or {"many": 4, "large": 2}[shape], 8192)
    text = config["text_config"]
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        text[key] //= 4
    for key in ("q_lora_rank", "kv_lora_rank"):
        text[key] //= 4
    text["linear_attn_config"]["num_heads"] //= 4
    if shape == "many":
        text["moe_intermediate_size"] //= 4
        text["routed_expert_hidden_size"] //= 4
    else:
        text["num_experts"] = 112
    # mlx-vlm builds the vision tower whatever the prompt is; one layer will do.
    config["vision_config"] = {
        "patch_size": 14,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": 1,
        "vt_hidden_size": 64,
        "vt_intermediate_size": 128,
        "qkv_hidden_size": 96,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 64,
        "text_hidden_size": text["hidden_size"],
    }
    return config


def prepare(folder: Path, shape: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the checkpoint in both forms; what to measure of it, a job for each prompt."""
    from mlx_k3.checkpoint.extents import open_experts
    from mlx_k3.checkpoint.synthetic import write_random_release
    from mlx_k3.convert.stream import convert

    package, repacked = folder / "package", folder / "mlx-vlm"
    if not (repacked / "offload_index.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        config = config_of(shape, args.moe_layers)
        write_random_release(folder / "release", config)
        convert(folder / "release", package, trunk="bf16")
        shutil.rmtree(folder / "release")
        command = [sys.executable, "-m", "mlx_vlm.moe_offload", "--build", package]
        subprocess.run([*command, "--out", repacked], check=True, stdout=sys.stderr)
    experts = open_experts(package)
    text = json.loads((package / "config.json").read_text())["text_config"]
    expert_bytes = experts.expert_bytes(experts.layers[0])
    working_set = len(experts.layers) * text["num_experts_per_token"]
    return [
        {
            "package": str(package),
            "repacked": str(repacked),
            "tokens": tokens,
            "decode": args.decode,
            "vocabulary": text["vocab_size"],
            "layers": len(experts.layers),
            "experts": sum(map(experts.count, experts.layers)),
            "expert_bytes": expert_bytes,
            "slots": int(args.working_sets * working_set),
        }
        for tokens in args.tokens or [64, 256]
    ]


def run_in_turn(shape: str, job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """All figures of one job: each peer once a round, and the bare disk before them."""
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in ("disk", *PEERS)}
    for number in range(rounds):
        for peer, results in runs.items():
            argument = json.dumps({**job, "peer": peer, "round": number})
            command = [sys.executable, __file__, "--folder", ".", "--one", argument]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(shape, job["tokens"], peer, done.stdout.splitlines()[-1], file=sys.stderr)
    return {"shape": shape, **job, "runs": runs}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What one process finds."""
    from mlx_k3 import blas

    if blas.advice():
        raise SystemExit(f"OpenBLAS is not there: {blas.advice()}")
    if job["peer"] == "disk":
        rates = {mode: disk_rate(job, mode == "direct") for mode in ("direct", "buffered")}
        return {**rates, "blas": blas.name()}
    import mlx.core as mx
    import numpy as np

    from mlx_k3.experts import machine

    run, make_cache, found = open_ours(job) if job["peer"] == "mlx-k3" else open_theirs(job)
    rng = np.random.default_rng(job["round"])
    ids = mx.array(rng.integers(3, job["vocabulary"], (1, job["tokens"] + job["decode"])))

    def step(part: mx.array, cache: list[Any]) -> None:
        mx.eval(run(part, cache)[:, -1], [layer.state for layer in cache])

    if mx.default_device() != mx.cpu:
        cache = make_cache()
        step(ids[:, :WARM_UP], cache)
        step(ids[:, :1], cache)
    cache, at_once = make_cache(), job["tokens"] if job["peer"] == "mlx-k3" else STEP
    forget(job)
    read, start, cpu = read_bytes(), time.perf_counter(), time.process_time()
    for first in range(0, job["tokens"], at_once):
        step(ids[:, first : min(first + at_once, job["tokens"])], cache)
        mx.clear_cache()
    prefill, prefill_cpu = time.perf_counter() - start, time.process_time() - cpu
    prefill_read = read_bytes() - read

    read, seconds, cpu, (hits, asked) = read_bytes(), [], 0.0, found()
    for position in range(job["tokens"], job["tokens"] + job["decode"]):
        forget(job)
        start, begun = time.perf_counter(), time.process_time()
        step(ids[:, position : position + 1], cache)
        seconds.append(time.perf_counter() - start)
        cpu += time.process_time() - begun
    read, hits, asked = read_bytes() - read, found()[0] - hits, found()[1] - asked
    return {
        "device": str(mx.default_device()),
        "prefill_s": prefill,
        "prefill_cpu_s": prefill_cpu,
        "prefill_read_bytes": prefill_read,
        "decode_s": seconds,
        "decode_cpu_s": cpu,
        "decode_read_bytes": read,
        "decode_hit_rate": hits / asked,
        "peak_bytes": machine.peak_rss_bytes(),
    }


def open_ours(job: dict[str, Any]):
    """mlx-k3: how to run it, its caches, and what it found in memory of what it asked for."""
    from recorded_routing import replay

    from mlx_k3.loader import assemble

    model = replay(assemble(Path(job["package"]), slots=job["slots"]))

    def found() -> tuple[int, int]:
        usage = model.offload.usage()
        needed = usage.hit_bytes + usage.demand_bytes + usage.used_prefetch_bytes
        return usage.hit_bytes, needed

    return lambda ids, cache: model(ids, cache=cache), model.make_cache, found


def open_theirs(job: dict[str, Any]):
    """The same of mlx-vlm, with the same bytes for experts."""
    import mlx.core as mx
    from mlx_vlm.utils import load_model
    from recorded_routing import replay

    budget_bytes = job["slots"] * job["expert_bytes"]
    model = load_model(Path(job["repacked"]), expert_cache_gb=budget_bytes / 1e9)
    if job["peer"].endswith("float32"):
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    text = replay(model.language_model)

    def found() -> tuple[int, int]:
        stats = model.moe_offload_store.stats()
        return stats["hits"], stats["hits"] + stats["misses"]

    return lambda ids, cache: text(ids, cache=cache).logits, text.make_cache, found


def disk_rate(job: dict[str, Any], direct: bool) -> float:
    """Bytes a second of threads that only read random experts of the package, each once."""
    from mlx_k3.checkpoint.extents import merge, open_experts
    from mlx_k3.experts.disk import ALIGNMENT, Disk

    experts, disk = open_experts(job["package"]), Disk()
    keys = [(layer, e) for layer in experts.layers for e in range(experts.count(layer))]
    keys = random.sample(keys, min(len(keys), -(-DISK_BYTES // job["expert_bytes"])))
    runs = deque(run for key in keys for run in merge(experts.extents(*key)))
    fds = {path: disk.open(path, direct) for path in {run.path for run in runs}}
    room = -(-max(run.nbytes for run in runs) // ALIGNMENT + 1) * ALIGNMENT
    done = []

    def work() -> None:
        memory = memoryview(mmap.mmap(-1, room))
        while True:
            try:
                run = runs.popleft()
            except IndexError:
                return
            begin = run.offset // ALIGNMENT * ALIGNMENT
            end = -(-(run.offset + run.nbytes) // ALIGNMENT) * ALIGNMENT
            while begin < end:
                n = disk.read(fds[run.path], [memory[: end - begin]], begin)
                if not n:
                    break
                begin += n
            done.append(run.nbytes)

    forget(job)
    threads = [threading.Thread(target=work) for _ in range(8)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - start)


def forget(job: dict[str, Any]) -> None:
    """Drop both folders' files from the system's cache, where a process can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for folder in (job["package"], job["repacked"]):
        for path in Path(folder).rglob("*.safetensors"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read_bytes() -> int:
    """Bytes this process has had from the disk; 0 where the system does not say."""
    io = Path("/proc/self/io")
    if not io.exists():
        return 0
    return int(io.read_text().split("\nread_bytes: ")[1].split()[0])


def report(figures: list[dict[str, Any]]) -> None:
    names = ("mlx-k3", "mlx-vlm", "mlx", "mlx-lm")
    first = figures[0]["runs"]["mlx-k3"][0]
    print(
        f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, {first['device']}, "
        f"{figures[0]['runs']['disk'][0]['blas']}; "
        + ", ".join(f"{name} {version(name)}" for name in names)
    )
    for job in figures:
        gb = 1e-9 * job["expert_bytes"]
        disk = job["runs"]["disk"]
        direct, buffered = (median(r[mode] for r in disk) for mode in ("direct", "buffered"))
        rate = max(direct, buffered)
        print(
            f"\n{job['shape']}: {job['layers']} MoE layers, {job['experts']} experts of "
            f"{1e3 * gb:.2f} MB = {job['experts'] * gb:.1f} GB; "
            f"{job['slots'] * gb:.2f} GB of them in memory; a bare reader gets "
            f"{direct / 1e9:.2f} GB/s, through the system's cache {buffered / 1e9:.2f} GB/s\n"
        )
        print(
            f"| | prefill of {job['tokens']} | times ours | read | disk floor | CPU time ", end=""
        )
        print("| a token | times ours | read | disk floor | CPU time | hits | peak |")
        print("| --- " * 13 + "|")
        rows = {peer: summary(job, peer) for peer in PEERS}
        ours = rows["mlx-k3"]
        for peer, row in rows.items():
            prefill, decode = row["prefill_s"], row["decode_s"]
            print(
                f"| {peer} | {prefill:.2f} s ({job['tokens'] / prefill:.1f} tok/s) "
                f"| {prefill / ours['prefill_s']:.1f} | {row['prefill_read'] / 1e9:.2f} GB "
                f"| {row['prefill_read'] / rate:.2f} s | {row['prefill_cpu_s']:.2f} s "
                f"| {decode:.3f} s ({1 / decode:.2f} tok/s) | {decode / ours['decode_s']:.1f} "
                f"| {row['decode_read'] / 1e6:.0f} MB | {row['decode_read'] / rate:.3f} s "
                f"| {row['decode_cpu_s']:.3f} s | {100 * row['hit_rate']:.0f} % "
                f"| {row['peak'] / 1e9:.1f} GB |"
            )


def summary(job: dict[str, Any], peer: str) -> dict[str, float]:
    """Medians over the rounds; of the tokens of all rounds for a token's time."""
    runs = job["runs"][peer]
    return {
        "prefill_s": median(run["prefill_s"] for run in runs),
        "prefill_cpu_s": median(run["prefill_cpu_s"] for run in runs),
        "prefill_read": median(run["prefill_read_bytes"] for run in runs),
        "decode_s": median(seconds for run in runs for seconds in run["decode_s"]),
        "decode_cpu_s": median(run["decode_cpu_s"] / len(run["decode_s"]) for run in runs),
        "decode_read": median(run["decode_read_bytes"] / len(run["decode_s"]) for run in runs),
        "hit_rate": median(run["decode_hit_rate"] for run in runs),
        "peak": median(run["peak_bytes"] for run in runs),
    }


if __name__ == "__main__":
    main()
