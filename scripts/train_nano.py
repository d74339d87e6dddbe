"""Train the model that travels with the package, from nothing to mlx_k3/nano/model.

    python scripts/train_nano.py            # the whole recipe: both parts, then install
    python scripts/train_nano.py text       # the first part: scripts/nano.toml
    python scripts/train_nano.py eyes       # the second, pictures: scripts/nano_eyes.toml
    python scripts/train_nano.py prepare    # only the first part's configuration and vocabulary
    python scripts/train_nano.py install    # put the finished second part in its place

Text takes twenty minutes on an NVIDIA H200, days on a CPU. A run that was stopped continues. The
second part goes on from the first; where that has not been run, from the model in the package.
"""

import json
import shutil
import sys
from itertools import islice
from pathlib import Path

from mlx_k3.checkpoint.index import INDEX
from mlx_k3.config import K3Config, VisionConfig
from mlx_k3.media.processor import FILE as PREPROCESSOR
from mlx_k3.tasks import training_examples
from mlx_k3.training.vocabulary import texts, tokenizer_config, train_vocabulary

REPOSITORY = Path(__file__).resolve().parent.parent
NANO = REPOSITORY / "mlx_k3" / "nano"
TEXT_RUN = REPOSITORY / "scripts" / "nano.toml"
EYES_RUN = REPOSITORY / "scripts" / "nano_eyes.toml"
# Their nesting and quantization block are the release's; only sizes and ids are replaced.
GOLDEN = REPOSITORY / "tests" / "data" / "golden"
CONFIG_TEMPLATE = GOLDEN / "tiny-text" / "config.json"
EYES_TEMPLATE = GOLDEN / "tiny-multimodal"

PARTS = ("all", "text", "eyes", "prepare", "install")

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
# The tower: 3.6 million weights.
EYES = {
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "mm_hidden_size": 192,
    "qkv_hidden_size": 192,
    "text_hidden_size": SIZES["hidden_size"],
    "vt_hidden_size": 192,
    "vt_intermediate_size": 768,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 6,
}
# Whatever is shown becomes at most 112 x 112 pixels, 16 vectors: all that training has.
PATCHES = {"in_patch_limit": 64, "in_patch_limit_each_frame": 64, "patch_limit_on_one_side": 8}


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


def prepare_eyes(folder: Path, text: Path) -> None:
    """Write what the second part starts from: the model in ``text``, with a tower described."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in text.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((text / "config.json").read_text())
    template = json.loads((EYES_TEMPLATE / "config.json").read_text())
    config["vision_config"] = template["vision_config"] | EYES
    VisionConfig.from_dict(config["vision_config"])
    write_json(folder / "config.json", config)
    processing = json.loads((EYES_TEMPLATE / PREPROCESSOR).read_text())
    processing["media_proc_cfg"] |= PATCHES
    write_json(folder / PREPROCESSOR, processing)


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


def train(path: Path) -> Path:
    """Run the configuration ``path``, prepared first if it is not; returns the trained folder."""
    from mlx_k3.cli.train import progress
    from mlx_k3.training.config import TrainConfig
    from mlx_k3.training.trainer import Trainer

    config = TrainConfig.from_file(path)
    before = config.initialize_from
    if before is not None and not before.exists():
        shutil.copytree(NANO / "model", before)
    if not (config.model / "tiktoken.model").exists():
        prepare_eyes(config.model, before) if before else prepare(config.model)
    with progress(config) as report:
        return Trainer(config).run(report)


def main(part: str = "all") -> None:
    from mlx_k3.training.config import TrainConfig

    if part not in PARTS:
        sys.exit(f"{part!r} is none of {', '.join(PARTS)}")
    if part == "prepare":
        prepare(TrainConfig.from_file(TEXT_RUN).model)
    if part in ("all", "text"):
        train(TEXT_RUN)
    if part in ("all", "eyes"):
        train(EYES_RUN)
    if part in ("all", "install"):
        install(TrainConfig.from_file(EYES_RUN).out / "model")


if __name__ == "__main__":
    main(*sys.argv[1:])
