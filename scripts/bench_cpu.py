#!/usr/bin/env python3
"""Prefill and decode on the CPU, beside mlx-lm on the same checkpoint, in the same run.

    python scripts/bench_cpu.py                  # OpenBLAS for both, then the plain wheel for both
    python scripts/bench_cpu.py --tokens 128     # a shorter prompt

The checkpoint is random, in the release's format: hidden 512, 8 layers, 32 experts, top 4, bf16
trunk, MXFP4 experts. mlx-lm runs as it loads it (bfloat16), and once more recast to float32,
which is what mlx-k3 does by itself on a CPU. Each figure is the median of several.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

CONFIG = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "vision_config": None,
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "rms_norm_eps": 1e-5,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "first_k_dense_replace": 1,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 256,
        "routed_expert_hidden_size": 256,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
            "head_dim": 128,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "weights": {"num_bits": 4, "type": "float", "group_size": 32},
                }
            },
        },
    },
}
ROWS = ("mlx-k3", "mlx-lm", "mlx-lm, float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="prompt length")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--one", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(measure(args.one, args.tokens)))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        package = make_package(Path(folder))
        for blas in ("OpenBLAS", "plain wheel"):
            env = {**os.environ, "MLX_K3_BENCH_BLAS": blas}
            command = [sys.executable, __file__, "--one", package, "--tokens", str(args.tokens)]
            run = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
            figures[blas] = json.loads(run.stdout)
    report(figures, args.tokens)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def make_package(folder: Path) -> str:
    from mlx_k3.checkpoint.synthetic import write_random_release
    from mlx_k3.convert.stream import convert

    write_random_release(folder / "release", CONFIG)
    convert(folder / "release", folder / "package", trunk="bf16")
    return str(folder / "package")


def measure(package: str, tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each model, taken in turn so that the machine's moods hit all alike."""
    if os.environ["MLX_K3_BENCH_BLAS"] == "plain wheel":
        import mlx.core as mx  # before mlx_k3, which would load OpenBLAS
    import mlx_k3
    from mlx_k3 import blas

    if os.environ["MLX_K3_BENCH_BLAS"] == "OpenBLAS" and blas.advice():
        raise SystemExit(f"OpenBLAS is not there: {blas.advice()}")
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    ours, _ = mlx_k3.load(package)
    theirs, _ = load_model(Path(package))
    widened, _ = load_model(Path(package))
    widened.set_dtype(mx.float32)
    models = dict(zip(ROWS, (ours, theirs, widened), strict=True))
    ids = mx.random.randint(0, CONFIG["text_config"]["vocab_size"], (1, tokens))
    prefill: dict[str, list[float]] = {name: [] for name in ROWS}
    decode: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(3):
        for name, model in models.items():
            cache = model.make_cache()
            prefill[name].append(seconds(lambda m=model, c=cache: m(ids, cache=c)))
            decode[name] += [
                seconds(lambda m=model, c=cache, t=t: m(ids[:, t : t + 1], cache=c))
                for t in range(16)
            ]
    return {
        name: {
            "prefill_ms": 1e3 * median(prefill[name]),
            "decode_ms": 1e3 * median(decode[name]),
        }
        for name in ROWS
    }


def seconds(work) -> float:
    import mlx.core as mx

    start = time.perf_counter()
    mx.eval(work())
    return time.perf_counter() - start


def report(figures: dict[str, dict[str, dict[str, float]]], tokens: int) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx-k3", "mlx", "mlx-lm"))
    print(f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores; {versions}\n")
    print(f"| BLAS | model | prefill of {tokens} | times ours | decode | times ours |")
    print("| --- | --- | --- | --- | --- | --- |")
    for blas, rows in figures.items():
        ours = rows["mlx-k3"]
        for name, row in rows.items():
            prefill, decode = (row[k] / ours[k] for k in ("prefill_ms", "decode_ms"))
            print(
                f"| {blas} | {name} | {row['prefill_ms']:.0f} ms | {prefill:.1f} "
                f"| {row['decode_ms']:.1f} ms | {decode:.1f} |"
            )


if __name__ == "__main__":
    main()
