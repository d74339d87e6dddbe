"""One whole layer of K3 for one token: KDA and a mixture of experts, ours and mlx-lm's.

Both get the same random weights: the trunk in bfloat16, the experts in MXFP4, and eight blocks of
Attention Residuals. Owns the layers and the count of their kernels; knows nothing of results.
"""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from ..config import K3Config
from ..models.kimi import DecoderLayer
from ..models.residual import ResidualStream
from .case import State
from .cases import BLOCKS
from .expert_cases import expert_stacks
from .measure import ROUNDS, Rates, error, timing
from .peers import kimi_k3
from .sizes import Sizes

OURS = "mlx-k3"
LAYER = 1  # the first with experts
CHAIN = 48
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
# These stay in float32, as the release has them, and the router's weight, as this package computes.
FLOAT32 = re.compile(r"A_log|dt_bias|qkv_conv|o_norm|e_score_correction_bias|_res$|mlp\.gate\.")

# Nodes of MLX's graph that launch nothing: other shapes and types of the same bytes.
_VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends"),
    *("ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "StopGradient"),
    *("Transpose", "Unflatten", "View"),
}


@dataclass(frozen=True)
class LayerResult:
    """Microseconds a layer adds to a token, with and without Python's part, and its kernels."""

    name: str
    us: float
    evaluated_us: float
    kernels: int  # by the graph: at least
    floor_us: float  # its bytes at a copy's bandwidth
    error: float | None  # between ours and mlx-lm's running sum


def run_layers(sizes: Sizes, rates: Rates, rounds: int = ROUNDS) -> list[LayerResult]:
    """Our layer, and mlx-lm's where it has one, timed one after the other."""
    both = forms(sizes)
    sums = {name: _sum(*form) for name, form in both.items()}
    results = []
    for name, (step, state) in both.items():
        time = timing(step, state, CHAIN, rounds)
        results.append(
            LayerResult(
                name,
                round(time.seconds * 1e6, 1),
                round(time.evaluated_seconds * 1e6, 1),
                count_kernels(step(*state)),
                round(_token_bytes(sizes) / rates.copy * 1e6, 1),
                None if name == OURS else error([sums[name]], [sums[OURS]]),
            )
        )
    return results


def forms(sizes: Sizes) -> dict[str, tuple[Callable[..., State], State]]:
    """A layer's step and first state: ours, and mlx-lm's where it has one."""
    mx.random.seed(0)
    config = _config(sizes)
    weights = _weights(config, sizes.dtype)
    blocks = mx.random.normal((1, 1, BLOCKS, config.hidden_size)).astype(sizes.dtype)
    start = _start(config, sizes.dtype)
    # Ours is handed the sum and what the layer before gave to it; they are added on the way.
    both = {
        OURS: (_our_step(config, weights, blocks), (start[0], mx.zeros_like(start[0]), *start[1:]))
    }
    if kimi_k3 is not None:
        both["mlx-lm"] = _mlx_lm_step(config, weights, blocks), start
    mx.eval(weights, blocks, *(state for _, state in both.values()))
    return both


def table(results: Sequence[LayerResult]) -> str:
    """Markdown."""
    heads = ("a layer, one token", "time", "without Python", "kernels", "floor", "difference")
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for r in results:
        off = "" if r.error is None else f"{r.error:.0e}"
        cells = (r.name, f"{r.us:.0f} us", f"{r.evaluated_us:.0f} us", str(r.kernels))
        lines.append("| " + " | ".join((*cells, f"{r.floor_us:.0f} us", off)) + " |")
    return "\n".join(lines)


def count_kernels(arrays: Sequence[mx.array]) -> int:
    """Operations in the graph of ``arrays`` that launch a kernel, of a concatenation one a part.

    Some operations launch more than one, so that this is the least.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *arrays)
        text = file.read_text()
    nodes = dict(re.findall(r'(\d+) \[label ="([^"]*)"', text))
    count = 0
    for node, label in nodes.items():
        if label == "Concatenate":
            count += len(re.findall(rf'" -> {node}\b', text))
        else:
            count += label.split(" ")[0] not in _VIEWS
    return count


def _config(sizes: Sizes) -> K3Config:
    """``sizes``' configuration with as many experts as there are in memory."""
    counts = tuple(min(count, sizes.experts) for count in sizes.config.expert_counts)
    chosen = min(sizes.config.num_experts_per_token, sizes.experts)
    return replace(sizes.config, expert_counts=counts, num_experts_per_token=chosen)


def _start(config: K3Config, dtype: mx.Dtype) -> State:
    """A running sum, the convolution's inputs, and a state."""
    H, D, W = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
    x = mx.random.normal((1, 1, config.hidden_size)).astype(dtype)
    conv = mx.random.normal((1, W - 1, 3 * H * D)).astype(dtype)
    return x, conv, mx.random.normal((1, H, D, D))


def _weights(config: K3Config, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Random parameters of our layer, such that numbers stay near 1."""
    weights = {}
    for name, shape in tree_flatten(DecoderLayer(config, LAYER).parameters()):
        if ".switch_mlp." in f".{name}":
            continue
        array = mx.random.normal(shape.shape)
        if array.ndim == 2:
            array = array * array.shape[1] ** -0.5
        elif "norm" in name:
            array = 1 + 0.1 * array
        weights[name] = array if FLOAT32.search(name) else array.astype(dtype)
        mx.eval(weights[name])
    E = config.expert_counts[LAYER]
    stacks = expert_stacks(E, config.expert_dim, config.moe_intermediate_size)
    return weights | {f"mlp.switch_mlp.{name}": array for name, array in stacks.items()}


def _token_bytes(sizes: Sizes) -> int:
    """What one token reads of the weights, and its state there and back."""
    config = _config(sizes)
    share = config.num_experts_per_token / config.expert_counts[LAYER]
    shapes = dict(tree_flatten(DecoderLayer(config, LAYER).parameters()))
    experts = {name for name in shapes if "switch_mlp" in name}
    total = 0.0
    for name in shapes.keys() - experts:
        total += shapes[name].size * (4 if FLOAT32.search(name) else sizes.dtype.size)
    for name in experts:
        total += share * shapes[name].size * (4 + 8 / 32) / 8  # a scale's byte for 32 codes
    return int(total) + 2 * 4 * config.kda_num_heads * config.kda_head_dim**2


def _our_step(
    config: K3Config, weights: Mapping[str, mx.array], blocks: mx.array
) -> Callable[..., State]:
    layer = _filled(DecoderLayer(config, LAYER), weights)

    def step(total: mx.array, update: mx.array, conv: mx.array, state: mx.array) -> State:
        stream = ResidualStream(total, config.rms_norm_eps, blocks)
        stream.add(update)
        cache = _cache(conv, state)
        layer(stream, None, cache)
        return *stream.parts, cache[0], cache[1]

    return step


def _mlx_lm_step(
    config: K3Config, weights: Mapping[str, mx.array], blocks: mx.array
) -> Callable[..., State]:
    layer = _filled(kimi_k3.KimiK3DecoderLayer(_arguments(config), LAYER), _renamed(weights))
    kept = kimi_k3.ResidualBlocks(config.rms_norm_eps)
    for m in range(BLOCKS):
        kept.append(blocks[:, :, m])
    mx.eval(kept.raw, kept.inv_rms)

    def step(total: mx.array, conv: mx.array, state: mx.array) -> State:
        cache = _cache(conv, state)
        total, _ = layer(total, None, cache, kept)
        return total, cache[0], cache[1]

    return step


def _sum(step: Callable[..., State], state: State) -> mx.array:
    """The running sum after a step: of ours, whose update is not yet part of it, both."""
    *sums, _, _ = step(*state)
    total = sums[0] if len(sums) == 1 else sums[0] + sums[1]
    mx.eval(total)
    return total


def _filled(layer: nn.Module, weights: Mapping[str, mx.array]) -> nn.Module:
    """``layer`` with its experts packed and all its weights given."""
    nn.quantize(layer.mlp.switch_mlp, **MXFP4)
    layer.load_weights(list(weights.items()))
    return layer.eval()


def _cache(conv: mx.array, state: mx.array) -> ArraysCache:
    cache = ArraysCache(size=2)
    cache[0], cache[1] = conv, state
    return cache


def _arguments(config: K3Config) -> "kimi_k3.TextArgs":
    """The configuration in mlx-lm's form, as far as this layer needs it."""
    return kimi_k3.TextArgs(
        hidden_size=config.hidden_size,
        rms_norm_eps=config.rms_norm_eps,
        linear_attn_config={
            "kda_layers": [layer + 1 for layer in config.kda_layers],
            "num_heads": config.kda_num_heads,
            "head_dim": config.kda_head_dim,
            "short_conv_kernel_size": config.short_conv_kernel_size,
            "gate_lower_bound": config.gate_lower_bound,
            "use_full_rank_gate": config.use_full_rank_gate,
        },
        activation_situ_beta=config.activation_situ_beta,
        activation_situ_linear_beta=config.activation_situ_linear_beta,
        attn_res_block_size=config.attn_res_block_size,
        num_experts=config.expert_counts[LAYER],
        num_experts_per_token=config.num_experts_per_token,
        num_shared_experts=config.num_shared_experts,
        moe_intermediate_size=config.moe_intermediate_size,
        routed_scaling_factor=config.routed_scaling_factor,
        routed_expert_hidden_size=config.routed_expert_hidden_size,
        latent_moe_use_norm=config.latent_moe_use_norm,
    )


def _renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Our layer's weights under mlx-lm's names, in the types mlx-lm computes with."""
    named = dict(weights)
    dtype = named["mlp.routed_expert_up_proj.weight"].dtype
    named["mlp.gate.weight"] = named["mlp.gate.weight"].astype(dtype)
    conv = named.pop("self_attn.qkv_conv")
    named["self_attn.qkv_conv.conv.weight"] = conv[..., None].astype(dtype)
    named["self_attn.o_norm.weight"] = named["self_attn.o_norm.weight"].astype(dtype)
    for part in ("self_attention_res", "mlp_res"):
        weight = named.pop(part)
        named[f"{part}_proj.weight"] = weight[None]
        named[f"{part}_norm.weight"] = mx.ones_like(weight)
    return named
