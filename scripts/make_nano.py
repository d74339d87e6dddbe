"""Make the checkpoint that travels with the package: mlx_k3/nano/model, and its expected logits.

A K3 in the release's own format, every mechanism switched on, in few megabytes: three KDA layers
and a final pair of MLA layers, attention residuals, a latent mixture of 32 experts in MXFP4. The
weights are random: they show that the machinery works, and their answers are noise. The expected
logits come from mlx-lm's own K3, which reads the release's format too.

    python scripts/make_nano.py
"""

import base64
import json
import shutil
from pathlib import Path

import numpy as np
from nano_text import sentences
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlx_k3.checkpoint.names import ReleaseTensor, release_tensors
from mlx_k3.config import K3Config

REPOSITORY = Path(__file__).resolve().parent.parent
NANO = REPOSITORY / "mlx_k3" / "nano"
# Its nesting and quantization block are the release's; only sizes and ids are replaced.
CONFIG_TEMPLATE = REPOSITORY / "tests" / "data" / "golden" / "tiny-text" / "config.json"
SEED = 20260

# The vocabulary: byte-pair ranks, then 256 control slots with the release's offsets.
RANKS, CONTROL_SLOTS = 1024, 256
CONTROL_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
IDS = {
    "bos_token_id": RANKS,
    "eos_token_id": RANKS + 2,
    "pad_token_id": RANKS + 255,
}
# Every width a product runs over is a multiple of 64, so that the trunk can be quantized as usual.
SIZES = {
    "vocab_size": RANKS + CONTROL_SLOTS,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attn_res_block_size": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],  # Counted from 1, as in the release.
        "kda_layers": [1, 2, 3],
        "head_dim": 64,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}


def write_config(folder: Path) -> K3Config:
    """``config.json``, and what the package makes of it."""
    config = json.loads(CONFIG_TEMPLATE.read_text())
    config |= IDS | {"media_placeholder_token_id": RANKS + 21}
    config["text_config"] |= IDS | SIZES
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": IDS["eos_token_id"]})
    return K3Config.from_dict(config)


def write_tokenizer(folder: Path) -> None:
    """Learn ``tiktoken.model`` and name the control tokens in ``tokenizer_config.json``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=RANKS, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    bpe.train_from_iterator(sentences(20_000), trainer)
    byte_of = _byte_of_symbol()
    lines = []
    for text, rank in sorted(bpe.get_vocab().items(), key=lambda item: item[1]):
        token = bytes(byte_of[symbol] for symbol in text)
        lines.append(f"{base64.b64encode(token).decode()} {rank}\n")
    assert len(lines) == RANKS, f"the text gives only {len(lines)} tokens"
    (folder / "tiktoken.model").write_text("".join(lines))
    traits = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    named = {
        str(RANKS + slot): {"content": name, **traits, "special": True}
        for slot, name in CONTROL_TOKENS.items()
    }
    config = {
        "added_tokens_decoder": named,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 4096,
        "tokenizer_class": "TikTokenTokenizer",
    }
    write_json(folder / "tokenizer_config.json", config)


def _byte_of_symbol() -> dict[str, int]:
    """The byte each symbol of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the others follow from 256 on in order.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {chr(byte): byte for byte in plain}
    return symbols | {chr(256 + i): byte for i, byte in enumerate(others)}


def draw(tensor: ReleaseTensor, config: K3Config, rng: np.random.Generator) -> np.ndarray:
    """Random values that keep activations at the size of one, whatever the depth."""
    name, shape = tensor.name, tensor.shapes[0]
    if name.endswith("weight_packed"):
        return rng.integers(0, 256, shape, np.uint8)
    if name.endswith("weight_scale"):
        # The root mean square of the 16 codes is 2.9; 32 columns share a scale.
        exponent = round(np.log2((32 * shape[1]) ** -0.5 / 2.9))
        return (127 + exponent + rng.integers(-1, 2, shape)).astype(np.uint8)
    if name.endswith("A_log"):
        heads = np.log(rng.uniform(0.5, 2, config.kda_num_heads))
        return np.pad(heads, (0, shape[0] - len(heads)))
    if name.endswith("dt_bias"):
        return rng.uniform(-4, 0, shape)
    if name.endswith("e_score_correction_bias"):
        return rng.normal(0, 0.05, shape)
    if "_conv1d" in name:
        return rng.normal(0, 0.3, shape) + np.array([0, 0, 0, 1])
    if "norm" in name:
        return 1 + rng.normal(0, 0.1, shape)
    if "embed_tokens" in name:
        return rng.normal(0, 1, shape)
    return rng.normal(0, shape[1] ** -0.5, shape)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of ``values`` in a safetensors dtype; bfloat16 rounds to nearest even."""
    if dtype != "BF16":
        return np.ascontiguousarray(values, {"F32": np.float32, "U8": np.uint8}[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def write_shards(folder: Path, config: K3Config) -> None:
    """One shard a layer, one for the rest, and their index, named as the release names them."""
    rng = np.random.default_rng(SEED)
    count = config.num_hidden_layers + 1
    shards: list[dict[str, tuple[str, np.ndarray]]] = [{} for _ in range(count)]
    for tensor in release_tensors(config, "mxfp4"):
        _, _, rest = tensor.name.partition(".layers.")
        layer = int(rest.split(".")[0]) if rest else count - 1
        dtype = tensor.dtypes[0]
        shards[layer][tensor.name] = dtype, encode(draw(tensor, config, rng), dtype)
    spelling = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8"}
    weight_map, total_bytes = {}, 0
    for number, tensors in enumerate(shards, 1):
        specs = {
            name: TensorSpec(
                dtype=spelling[dtype],
                shape=list(data.shape),
                data_ptr=data.ctypes.data,
                data_len=data.nbytes,
            )
            for name, (dtype, data) in tensors.items()
        }
        name = f"model-{number:05}-of-{count:06}.safetensors"
        serialize_file(specs, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(data.nbytes for _, data in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_expected(folder: Path) -> None:
    """Logits after a short prompt, computed by mlx-lm in float32: what doctor compares with."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    widen = lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w  # noqa: E731
    model.update(tree_map(widen, model.parameters()))
    ids = np.random.default_rng(SEED).integers(0, RANKS, (1, 24), np.int32)
    logits = np.array(model(mx.array(ids))[:, -1])
    save_file({"ids": ids, "last_logits": logits}, NANO / "expected.safetensors")


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    folder = NANO / "model"
    for path in folder.iterdir():
        if path.name != "README.md":
            path.unlink()
    shutil.copy(REPOSITORY / "LICENSE", folder / "LICENSE")
    write_tokenizer(folder)
    write_shards(folder, write_config(folder))
    write_expected(folder)
    for path in NANO.rglob("*.safetensors"):
        path.chmod(0o644)  # The library creates them for their owner only.
    total_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {total_bytes:,} bytes")


if __name__ == "__main__":
    main()
