#!/usr/bin/env python3
"""Attention over a long text: one MLA layer of K3's head sizes beside mlx-lm's, speed and memory.

    python scripts/bench_context.py                          # 4k, 32k and 128k tokens, 4 heads
    python scripts/bench_context.py --heads 96 --tokens 8k

Weights and text are random. For each length and form of the cache, each in a process of its own:
what the cache takes, the time of 512 tokens of a prompt and of a token after it (medians), and how
far memory rose above the cache since before there was one, by MLX's count and the process's peak.
The last row of a length is mlx-lm's layer of Kimi Linear with its cache; it has no output gate.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

HIDDEN = 512
FILL_TOKENS = 1024  # that are put into the cache at once before anything is measured
FORMS = (None, 8, 4, "mlx-lm")
PROMPTS, TOKENS = 3, 9  # of which medians are taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="4k,32k,128k", help="lengths of the text")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32", help="of activations, and of the plain cache")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each figure")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(measure(**json.loads(args.one))))
    figures = []
    for tokens in args.tokens.split(","):
        found = {form: [] for form in FORMS}
        for _ in range(args.rounds):  # in turn, as other work on the machine comes and goes
            for form, rows in found.items():
                job = {"tokens": tokens, "form": form, "heads": args.heads, "dtype": args.dtype}
                command = [sys.executable, __file__, "--one", json.dumps(job)]
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                rows.append(job | json.loads(run.stdout))
        figures += [middle(rows) for rows in found.values()]
    report(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every figure the median."""
    return {
        name: median(row[name] for row in rows) if isinstance(value, (int, float)) else value
        for name, value in rows[0].items()
        if name != "form"
    } | {"form": rows[0]["form"]}


def measure(
    tokens: str, form: int | str | None, heads: int, dtype: str, prompts: int = PROMPTS
) -> dict[str, Any]:
    """One row, in seconds and bytes."""
    import mlx_k3  # noqa: F401  # loads OpenBLAS before MLX
    import mlx.core as mx  # isort: skip

    from mlx_k3.experts.machine import peak_rss_bytes
    from mlx_k3.models.blocks import BLOCK_TOKENS
    from mlx_k3.units import parse_tokens

    kind = getattr(mx, dtype)
    attend_to, new_cache, append = (peer if form == "mlx-lm" else ours)(form, heads, dtype)

    def attend(n: int, cache: Any) -> float:
        x = mx.random.normal((1, n, HIDDEN)).astype(kind)
        mx.eval(x)
        start = time.perf_counter()
        mx.eval(attend_to(x, cache))
        return time.perf_counter() - start

    attend(BLOCK_TOKENS, new_cache())  # What a process needs once is no part of the figures.
    mx.clear_cache()
    mlx_before, process_before = mx.get_active_memory(), peak_rss_bytes()
    mx.reset_peak_memory()
    cache, before = new_cache(), parse_tokens(tokens) - BLOCK_TOKENS
    while cache.offset < before:
        n = min(FILL_TOKENS, before - cache.offset)
        append(cache, *(mx.random.normal((1, 1, n, width)).astype(kind) for width in (512, 64)))
        mx.eval(cache.state[0])
    times = [attend(BLOCK_TOKENS, cache)]
    while len(times) < prompts:
        cache.trim(BLOCK_TOKENS)
        times.append(attend(BLOCK_TOKENS, cache))
    token_seconds = median(attend(1, cache) for _ in range(TOKENS))
    return {
        "cache_bytes": cache.nbytes,
        "prefill_seconds": median(times),
        "token_seconds": token_seconds,
        "mlx_bytes": mx.get_peak_memory() - mlx_before - cache.nbytes,
        "process_bytes": peak_rss_bytes() - process_before - cache.nbytes,
        "device": str(mx.default_device()),
    }


def ours(bits: int | None, heads: int, dtype: str) -> tuple[Callable, Callable, Callable]:
    """How to attend, to make a cache, and to put rows into one."""
    from mlx_k3.models.latent_cache import LatentCache
    from mlx_k3.models.mla import KimiMLAAttention

    layer = made(KimiMLAAttention, heads, dtype, mla_use_output_gate=True)
    return layer, lambda: LatentCache(bits), LatentCache.append


def peer(_: str, heads: int, dtype: str) -> tuple[Callable, Callable, Callable]:
    """The same of mlx-lm."""
    from mlx_lm.models.base import create_attention_mask
    from mlx_lm.models.cache import KVCache
    from mlx_lm.models.kimi_linear import KimiMLAAttention

    layer = made(KimiMLAAttention, heads, dtype, num_key_value_heads=heads, rms_norm_eps=1e-5)

    def attend(x: Any, cache: KVCache) -> Any:
        # An array, as a mask by name is nothing that its layer takes.
        mask = create_attention_mask(x, cache, return_array=True)
        return layer(x, mask, cache)

    return attend, KVCache, KVCache.update_and_fetch


def made(kind: type, heads: int, dtype: str, **more: Any) -> Any:
    """A random layer with K3's head sizes and rank, narrow outside of attention."""
    import mlx.core as mx

    sizes = SimpleNamespace(
        hidden_size=HIDDEN,
        num_attention_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        **more,
    )
    layer = kind(sizes)
    layer.set_dtype(getattr(mx, dtype))
    layer.eval()
    mx.eval(layer.parameters())
    return layer


def report(figures: list[dict[str, Any]]) -> None:
    first = figures[0]
    print(
        f"{platform.machine()} {platform.system()}, {first['device']}, {first['heads']:.0f} heads\n"
    )
    print(
        "| tokens | cache | MB | prompt of 512, ms | token, ms | beyond it, MLX MB | process MB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in figures:
        form = {None: row["dtype"], 8: "8 bit", 4: "4 bit"}.get(row["form"], row["form"])
        memory = (f"{row[f'{what}_bytes'] / 1e6:.0f}" for what in ("mlx", "process"))
        print(
            f"| {row['tokens']} | {form} | {row['cache_bytes'] / 1e6:.0f} "
            f"| {1e3 * row['prefill_seconds']:.0f} | {1e3 * row['token_seconds']:.1f} "
            f"| {' | '.join(memory)} |"
        )


if __name__ == "__main__":
    main()
