"""``config.json`` as the rest of mlx-k3 reads it: a frozen :class:`K3Config`; of the vision tower
a :class:`VisionConfig`.

Covers the family: Kimi K3, Kimi Linear, and pruned builds of either. The release counts layers
from 1; they become 0-based here and nowhere else.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import CheckpointError, UnsupportedError

# Which file format each model type comes in; mlx-lm names its model files the same way.
MODEL_TYPES = ("kimi_k3", "kimi_linear")

# What the names of the tower's and its projector's tensors begin with.
VISION_PARTS = ("vision_tower.", "mm_projector.")

# The one tower that there is, where ``vision_config`` leaves a choice.
_TOWER = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}

_PARTITION = "kda_layers and full_attn_layers must name every layer from 1 to {} exactly once"


@dataclass(frozen=True)
class K3Config:
    """The text model's sizes and switches. Names follow the release's ``config.json``.

    ``kda_layers`` and ``expert_counts`` are indexed by the 0-based layer: ``expert_counts[i]`` is
    the number of routed experts of layer ``i``, 0 where the MLP is dense.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str
    activation_situ_beta: float
    activation_situ_linear_beta: float | None
    attn_res_block_size: int | None
    # KDA
    kda_layers: frozenset[int]
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    use_full_rank_gate: bool
    # MLA
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool
    # MoE
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool
    moe_renormalize: bool
    moe_router_activation_func: str
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int
    expert_counts: tuple[int, ...]
    # Tokens and pictures
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    media_placeholder_token_id: int | None
    vision_config: dict[str, Any] | None

    @classmethod
    def from_file(cls, path: str | Path) -> "K3Config":
        """Read ``path``, a ``config.json`` or the folder that holds one.

        Raises:
            CheckpointError: no such file, not JSON, or a field is missing or contradictory.
            UnsupportedError: another model family, or a variant this package does not implement.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; is this a model folder?") from None
        except OSError as e:
            raise CheckpointError(f"{path}: {e.strerror}") from None
        except ValueError as e:
            raise CheckpointError(f"{path} is not valid JSON: {e}") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} does not hold a JSON object")
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "K3Config":
        """The configuration in a parsed ``config.json``; see :meth:`from_file` for the errors."""
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise UnsupportedError(
                f"config.json: model_type is {model_type!r}; mlx-k3 runs "
                + " and ".join(MODEL_TYPES)
            )
        text = config.get("text_config", config)
        try:
            return cls._read(config, text)
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            what = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) else str(e)
            raise CheckpointError(f"config.json: {what}") from None

    @classmethod
    def _read(cls, config: dict[str, Any], text: dict[str, Any]) -> "K3Config":
        linear = text["linear_attn_config"]
        layers = int(text["num_hidden_layers"])
        if len(linear["kda_layers"]) + len(linear["full_attn_layers"]) != layers:
            raise ValueError(_PARTITION.format(layers))
        eos = config.get("eos_token_id", text.get("eos_token_id"))
        if not text.get("mla_use_nope", False):
            raise UnsupportedError(
                "config.json: mla_use_nope is false; only NoPE models are supported"
            )
        result = cls(
            model_type=config["model_type"],
            vocab_size=int(text["vocab_size"]),
            hidden_size=int(text["hidden_size"]),
            num_hidden_layers=layers,
            num_attention_heads=int(text["num_attention_heads"]),
            intermediate_size=int(text["intermediate_size"]),
            rms_norm_eps=float(text["rms_norm_eps"]),
            max_position_embeddings=int(
                text.get("max_position_embeddings") or text.get("model_max_length") or 1 << 20
            ),
            tie_word_embeddings=bool(
                text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
            ),
            hidden_act=text.get("hidden_act", "silu"),
            activation_situ_beta=float(text.get("activation_situ_beta") or 1.0),
            activation_situ_linear_beta=text.get("activation_situ_linear_beta"),
            attn_res_block_size=text.get("attn_res_block_size"),
            kda_layers=frozenset(int(i) - 1 for i in linear["kda_layers"]),
            kda_num_heads=int(linear["num_heads"]),
            kda_head_dim=int(linear["head_dim"]),
            short_conv_kernel_size=int(linear.get("short_conv_kernel_size", 4)),
            gate_lower_bound=linear.get("gate_lower_bound"),
            use_full_rank_gate=bool(linear.get("use_full_rank_gate", False)),
            q_lora_rank=text.get("q_lora_rank"),
            kv_lora_rank=int(text["kv_lora_rank"]),
            qk_nope_head_dim=int(_first(text, "qk_nope_head_dim", "head_dim")),
            qk_rope_head_dim=int(text.get("qk_rope_head_dim") or 0),
            v_head_dim=int(_first(text, "v_head_dim", "head_dim")),
            mla_use_output_gate=bool(text.get("mla_use_output_gate", False)),
            num_experts_per_token=int(text.get("num_experts_per_token", 1)),
            num_shared_experts=int(text.get("num_shared_experts") or 0),
            moe_intermediate_size=int(text.get("moe_intermediate_size") or 0),
            routed_expert_hidden_size=text.get("routed_expert_hidden_size"),
            latent_moe_use_norm=bool(text.get("latent_moe_use_norm", False)),
            moe_renormalize=bool(text.get("moe_renormalize", True)),
            moe_router_activation_func=text.get("moe_router_activation_func", "sigmoid"),
            routed_scaling_factor=float(text.get("routed_scaling_factor", 1.0)),
            num_expert_group=int(text.get("num_expert_group") or 1),
            topk_group=int(text.get("topk_group") or 1),
            expert_counts=_expert_counts(text, layers),
            bos_token_id=config.get("bos_token_id", text.get("bos_token_id")),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=config.get("pad_token_id", text.get("pad_token_id")),
            media_placeholder_token_id=config.get("media_placeholder_token_id"),
            vision_config=config.get("vision_config"),
        )
        result._check(frozenset(int(i) - 1 for i in linear["full_attn_layers"]))
        return result

    def _check(self, mla_layers: frozenset[int]) -> None:
        everything = frozenset(range(self.num_hidden_layers))
        if self.kda_layers & mla_layers or self.kda_layers | mla_layers != everything:
            raise ValueError(_PARTITION.format(self.num_hidden_layers))
        if self.hidden_act not in ("situ", "silu"):
            raise UnsupportedError(
                f"config.json: hidden_act {self.hidden_act!r} is not implemented"
            )
        if self.moe_router_activation_func not in ("sigmoid", "softmax"):
            raise UnsupportedError(
                f"config.json: moe_router_activation_func {self.moe_router_activation_func!r} "
                "is not implemented"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name != "num_shared_experts" and value < 0:
                raise ValueError(f"{field.name} is {value}")
        if self.num_expert_group < 1:
            raise ValueError(f"num_expert_group is {self.num_expert_group}")
        for layer, count in enumerate(self.expert_counts):
            if 0 < count < self.num_experts_per_token:
                raise ValueError(
                    f"layer {layer} has {count} experts but num_experts_per_token is "
                    f"{self.num_experts_per_token}"
                )
            if count % self.num_expert_group:
                raise ValueError(f"layer {layer}: {count} experts do not split into groups")

    @property
    def has_latent_moe(self) -> bool:
        """Whether routed experts work in a latent narrower than the hidden size."""
        return self.routed_expert_hidden_size is not None

    @property
    def expert_dim(self) -> int:
        """Width of what a routed expert reads and writes."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based layers whose MLP is a mixture of experts."""
        return tuple(i for i, count in enumerate(self.expert_counts) if count)

    @property
    def weight_prefix(self) -> str:
        """What the text model's tensor names start with before ``model.`` or ``lm_head.``."""
        return "language_model." if self.model_type == "kimi_k3" else ""


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower's sizes. Names follow the release's ``vision_config``."""

    patch_size: int
    vt_num_hidden_layers: int
    vt_hidden_size: int
    qkv_hidden_size: int
    vt_num_attention_heads: int
    vt_intermediate_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    text_hidden_size: int
    projector_ln_eps: float
    merge_kernel_size: tuple[int, int]

    @classmethod
    def from_dict(cls, vision: dict[str, Any]) -> "VisionConfig":
        """The tower that a ``config.json`` describes.

        Raises:
            CheckpointError: a size is missing or makes no sense.
            UnsupportedError: a variant this package does not implement.
        """
        for name, known in _TOWER.items():
            if vision.get(name, known) != known:
                raise UnsupportedError(
                    f"config.json: vision_config: {name} {vision[name]!r} is not implemented"
                )
        try:
            rows, columns = vision["merge_kernel_size"]
            sizes = {f.name: f.type(vision[f.name]) for f in fields(cls)[:-1]}
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"config.json: vision_config: {e} is missing or wrong") from None
        config = cls(**sizes, merge_kernel_size=(int(rows), int(columns)))
        if wrong := [name for name, size in sizes.items() if size <= 0]:
            raise CheckpointError(f"config.json: vision_config: {wrong[0]} is {sizes[wrong[0]]}")
        if config.qkv_hidden_size % (4 * config.vt_num_attention_heads):
            raise CheckpointError(
                "config.json: vision_config: heads must be a multiple of 4 wide; "
                f"{config.qkv_hidden_size} over {config.vt_num_attention_heads} are not"
            )
        return config


def _first(text: dict[str, Any], name: str, other: str) -> Any:
    """The field ``name``, or ``other`` where it is not set."""
    value = text.get(name) or text.get(other)
    if value is None:
        raise KeyError(name)
    return value


def _expert_counts(text: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Routed experts of each layer; pruned builds list them, others follow from the frequency."""
    counts = text.get("expert_counts")
    if counts is not None:
        if len(counts) != layers:
            raise ValueError(f"expert_counts lists {len(counts)} layers of {layers}")
        return tuple(int(count) for count in counts)
    experts = int(text.get("num_experts") or 0)
    first, every = int(text.get("first_k_dense_replace") or 0), int(text.get("moe_layer_freq") or 1)
    if every < 1:
        raise ValueError(f"moe_layer_freq is {text['moe_layer_freq']}")
    return tuple(experts if i >= first and i % every == 0 else 0 for i in range(layers))
