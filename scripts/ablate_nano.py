"""What each part of the recipe does: small runs that differ in one thing, on the same data.

    python scripts/ablate_nano.py runs/ablations

Prints held-out losses at equal steps and the load of the busiest expert, as a table and as JSON in
the folder. Every run sees the same batches and begins with the same weights.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import mlx_k3  # noqa: F401  # isort: skip  # Loads OpenBLAS, before MLX.
import train_nano

from mlx_k3.training.config import TrainConfig
from mlx_k3.training.trainer import Trainer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "q_lora_rank": 64,
}
# What differs from the recipe: fields of the run; "plain" also has no Attention Residuals.
VARIANTS = {
    "recipe": {},
    "adamw": {"optimizer": "adamw"},
    "adamw, rate / 4": {"optimizer": "adamw", "learning_rate": 1e-3},
    "no balancing": {"balance": "none"},
    "sign balancing": {"balance": "sign", "balance_rate": 1e-3},
    "plain residuals": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="run this, repeatable")
    args = parser.parse_args()
    results = {}
    for name in args.only or VARIANTS:
        results[name] = run(name, args)
        (args.out / "results.json").write_text(json.dumps(results))
    print(table(results))


def run(name: str, args: argparse.Namespace) -> list[dict]:
    """Train a variant; its log where it was evaluated."""
    folder = args.out / name.replace(" ", "-").replace(",", "").replace("/", "by")
    start(folder / "start", plain=name == "plain residuals")
    recipe = TrainConfig.from_file(train_nano.TEXT_RUN)
    config = replace(
        recipe,
        model=folder / "start",
        out=folder,
        steps=args.steps,
        tokens_per_batch=args.tokens,
        lengths=(128, 192),
        conversations_per_chunk=2048,
        seed=3,
        decay=0.0,
        quantize_from=1.0,
        log_every=max(args.steps // 50, 1),
        evaluate_every=max(args.steps // 3, 1),
        checkpoint_every=args.steps,
        **VARIANTS[name],
    )
    records = []
    Trainer(config).run(records.append)
    return [record for record in records if "held_out_loss" in record]


def start(folder: Path, *, plain: bool) -> None:
    """A smaller model's configuration, with the bundled model's vocabulary."""
    train_nano.prepare(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    text |= SIZES
    text["linear_attn_config"] |= {"num_heads": SIZES["num_attention_heads"], "head_dim": 32}
    if plain:
        del text["attn_res_block_size"]
    path.write_text(json.dumps(config))


def table(results: dict[str, list[dict]]) -> str:
    """Held-out losses by step, a row a variant."""
    steps = [record["step"] for record in next(iter(results.values()))]
    lines = [
        "| variant | " + " | ".join(f"step {s}" for s in steps) + " | busiest | idlest expert |",
        "| --- |" + " --- |" * (len(steps) + 2),
    ]
    for name, records in results.items():
        losses = " | ".join(f"{r['held_out_loss']:.3f}" for r in records)
        last = records[-1]
        loads = f"{last['held_out_max_load']:.2f} | {last['held_out_min_load']:.2f}"
        lines.append(f"| {name} | {losses} | {loads} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
