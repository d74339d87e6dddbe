"""A model with random weights that training can start from."""

import math

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..config import K3Config, VisionConfig
from ..models.kimi import Model
from ..models.vision import Vision
from .bank import TrainingBank
from .kda import STRONGEST, bounded_kda
from .router import RecordingGate

EMBEDDING_STD = 0.5
POSITION_STD = 0.2  # of the tower's, beside patches of about 0.5
# Log decay a token of a fresh KDA channel, even in logarithm: memories of 1 to 1000 tokens.
LEAST_DECAY, MOST_DECAY = 1e-3, 1.0


def new_model(config: K3Config, seed: int) -> Model:
    """A model to train: dense experts in a :class:`TrainingBank`, float32 weights.

    Matrices are normal with a deviation of ``fan_in^-1/2``, what writes to the residual stream
    less by the root of twice the depth; Attention Residuals begin as a plain average. A model that
    sees has its tower and projector in ``model.vision``.
    """
    model = Model(config)
    if config.vision_config:
        model.vision = Vision(VisionConfig.from_dict(config.vision_config))
    if config.gate_lower_bound is not None and config.gate_lower_bound >= STRONGEST:
        for layer in config.kda_layers:
            model.layers[layer].self_attn.recurrence = bounded_kda
    for layer in config.moe_layers:
        experts, mlp = config.expert_counts[layer], model.layers[layer].mlp
        mlp.switch_mlp = TrainingBank(config, experts)
        mlp.gate = RecordingGate(config.hidden_size, experts)
    key = mx.random.key(seed)
    weights = []
    for name, parameter in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        weights.append((name, _draw(name, parameter.shape, config, own)))
    model.update(tree_unflatten(weights))
    return model.train()


def _draw(name: str, shape: tuple[int, ...], config: K3Config, key: mx.array) -> mx.array:
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf.endswith(("norm", "norm0", "norm1")):
        return mx.ones(shape)
    if leaf in ("A_log", "e_score_correction_bias") or leaf.endswith("_res"):
        return mx.zeros(shape)
    if leaf == "dt_bias":
        return _gate_bias(mx.random.uniform(shape=shape, key=key), config.gate_lower_bound)
    noise = mx.random.normal(shape, key=key)
    if leaf == "embed_tokens":
        return EMBEDDING_STD * noise
    if leaf == "pos_emb":
        return POSITION_STD * noise
    # A row's numbers, whatever shape they have: those of a patch are a picture's.
    std = math.prod(shape[1 if ".patch_embed." in name else -1 :]) ** -0.5
    if leaf in ("wo", "fc1"):
        std /= math.sqrt(2 * config.vision_config["vt_num_hidden_layers"])
    if leaf in ("o_proj", "down_proj", "routed_expert_up_proj") and "switch_mlp" not in name:
        std /= math.sqrt(2 * config.num_hidden_layers)
    return std * noise


def _gate_bias(uniform: mx.array, lower_bound: float | None) -> mx.array:
    """``dt_bias`` for log decays between LEAST_DECAY and MOST_DECAY when the projection is zero."""
    decay = LEAST_DECAY * mx.exp(uniform * math.log(MOST_DECAY / LEAST_DECAY))
    if lower_bound is None:
        return mx.log(mx.expm1(decay))
    share = decay / -lower_bound
    return mx.log(share / (1 - share))
