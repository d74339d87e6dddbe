"""A run small enough for a test: what it starts from, its configuration, and its conversations."""

import json
import shutil
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_k3.tasks import training_examples
from mlx_k3.training.vocabulary import texts, tokenizer_config, train_vocabulary

from .releases import edit_json

RANKS, CONTROL_TOKENS = 600, 256
IDS = {"bos_token_id": RANKS, "eos_token_id": RANKS + 2, "pad_token_id": RANKS + 255}
# K3's every mechanism, in few numbers.
SIZES = {
    "vocab_size": RANKS + CONTROL_TOKENS,
    "max_position_embeddings": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attn_res_block_size": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "kda_layers": [1, 2, 3],
        "head_dim": 32,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
RUN = {
    "steps": 12,
    "tokens_per_batch": 512,
    "lengths": [128, 256, 512],
    "conversations_per_chunk": 256,
    "log_every": 1,
    "evaluate_every": 6,
    "checkpoint_every": 5,
}


def write_start(folder: Path, like: Path) -> Path:
    """What a run starts from; ``config.json`` is that of the folder ``like`` in other sizes."""
    config = json.loads((like / "config.json").read_text())
    config |= IDS | {"media_placeholder_token_id": RANKS + 21}
    config["text_config"] |= IDS | SIZES
    (folder / "config.json").write_text(json.dumps(config))
    conversations = islice(training_examples(seed=1), 1500)
    (folder / "tiktoken.model").write_bytes(train_vocabulary(texts(conversations), RANKS))
    (folder / "tokenizer_config.json").write_text(tokenizer_config(RANKS, 4096))
    return folder


# A tower of two blocks. Pictures are made no larger than four by four of its vectors.
TOWER = {
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "qkv_hidden_size": 64,
    "text_hidden_size": SIZES["hidden_size"],
    "vt_hidden_size": 48,
    "vt_intermediate_size": 96,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
}
PATCHES = {"in_patch_limit": 64, "patch_limit_on_one_side": 8}


def write_seeing_start(folder: Path, start: Path, like: Path) -> Path:
    """What a run of a model that sees starts from: ``start`` with a tower as in ``like``."""
    shutil.copytree(start, folder, dirs_exist_ok=True)
    theirs = json.loads((like / "config.json").read_text())["vision_config"]
    edit_json(folder / "config.json", lambda c: c.update(vision_config=theirs | TOWER))
    shutil.copy(like / "preprocessor_config.json", folder)
    edit_json(folder / "preprocessor_config.json", lambda c: c["media_proc_cfg"].update(PATCHES))
    return folder


def write_run(path: Path, start: Path, **changes: Any) -> Path:
    """The TOML file ``path`` of a run from ``start`` that writes to ``out`` beside the file."""
    settings = {"model": str(start), "out": "out", **RUN, **changes}
    # JSON's strings, numbers and lists of numbers are TOML's too.
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return path


def threads_for_processes(monkeypatch: Any) -> None:
    """Let conversations be made by threads here, which start at once."""
    context = SimpleNamespace(Pool=ThreadPool)
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def without_speed(out: Path) -> list[dict[str, Any]]:
    """The same, less what no two runs share."""
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records(out)]
