"""Train the model that travels with the package, from nothing to mlx_k3/nano/model.

    python scripts/train_nano.py            # the whole recipe: scripts/nano.toml
    python scripts/train_nano.py prepare    # only its configuration and vocabulary
    python scripts/train_nano.py install    # put a finished run in its place

Twenty minutes on an NVIDIA H200, days on a CPU. A run that was stopped continues.
"""

import json
import shutil
import sys
from itertools import islice
from pathlib import Path

from mlx_k3.config import K3Config
from mlx_k3.tasks import training_examples
from mlx_k3.training.vocabulary import texts, tokenizer_config, train_vocabulary

REPOSITORY = Path(__file__).resolve().parent.parent
NANO = REPOSITORY / "mlx_k3" / "nano"
RUN = REPOSITORY / "scripts" / "nano.toml"
# Its nesting and quantization block are the release's; only sizes and ids are replaced.
CONFIG_TEMPLATE = REPOSITORY / "tests" / "data" / "golden" / "tiny-text" / "config.json"

RANKS, CONTROL_TOKENS = 1536, 256
EXAMPLES = 30_000  # that the vocabulary is learned from
CONTEXT = 2048
IDS = {
    "bos_token_id": RANKS,
    "eos_token_id": RANKS + 2,  # <|end_of_msg|>, as in the release
    "pad_token_id": RANKS + 255,
}
# Every width a product runs over is a multiple of 64, so that the trunk can be quantized as usual.
SIZES = {
    "vocab_size": RANKS + CONTROL_TOKENS,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "attn_res_block_size": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 128,
    "routed_expert_hidden_size": 128,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],  # Counted from 1, as in the release.
        "kda_layers": [1, 2, 3],
        "head_dim": 64,
        "num_heads": 5,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}


def prepare(folder: Path) -> None:
    """Write what a run starts from: ``config.json`` and the tokenizer of a release."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(CONFIG_TEMPLATE.read_text())
    config |= IDS | {"media_placeholder_token_id": RANKS + 21}
    config["text_config"] |= IDS | SIZES
    K3Config.from_dict(config)  # Refuses sizes that make no model.
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": IDS["eos_token_id"]})
    learned_from = texts(islice(training_examples(seed=1), EXAMPLES))
    (folder / "tiktoken.model").write_bytes(train_vocabulary(learned_from, RANKS))
    (folder / "tokenizer_config.json").write_text(tokenizer_config(RANKS, CONTEXT))
    shutil.copy(REPOSITORY / "LICENSE", folder / "LICENSE")


def install(trained: Path) -> None:
    """Put a trained release folder in the package, with the logits it must give."""
    folder = NANO / "model"
    for path in folder.iterdir():
        if path.name != "README.md":
            path.unlink()
    for path in trained.iterdir():
        shutil.copyfile(path, folder / path.name)
    write_expected()
    total_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {total_bytes:,} bytes")


def write_expected() -> None:
    """Logits after a short prompt, computed by mlx-lm in float32: what doctor compares with."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model
    from safetensors.numpy import save_file

    model, _ = load_model(NANO / "model")
    widen = lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w  # noqa: E731
    model.update(tree_map(widen, model.parameters()))
    ids = np.random.default_rng(0).integers(0, RANKS, (1, 24), np.int32)
    logits = np.array(model(mx.array(ids))[:, -1])
    save_file({"ids": ids, "last_logits": logits}, NANO / "expected.safetensors")
    (NANO / "expected.safetensors").chmod(0o644)  # The library creates it for its owner only.


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    from mlx_k3.cli.train import progress
    from mlx_k3.training.config import TrainConfig

    config = TrainConfig.from_file(RUN)
    asked = sys.argv[1:]
    if asked in ([], ["prepare"]) and not (config.model / "tiktoken.model").exists():
        prepare(config.model)
    if not asked:
        from mlx_k3.training.trainer import Trainer

        with progress(config) as report:
            Trainer(config).run(report)
    if asked in ([], ["install"]):
        install(config.out / "model")


if __name__ == "__main__":
    main()
