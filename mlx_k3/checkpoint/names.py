"""Tensor names and shapes: what a release must hold, and what becomes of it in the MLX folder.

One table serves both: :func:`mlx_tensors` lists the tensors of the MLX folder in mlx-lm's names,
each with the release tensors it is made of, so the release's own list follows from it. Pure:
knows configurations, not files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..config import K3Config
from ..errors import CheckpointError

# First the release's own dtype; the others are what re-saved checkpoints use.
_BF16 = ("BF16", "F32", "F16")
_F32 = ("F32", "BF16", "F16")
_U8 = ("U8",)
# The release pads A_log with zeros to a multiple of this.
_A_LOG_PADDING = 128

# What may happen to a tensor's values: "linear" and "embedding" may be quantized, "exact" may not.
Role = Literal["linear", "embedding", "exact", "expert", "vision"]
ExpertForm = Literal["mxfp4", "bf16"]


class ReleaseTensor(NamedTuple):
    """A tensor the release must hold. ``shapes[0]`` and ``dtypes[0]`` are the release's own."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class MlxTensor:
    """A tensor of the MLX folder and the release tensors it comes from.

    ``op`` says how: ``join`` puts the sources' bytes one after the other, ``a_log`` keeps the
    heads and drops the padding, ``embed_q`` and ``unembed_out`` are the two halves of
    ``kv_b_proj``, the first transposed. ``dtype`` is set where it differs from the source's.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    sources: tuple[ReleaseTensor, ...]
    op: Literal["join", "a_log", "embed_q", "unembed_out"] = "join"
    dtype: str | None = None

    @property
    def module(self) -> str:
        """The module's path: the name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def kind(self) -> str:
        """What the tensor is called in every layer: ``o_proj``, or ``experts``."""
        return "experts" if self.role == "expert" else self.module.rpartition(".")[2]


def mlx_tensors(config: K3Config, experts: ExpertForm) -> Iterator[MlxTensor]:
    """Every tensor of the MLX folder: layer by layer, then the stem, then vision."""
    for layer in range(config.num_hidden_layers):
        yield from layer_tensors(config, layer)
        yield from expert_tensors(config, layer, experts)
    yield from stem_tensors(config)
    yield from vision_tensors(config)


def release_tensors(config: K3Config, experts: ExpertForm) -> Iterator[ReleaseTensor]:
    """Every tensor of the release, each once."""
    for tensor in mlx_tensors(config, experts):
        # kv_b_proj becomes two tensors; embed_q stands for it here.
        if tensor.op != "unembed_out":
            yield from tensor.sources


def stem_tensors(config: K3Config) -> Iterator[MlxTensor]:
    """What lies outside the layers: embedding, output norm and residual mix, head."""
    p = config.weight_prefix
    yield _same(f"{p}model.embed_tokens.weight", _vocabulary(config), "embedding")
    yield _same(f"{p}model.norm.weight", (config.hidden_size,))
    if config.attn_res_block_size is not None:
        yield from _residual(f"{p}model.output_attn_res", config.hidden_size)
    if not config.tie_word_embeddings:
        yield _same(f"{p}lm_head.weight", _vocabulary(config), "linear")


def vision_tensors(config: K3Config) -> Iterator[MlxTensor]:
    """The vision tower and projector, which pass unchanged; nothing in a text model.

    Raises:
        CheckpointError: if ``vision_config`` lacks a size.
    """
    if not config.vision_config:
        return
    try:
        shapes = _vision_shapes(config.vision_config)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"config.json: vision_config: {e} is missing or wrong") from None
    for name, shape in shapes.items():
        yield _same(name, shape, "vision")


def layer_tensors(config: K3Config, layer: int) -> Iterator[MlxTensor]:
    """The tensors of one decoder layer (0-based), all but its routed experts."""
    prefix = f"{config.weight_prefix}model.layers.{layer}."
    hidden = config.hidden_size
    yield _same(f"{prefix}input_layernorm.weight", (hidden,))
    yield _same(f"{prefix}post_attention_layernorm.weight", (hidden,))
    if config.attn_res_block_size is not None:
        yield from _residual(f"{prefix}self_attention_res", hidden)
        yield from _residual(f"{prefix}mlp_res", hidden)
    attention = _kda if layer in config.kda_layers else _mla
    yield from attention(config, f"{prefix}self_attn.")
    if count := config.expert_counts[layer]:
        yield from _moe(config, prefix, count)
    else:
        yield from _mlp(f"{prefix}mlp.", f"{prefix}mlp.", hidden, config.intermediate_size)


def expert_tensors(config: K3Config, layer: int, experts: ExpertForm) -> Iterator[MlxTensor]:
    """The stacked routed experts of a layer: gate, up, down, each weight then scales.

    Nothing where the MLP is dense.
    """
    prefix = f"{config.weight_prefix}model.layers.{layer}."
    count, dim = config.expert_counts[layer], config.expert_dim
    hidden = config.moe_intermediate_size
    if not count:
        return
    for theirs, ours, out, width in (
        ("w1", "gate_proj", hidden, dim),
        ("w3", "up_proj", hidden, dim),
        ("w2", "down_proj", dim, hidden),
    ):
        names = [f"{prefix}block_sparse_moe.experts.{i}.{theirs}." for i in range(count)]
        stack = f"{prefix}mlp.switch_mlp.{ours}."
        if experts == "bf16":
            shapes = ((out, width),)
            weights = tuple(ReleaseTensor(f"{n}weight", shapes, _BF16) for n in names)
            yield MlxTensor(f"{stack}weight", (count, out, width), "expert", weights)
            continue
        # Two codes a byte; MLX reads the same bytes as words of eight codes.
        shapes = ((out, width // 2),)
        packed = tuple(ReleaseTensor(f"{n}weight_packed", shapes, _U8) for n in names)
        shape = (count, out, width // 8)
        yield MlxTensor(f"{stack}weight", shape, "expert", packed, dtype="U32")
        shapes = ((out, width // 32),)
        scales = tuple(ReleaseTensor(f"{n}weight_scale", shapes, _U8) for n in names)
        yield MlxTensor(f"{stack}scales", (count, out, width // 32), "expert", scales)


def expert_probe(config: K3Config) -> str | None:
    """A name that is in the release exactly if its experts are MXFP4; None without experts."""
    if not config.moe_layers:
        return None
    layer = config.moe_layers[0]
    prefix = f"{config.weight_prefix}model.layers.{layer}.block_sparse_moe"
    return f"{prefix}.experts.0.w1.weight_packed"


def is_ignored(config: K3Config, name: str) -> bool:
    """Whether ``name`` belongs to parts the text model does not have: multi-token prediction.

    Those are ``mtp`` modules, or decoder layers after the last one; a tied ``lm_head`` too.
    """
    bare = name.removeprefix(config.weight_prefix)
    if bare.startswith(("mtp.", "model.mtp")):
        return True
    if bare.startswith("model.layers."):
        number = bare.split(".")[2]
        return number.isdecimal() and int(number) >= config.num_hidden_layers
    return bare == "lm_head.weight" and config.tie_word_embeddings


def is_mlx_name(name: str) -> bool:
    """Whether ``name`` exists only in a folder that has been converted to MLX already."""
    return ".mlp.switch_mlp." in name or ".self_attn.embed_q." in name


def _same(
    name: str,
    shape: tuple[int, ...],
    role: Role = "exact",
    dtypes: tuple[str, ...] = _BF16,
    source: str | None = None,
) -> MlxTensor:
    return MlxTensor(name, shape, role, (ReleaseTensor(source or name, (shape,), dtypes),))


def _linear(prefix: str, name: str, out: int, width: int) -> MlxTensor:
    return _same(f"{prefix}{name}.weight", (out, width), "linear")


def _vocabulary(config: K3Config) -> tuple[int, int]:
    return config.vocab_size, config.hidden_size


def _residual(prefix: str, hidden: int) -> Iterator[MlxTensor]:
    yield _same(f"{prefix}_proj.weight", (1, hidden))
    yield _same(f"{prefix}_norm.weight", (hidden,))


def _kda(config: K3Config, p: str) -> Iterator[MlxTensor]:
    hidden, heads, dim = config.hidden_size, config.kda_num_heads, config.kda_head_dim
    width, taps = heads * dim, config.short_conv_kernel_size
    projections = [ReleaseTensor(f"{p}{x}_proj.weight", ((width, hidden),), _BF16) for x in "qkv"]
    # [C, 1, taps] and [C, taps, 1] hold the same bytes.
    convolutions = [
        ReleaseTensor(f"{p}{x}_conv1d.weight", ((width, 1, taps),), _F32) for x in "qkv"
    ]
    if config.model_type == "kimi_k3":
        shape = (3 * width, hidden)
        yield MlxTensor(f"{p}qkv_proj.weight", shape, "linear", tuple(projections))
        shape = (3 * width, taps, 1)
        yield MlxTensor(f"{p}qkv_conv.conv.weight", shape, "exact", tuple(convolutions))
    else:
        for x, projection, conv in zip("qkv", projections, convolutions, strict=True):
            yield MlxTensor(f"{p}{x}_proj.weight", (width, hidden), "linear", (projection,))
            yield MlxTensor(f"{p}{x}_conv.conv.weight", (width, taps, 1), "exact", (conv,))
    yield _linear(p, "f_a_proj", dim, hidden)
    yield _linear(p, "f_b_proj", width, dim)
    yield _linear(p, "b_proj", heads, hidden)
    if config.use_full_rank_gate:
        yield _linear(p, "g_proj", width, hidden)
    else:
        yield _linear(p, "g_a_proj", dim, hidden)
        yield _linear(p, "g_b_proj", width, dim)
    yield _linear(p, "o_proj", hidden, width)
    yield _a_log(config, f"{p}A_log")
    yield _same(f"{p}dt_bias", (width,), dtypes=_F32)
    yield _same(f"{p}o_norm.weight", (dim,), dtypes=_F32)


def _a_log(config: K3Config, name: str) -> MlxTensor:
    heads = config.kda_num_heads
    padded = -(-heads // _A_LOG_PADDING) * _A_LOG_PADDING
    k3 = config.model_type == "kimi_k3"
    stored = ((padded,), (heads,), (1, 1, heads, 1))
    shapes = stored if k3 else stored[::-1]
    shape = (heads,) if k3 else (1, 1, heads, 1)
    return MlxTensor(name, shape, "exact", (ReleaseTensor(name, shapes, _F32),), "a_log")


def _mla(config: K3Config, p: str) -> Iterator[MlxTensor]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    query = heads * (nope + config.qk_rope_head_dim)
    if config.q_lora_rank is not None:
        yield _linear(p, "q_a_proj", config.q_lora_rank, hidden)
        yield _same(f"{p}q_a_layernorm.weight", (config.q_lora_rank,))
        yield _linear(p, "q_b_proj", query, config.q_lora_rank)
    else:
        yield _linear(p, "q_proj", query, hidden)
    yield _linear(p, "kv_a_proj_with_mqa", rank + config.qk_rope_head_dim, hidden)
    yield _same(f"{p}kv_a_layernorm.weight", (rank,))
    kv_b = (ReleaseTensor(f"{p}kv_b_proj.weight", ((heads * (nope + value), rank),), _BF16),)
    yield MlxTensor(f"{p}embed_q.weight", (heads, rank, nope), "linear", kv_b, "embed_q")
    yield MlxTensor(f"{p}unembed_out.weight", (heads, value, rank), "linear", kv_b, "unembed_out")
    if config.mla_use_output_gate:
        yield _linear(p, "g_proj", heads * value, hidden)
    yield _linear(p, "o_proj", hidden, heads * value)


def _mlp(ours: str, theirs: str, hidden: int, width: int) -> Iterator[MlxTensor]:
    for name, shape in (
        ("gate_proj", (width, hidden)),
        ("up_proj", (width, hidden)),
        ("down_proj", (hidden, width)),
    ):
        source = f"{theirs}{name}.weight"
        yield _same(f"{ours}{name}.weight", shape, "linear", source=source)


def _moe(config: K3Config, prefix: str, count: int) -> Iterator[MlxTensor]:
    ours, theirs = f"{prefix}mlp.", f"{prefix}block_sparse_moe."
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    yield _same(f"{ours}gate.weight", (count, hidden), source=f"{theirs}gate.weight")
    bias = "e_score_correction_bias"
    yield _same(f"{ours}{bias}", (count,), "exact", _F32, source=f"{theirs}gate.{bias}")
    if config.num_shared_experts:
        width = config.moe_intermediate_size * config.num_shared_experts
        yield from _mlp(f"{ours}shared_experts.", f"{theirs}shared_experts.", hidden, width)
    if latent is None:
        return
    for name, shape in (
        ("routed_expert_down_proj", (latent, hidden)),
        ("routed_expert_up_proj", (hidden, latent)),
    ):
        yield _same(f"{ours}{name}.weight", shape, "linear", source=f"{theirs}{name}.weight")
    if config.latent_moe_use_norm:
        name = "routed_expert_norm.weight"
        yield _same(f"{ours}{name}", (latent,), source=f"{theirs}{name}")


def _vision_shapes(vision: dict) -> dict[str, tuple[int, ...]]:
    hidden, qkv = vision["vt_hidden_size"], vision["qkv_hidden_size"]
    width, patch = vision["vt_intermediate_size"], vision["patch_size"]
    rows, columns = vision["merge_kernel_size"]
    merged = hidden * rows * columns
    shapes = {
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (vision["text_hidden_size"], merged),
        "mm_projector.post_norm.weight": (vision["text_hidden_size"],),
        "vision_tower.patch_embed.proj.weight": (hidden, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb.weight": (
            vision["init_pos_emb_height"],
            vision["init_pos_emb_width"],
            hidden,
        ),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
    }
    for block in range(vision["vt_num_hidden_layers"]):
        shapes |= {
            f"vision_tower.encoder.blocks.{block}.{name}.weight": shape
            for name, shape in {
                "norm0": (hidden,),
                "norm1": (hidden,),
                "wqkv": (3 * qkv, hidden),
                "wo": (hidden, qkv),
                "mlp.fc0": (width, hidden),
                "mlp.fc1": (hidden, width),
            }.items()
        }
    return shapes
