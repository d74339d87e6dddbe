"""From the tensor names of an MLX package to this model's parameters.

Packages use mlx-lm's names, and older published builds some variants of them. What differs here:
K3's ``language_model.`` prefix is dropped, Kimi Linear's separate q, k and v are joined, and an
Attention-Residual pair (norm gain, projection) is one vector, their product.
"""

import re

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import K3Config
from ..errors import CheckpointError

_TEXT = re.compile(r"(?:language_model\.)?((?:model|lm_head)\..*)")


def sanitize(config: K3Config, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rename and join; tensors of other parts (vision, MTP) and of unknown layers are dropped."""
    weights = {
        match[1]: array
        for name, array in weights.items()
        if (match := _TEXT.fullmatch(name)) and not match[1].startswith("model.mtp")
    }
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        if layer in config.kda_layers:
            _join_qkv(weights, f"{prefix}.self_attn")
            _flatten_gate(config, weights, f"{prefix}.self_attn")
        gate = weights.get(f"{prefix}.mlp.gate.weight")
        if gate is not None and mx.issubdtype(gate.dtype, mx.floating):
            # Scores decide between experts: in float32, whatever the activations are.
            weights[f"{prefix}.mlp.gate.weight"] = gate.astype(mx.float32)
        for name in ("self_attention_res", "mlp_res"):
            _fold_residual(weights, f"{prefix}.{name}")
    _fold_residual(weights, "model.output_attn_res")
    return weights


def _join_qkv(weights: dict[str, mx.array], attn: str) -> None:
    """One projection and one convolution ``[3 H D, taps]`` for queries, keys and values."""
    for suffix in ("weight", "scales", "biases"):
        parts = [weights.pop(f"{attn}.{x}_proj.{suffix}", None) for x in "qkv"]
        if parts[0] is not None:
            weights[f"{attn}.qkv_proj.{suffix}"] = mx.concatenate(parts)
    parts = [weights.pop(f"{attn}.{x}_conv.conv.weight", None) for x in "qkv"]
    conv = weights.pop(f"{attn}.qkv_conv.conv.weight", None)
    if parts[0] is not None:
        conv = mx.concatenate(parts)
    if conv is not None:
        weights[f"{attn}.qkv_conv"] = conv.squeeze(-1)


def _flatten_gate(config: K3Config, weights: dict[str, mx.array], attn: str) -> None:
    """``A_log`` as one value a head; some builds keep the release's zero padding behind it."""
    if (A_log := weights.get(f"{attn}.A_log")) is not None:
        A_log, tail = mx.split(A_log.reshape(-1), [config.kda_num_heads])
        if tail.size and mx.any(tail).item():
            raise CheckpointError(
                f"{attn}.A_log holds more than its {config.kda_num_heads} heads' values; "
                "the model was converted wrongly"
            )
        weights[f"{attn}.A_log"] = A_log
    if (dt_bias := weights.get(f"{attn}.dt_bias")) is not None:
        weights[f"{attn}.dt_bias"] = dt_bias.reshape(-1)


def _fold_residual(weights: dict[str, mx.array], name: str) -> None:
    """``NAME_norm.weight * NAME_proj.weight`` in float32, as ``NAME``."""
    for norm, proj in (
        (f"{name}_norm.weight", f"{name}_proj.weight"),
        (f"{name}.norm_weight", f"{name}.proj_weight"),
    ):
        if norm in weights:
            weights[name] = weights.pop(norm).astype(mx.float32) * weights.pop(proj).reshape(-1)


def check_parameters(model: nn.Module, weights: dict[str, mx.array], label: str) -> None:
    """See that ``weights`` are exactly the model's parameters, in name and shape.

    Raises:
        CheckpointError: naming the first that is not, and ``label``.
    """
    parameters = dict(tree_flatten(model.parameters()))
    for what, names in (
        ("is missing", parameters.keys() - weights.keys()),
        ("is not part of this model", weights.keys() - parameters.keys()),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{label}: {min(names)} {what}{more}; convert the model again")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{label}: {name} has shape {list(weights[name].shape)}, "
                f"config.json asks for {list(parameter.shape)}"
            )
