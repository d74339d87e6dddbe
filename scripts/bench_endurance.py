#!/usr/bin/env python3
"""Two checks that take minutes: experts on demand stay within their memory, and stay so.

  long   one long answer of a tiny model whose pool holds a fraction of its experts: memory and
         time a token at its beginning and at its end
  peak   a random checkpoint far larger than the budget: the process's peak beside the plan

Experts are chosen as the bundled model chose its own while it answered (tests/support/replay.py).
`peak` writes its checkpoint below the folder and deletes it again. Experts are left where they are
(--experts reference), so the disk holds them once.

  scripts/bench_endurance.py long --tokens 10000
  scripts/bench_endurance.py peak --folder peak --gigabytes 20 --memory 6GB
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from make_wide_checkpoint import wide_config
from recorded_routing import replay

from mlx_k3.checkpoint.synthetic import write_random_release
from mlx_k3.convert.stream import convert

WINDOW = 1000  # tokens over which medians are taken
EXPERTS = 256
WIDTHS = {"hidden_size": 2048, "routed_expert_hidden_size": 2048, "moe_intermediate_size": 1408}
EXPERT_BYTES = 3 * 2048 * 1408 * 17 // 32


def tiny_config() -> dict[str, Any]:
    """A model so small that what surrounds the arithmetic is most of the work.

    All layers are KDA: nothing in it grows with the text, so whatever does is a leak.
    """
    sizes = {"hidden_size": 128, "routed_expert_hidden_size": 64, "moe_intermediate_size": 64}
    config = _config(7, 512, heads=4, head_dim=32, experts=16, top_k=4, **sizes)
    layers = config["text_config"]["num_hidden_layers"]
    kda = {"kda_layers": [*range(1, layers + 1)], "full_attn_layers": []}
    config["text_config"]["linear_attn_config"] |= kda
    return config


def large_config(gigabytes: float) -> dict[str, Any]:
    """A model with so many bytes of experts."""
    layers = max(round(gigabytes * 1e9 / EXPERT_BYTES / EXPERTS), 1)
    return _config(layers, 32768, heads=16, head_dim=128, experts=EXPERTS, top_k=8, **WIDTHS)


def _config(
    moe_layers: int, vocabulary: int, *, heads: int, head_dim: int, experts: int, top_k: int, **more
) -> dict[str, Any]:
    config = wide_config(moe_layers, vocabulary)
    text = config["text_config"]
    text["linear_attn_config"] |= {"num_heads": heads, "head_dim": head_dim}
    text |= {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 3 * more["hidden_size"],
        "q_lora_rank": more["hidden_size"] // 4,
        "kv_lora_rank": more["hidden_size"] // 4,
        "num_experts": experts,
        "num_experts_per_token": top_k,
        "max_position_embeddings": 1 << 16,
        **more,
    }
    return config


def long_answer(tokens: int) -> dict[str, Any]:
    """Decode so many tokens in one conversation with a pool of one and a half working sets."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from mlx_k3.experts.machine import rss_bytes
    from mlx_k3.loader import assemble

    with tempfile.TemporaryDirectory() as scratch:
        write_random_release(Path(scratch) / "release", tiny_config())
        convert(Path(scratch) / "release", Path(scratch) / "package", trunk="bf16")
        model = replay(assemble(Path(scratch) / "package", slots=40))
        cache, times, memory = model.make_cache(), [], []
        start = time.perf_counter()
        for _ in generate_step(mx.array([1]), model, max_tokens=tokens, prompt_cache=cache):
            times.append(time.perf_counter() - start)
            memory.append(rss_bytes())
            start = time.perf_counter()
        usage = model.offload.usage()
        window = min(WINDOW, tokens // 2)
        result = {
            "tokens": tokens,
            "first_ms": 1e3 * statistics.median(times[:window]),
            "last_ms": 1e3 * statistics.median(times[-window:]),
            "first_rss_bytes": statistics.median(memory[:window]),
            "last_rss_bytes": statistics.median(memory[-window:]),
            "cache_bytes": sum(c.nbytes for c in cache),
            "hit_rate": usage.hit_rate,
            "disk_bytes": usage.disk_bytes,
        }
        model.offload.close()
        return result


def answer_within(package: Path, memory: str, prompt_tokens: int, new_tokens: int) -> None:
    """Load, answer and print the peak and the plan: in a process of its own."""
    import numpy as np

    from mlx_k3.chat.generation import stream_generate
    from mlx_k3.experts.machine import peak_rss_bytes
    from mlx_k3.loader import load, plan_load

    plan = plan_load(package, memory)
    start = time.perf_counter()
    model, tokenizer = load(package, memory=memory)
    replay(model)
    loaded, loaded_peak = time.perf_counter(), peak_rss_bytes()
    ids = np.random.default_rng(0).integers(3, 30000, prompt_tokens).tolist()
    times = []
    for _ in stream_generate(model, tokenizer, ids, max_tokens=new_tokens):
        times.append(time.perf_counter())
        if len(times) == 1:
            first_usage, prompt_peak = model.offload.usage(), peak_rss_bytes()
    decode = model.offload.usage() - first_usage
    result = {
        "plan_bytes": plan.total_bytes,
        "peak_bytes": peak_rss_bytes(),
        "peak_after_load_bytes": loaded_peak,
        "peak_after_prompt_bytes": prompt_peak,
        "parts": {
            name: getattr(plan, f"{name}_bytes")
            for name in ("process", "trunk", "state", "cache", "prompt", "scratch", "pool")
        },
        "slots": plan.slots,
        "experts": plan.experts,
        "load_seconds": loaded - start,
        "prompt_seconds": times[0] - loaded,
        "prompt_read_bytes": first_usage.disk_bytes,
        "seconds_a_token": (times[-1] - times[0]) / max(len(times) - 1, 1),
        "decode_read_bytes": decode.disk_bytes,
        "decode_hit_rate": decode.hit_rate,
    }
    print(json.dumps(result))


def peak(args: argparse.Namespace) -> dict[str, Any]:
    """Write, convert, answer in another process, delete."""
    release, package = args.folder / "release", args.folder / "package"
    try:
        write_random_release(release, large_config(args.gigabytes))
        convert(release, package, trunk="bf16", experts="reference")
        sizes = ["--memory", args.memory, "--prompt", str(args.prompt), "--new", str(args.new)]
        command = [sys.executable, __file__, "answer", str(package), *sizes]
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(shown.stdout)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checks = parser.add_subparsers(dest="check", required=True)
    long = checks.add_parser("long")
    long.add_argument("--tokens", type=int, default=10000)
    large = checks.add_parser("peak")
    large.add_argument("--folder", type=Path, required=True, help="one that does not exist yet")
    large.add_argument("--gigabytes", type=float, default=20, help="of experts")
    answer = checks.add_parser("answer", help="what `peak` runs in a process of its own")
    answer.add_argument("package", type=Path)
    for check in (large, answer):
        check.add_argument("--memory", default="6GB")
        check.add_argument("--prompt", type=int, default=300, help="tokens")
        check.add_argument("--new", type=int, default=20, help="tokens")
    args = parser.parse_args()
    if args.check == "answer":
        return answer_within(args.package, args.memory, args.prompt, args.new)
    result = long_answer(args.tokens) if args.check == "long" else peak(args)
    if args.check == "peak":
        result["off_percent"] = 100 * (result["peak_bytes"] / result["plan_bytes"] - 1)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
