"""What a model folder holds, as data: sizes, precision, and what is missing.

Reads configuration and headers only, so a model on the Hub is described without downloading it.
Complains about nothing it can report instead: a half-downloaded release is described as such.
"""

import math
from collections import Counter
from typing import Any

from ..config import K3Config
from ..errors import CheckpointError
from .extents import MANIFEST
from .index import INDEX, Readable, open_header, read_index, read_json, shard_names
from .names import (
    expert_probe,
    is_ignored,
    is_mlx_name,
    layer_tensors,
    release_tensors,
    stem_tensors,
    vision_tensors,
)
from .reader import TensorInfo


def describe(source: Readable) -> dict[str, Any]:
    """Describe the model in ``source``.

    Raises:
        CheckpointError: no readable ``config.json``, or an index of the wrong form.
        UnsupportedError: another model family.
    """
    raw = read_json(source, "config.json")
    if not isinstance(raw, dict):
        raise CheckpointError(f"{source.label}: config.json does not hold a JSON object")
    config = K3Config.from_dict(raw)
    weight_map = read_index(source)
    tensors, problems = _tensors(source, weight_map)
    names = set(tensors) | set(weight_map or ())
    converted = any(is_mlx_name(name) for name in names)
    manifest = read_json(source, MANIFEST) if MANIFEST in source.files() else {}
    experts = manifest.get("experts", {}) if isinstance(manifest, dict) else {}
    form = _form(converted, experts)
    if form == "release":
        problems += _missing(config, names, weight_map is not None, tensors)
    return {
        "path": source.label,
        "form": form,
        "complete": not problems,
        "problems": problems,
        "architecture": architecture(config),
        "parameters": parameters(config),
        "bytes": _bytes(tensors),
        "precision": _precision(raw, config, tensors, experts),
        "experts_in": experts.get("folder"),
    }


def architecture(config: K3Config) -> dict[str, Any]:
    """The model's shape, in the words a person would use."""
    moe = config.moe_layers
    counts = sorted({config.expert_counts[layer] for layer in moe})
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "kda_layers": len(config.kda_layers),
        "mla_layers": config.num_hidden_layers - len(config.kda_layers),
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "moe_layers": len(moe),
        "experts": counts[0] if len(counts) == 1 else counts,
        "experts_per_token": config.num_experts_per_token if moe else 0,
        "shared_experts": config.num_shared_experts if moe else 0,
        "expert_width": config.expert_dim if moe else 0,
        "attention_residuals": config.attn_res_block_size,
        "vision": config.vision_config is not None,
    }


def parameters(config: K3Config) -> dict[str, int]:
    """Weights by part; ``active`` are those a token is multiplied with: no embedding, no vision."""
    layers = range(config.num_hidden_layers)
    trunk = sum(math.prod(t.shape) for i in layers for t in layer_tensors(config, i))
    stem = {t.name: math.prod(t.shape) for t in stem_tensors(config)}
    vision = sum(math.prod(t.shape) for t in vision_tensors(config))
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    expert = 3 * config.expert_dim * config.moe_intermediate_size
    experts = expert * sum(config.expert_counts)
    chosen = expert * config.num_experts_per_token * len(config.moe_layers)
    trunk += sum(stem.values())
    return {
        "total": trunk + experts + vision,
        "active": trunk - embedding + chosen,
        "experts": experts,
        "trunk": trunk,
        "vision": vision,
    }


def _tensors(
    source: Readable, weight_map: dict[str, str] | None
) -> tuple[dict[str, TensorInfo], list[str]]:
    """All tensors of the readable shards, and one line for every shard that is not."""
    tensors: dict[str, TensorInfo] = {}
    problems = []
    present = source.files()
    for name in shard_names(source, weight_map):
        if name not in present:
            problems.append(f"{name} is missing")
            continue
        try:
            tensors |= open_header(source, name).tensors
        except CheckpointError as e:
            problems.append(str(e).removeprefix(f"{source.label}: "))
    return tensors, problems


def _form(converted: bool, experts: dict[str, Any]) -> str:
    if not converted:
        return "release"
    return "MLX, experts in the release" if experts.get("form") == "reference" else "MLX"


def _missing(
    config: K3Config, names: set[str], indexed: bool, tensors: dict[str, TensorInfo]
) -> list[str]:
    probe = expert_probe(config)
    expected = {t.name for t in release_tensors(config, "mxfp4" if probe in names else "bf16")}
    problems = []
    if absent := sorted(expected - names):
        where = INDEX if indexed else "the shards"
        problems.append(f"{len(absent):,} tensors are not in {where}, the first is {absent[0]}")
    if unknown := sorted(n for n in tensors if n not in expected and not is_ignored(config, n)):
        problems.append(f"{len(unknown):,} tensors are unknown, the first is {unknown[0]}")
    return problems


def kind_of(name: str) -> str:
    """Which part of the model a tensor belongs to, by its name in a release or an MLX folder."""
    if ".experts." in name or ".switch_mlp." in name:
        return "routed experts"
    if name.startswith(("vision_tower.", "mm_projector.")):
        return "vision"
    if "embed_tokens." in name or "lm_head." in name:
        return "embedding and head"
    if ".self_attn." in name:
        return "attention"
    if ".shared_experts." in name:
        return "shared experts"
    if ".routed_expert_" in name:
        return "latent projections"
    if ".gate." in name or "e_score_correction_bias" in name:
        return "router"
    return "dense MLP" if ".mlp." in name else "norms and residual mix"


def _bytes(tensors: dict[str, TensorInfo]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for name, info in tensors.items():
        sizes[kind_of(name)] += info.nbytes
    return dict(sizes.most_common())


def _precision(
    raw: dict[str, Any],
    config: K3Config,
    tensors: dict[str, TensorInfo],
    experts: dict[str, Any],
) -> dict[str, str]:
    """How trunk and experts are stored, in words."""
    default = raw.get("quantization") or {}
    probe = expert_probe(config)
    stacked = next((n for n in tensors if n.endswith(".switch_mlp.gate_proj.scales")), None)
    if "precision" in experts:
        routed = experts["precision"]
    elif probe in tensors or (stacked and tensors[stacked].dtype == "U8"):
        routed = "mxfp4"
    elif stacked:
        routed = _words(default.get(stacked.removesuffix(".scales"), default))
    else:
        routed = "bf16" if probe else "none"
    linear = [n for n in tensors if n.endswith("o_proj.scales") and kind_of(n) == "attention"]
    plain = Counter(i.dtype for n, i in tensors.items() if kind_of(n) == "attention")
    trunk = plain.most_common(1)[0][0].lower() if plain else "unknown"
    if linear:
        trunk = _words(default.get(linear[0].removesuffix(".scales"), default))
    return {"trunk": trunk, "experts": routed}


def _words(how: dict[str, Any]) -> str:
    bits, group = how.get("bits"), how.get("group_size")
    mode = how.get("mode", "affine")
    return f"{bits} bit affine, groups of {group}" if mode == "affine" else mode
