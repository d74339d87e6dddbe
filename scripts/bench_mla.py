#!/usr/bin/env python3
"""One token's attention to a long text, beside its floors and mlx-lm's layer, in the same run.

    python scripts/bench_mla.py                       # 4k, 32k and 128k tokens, 96 heads
    python scripts/bench_mla.py --tiny                # a dry run in small, on a CPU as well

`attention` is all heads' attention to the latents, from the absorbed queries to the weighted sums:
its floor is the larger of its bytes over a copy's bandwidth and its products over a large product's
rate, both measured in this run. `layer` is K3's MLA layer with narrow projections around it
(hidden 64), each step appending a token: ours, ours without the kernel, and mlx-lm's, with the same
weights and texts. Steps depend on each other; figures are medians of several chains.
"""

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import mlx_k3  # loads OpenBLAS before MLX where there is no GPU

import mlx.core as mx  # isort: skip
from mlx_lm.models.cache import KVCache
from mlx_lm.models.kimi_linear import KimiMLAAttention as PeerLayer

from mlx_k3 import kernels
from mlx_k3.bench.measure import error, rates, timing
from mlx_k3.kernels.mla_decode import mla_decode, mla_decode_pays, mla_decode_reference
from mlx_k3.models.latent_cache import LatentCache
from mlx_k3.models.mla import KimiMLAAttention
from mlx_k3.units import parse_tokens

RANK, NOPE, SHARED, VALUE, HIDDEN = 512, 128, 64, 128, 64
CHAIN = 16  # steps evaluated at once, of layers; each makes their text longer
ATTENTION_CHAIN = 128
COPY_BYTES = 1 << 30
FILL_TOKENS = 8192  # that are put into a cache at once


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="4k,32k,128k", help="lengths of the text")
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--tiny", action="store_true", help="300 tokens, few steps")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    copied = copy_bandwidth(1 << 22 if args.tiny else COPY_BYTES)
    flops = rates(1 << 22 if args.tiny else COPY_BYTES).flops
    about = {
        "device": mx.device_info().get("device_name", platform.processor()),
        "kernels": kernels.backend(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")}
        | {"mlx-k3": mlx_k3.__version__},
        "copy_gb_per_s": copied / 1e9,
        "product_tflops": flops / 1e12,
        "heads": args.heads,
    }
    rows = []
    for tokens in [300] if args.tiny else map(parse_tokens, args.tokens.split(",")):
        how = {"chain": 2 if args.tiny else CHAIN, "rounds": 2 if args.tiny else 9}
        rows.append(measure(tokens, args.heads, copied, flops, how))
        print(f"{tokens} tokens done", file=sys.stderr)
    print(f"{about}\n\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))


def measure(tokens: int, heads: int, copied: float, flops: float, how: dict) -> dict[str, Any]:
    """All rows of one length, in seconds."""
    mx.random.seed(0)
    ours, peer = layers(heads)
    cache, theirs = LatentCache(), KVCache()
    for first in range(0, tokens, FILL_TOKENS):
        n = min(FILL_TOKENS, tokens - first)
        rows = [normal(1, 1, n, width) for width in (RANK, SHARED)]
        cache.append(*rows)
        theirs.update_and_fetch(*rows)
        mx.eval(cache.state, theirs.state)
    chain = ATTENTION_CHAIN if how["chain"] == CHAIN else how["chain"]
    found = attention(cache, tokens, heads, how | {"chain": chain})
    moved, products = tokens * (RANK + SHARED) * 2, 2 * heads * tokens * (2 * RANK + SHARED)
    floors = {"copy": moved / copied, "products": products / flops}
    before, x = cache.state, normal(1, 1, HIDDEN)
    with kernels.using("reference"):
        plain = LatentCache.from_state(before)
        plain_layer = timing(lambda x: (ours(x, plain),), (x,), **how).seconds
    peer_layer = timing(lambda x: (peer(x, cache=theirs),), (x,), **how).seconds
    theirs.trim(theirs.offset - tokens)
    wrong = error([ours(x, LatentCache.from_state(before))], [peer(x, cache=theirs)])
    layer = timing(lambda x: (ours(x, cache),), (x,), **how).seconds
    return {
        "tokens": tokens,
        **found,
        **{f"floor_{name}": seconds for name, seconds in floors.items()},
        "layer": layer,
        "plain_layer": plain_layer,
        "peer_layer": peer_layer,
        "layer_error": wrong,
    }


def attention(cache: LatentCache, tokens: int, heads: int, how: dict) -> dict[str, Any]:
    """The attention alone: seconds, and the error beside float32 of the output's scale."""
    q, q_latent = (normal(1, heads, 1, width) * 0.1 for width in (NOPE + SHARED, RANK))
    blocks = list(zip(*cache.state[:2], strict=True))
    form = mla_decode if mla_decode_pays(q, blocks, RANK) else mla_decode_reference
    seconds = timing(lambda q_latent: (form(q, q_latent, blocks, tokens),), (q_latent,), **how)
    wrong = error(
        [form(q, q_latent, blocks, tokens)], [mla_decode_reference(q, q_latent, blocks, tokens)]
    )
    return {
        "form": "kernel" if form is mla_decode else "plain operations",
        "attention": seconds.seconds,
        "attention_evaluated": seconds.evaluated_seconds,
        "attention_error": wrong,
    }


def layers(heads: int) -> tuple[KimiMLAAttention, PeerLayer]:
    """Ours and mlx-lm's, with the same random weights."""
    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": SHARED,
        "v_head_dim": VALUE,
        "mla_use_output_gate": False,
        "rms_norm_eps": 1e-6,  # as ours has it inside, whatever the configuration says
    }
    ours, peer = KimiMLAAttention(SimpleNamespace(**sizes)), PeerLayer(SimpleNamespace(**sizes))
    for layer in (ours, peer):
        layer.set_dtype(mx.bfloat16)
        layer.eval()
    peer.update(ours.parameters())
    mx.eval(ours.parameters(), peer.parameters())
    return ours, peer


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def copy_bandwidth(size_bytes: int) -> float:
    """Bytes read and written a second by a large copy: by torch where it is, else by MLX."""
    try:
        import torch
    except ImportError:
        return rates(size_bytes).copy
    if not torch.cuda.is_available():
        return rates(size_bytes).copy
    source = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 8)
    return 2 * size_bytes / median(times)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, in microseconds."""
    names = [
        "tokens",
        "attention",
        "form",
        "copy's floor",
        "products' floor",
        "of the floor",
        "error",
    ]
    names += ["layer", "without the kernel", "mlx-lm", "times", "error"]
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for r in rows:
        floor = max(r["floor_copy"], r["floor_products"])
        us = {name: f"{1e6 * value:.1f}" for name, value in r.items() if isinstance(value, float)}
        cells = [r["tokens"], us["attention"], r["form"], us["floor_copy"], us["floor_products"]]
        cells += [f"{100 * floor / r['attention']:.0f} %", f"{r['attention_error']:.0e}"]
        cells += [us["layer"], us["plain_layer"], us["peer_layer"]]
        cells += [f"{r['peer_layer'] / r['layer']:.1f}", f"{r['layer_error']:.0e}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
