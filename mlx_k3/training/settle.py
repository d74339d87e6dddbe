"""The routers' biases at the end of a run, set from many batches at once.

Every step moves them by what its one batch shows, and the batches differ: long texts here, short
questions there. Those of the last step are right for the last few batches only.
"""

import mlx.core as mx

from ..models.kimi import Model
from .balancing import quantile_bias
from .data import Batch
from .sight import logits

ROUNDS = 3  # A layer's scores depend on the choices of those before it.


def settle(model: Model, batches: list[Batch]) -> list[mx.array]:
    """The selection biases ``[E]`` of each MoE layer with which all of ``batches`` are balanced.

    ``model`` has its weights in place and recording gates; its own biases are where to start, and
    are replaced.
    """
    config, top_k = model.config, model.config.num_experts_per_token
    mlps = [model.layers[layer].mlp for layer in config.moe_layers]
    for _ in range(ROUNDS):
        seen: list[list[mx.array]] = [[] for _ in mlps]
        for batch in batches:
            said = logits(model, mx.array(batch.ids[:, :-1]), batch.pictures)
            scores = [mlp.gate.scores(config) for mlp in mlps]
            mx.eval(said, scores)
            for of_layer, new in zip(seen, scores, strict=True):
                of_layer.append(new)
        for mlp, of_layer in zip(mlps, seen, strict=True):
            bias = mlp.e_score_correction_bias
            mlp.e_score_correction_bias = quantile_bias(
                mx.concatenate(of_layer), bias, top_k, rounds=5
            )
    return [mlp.e_score_correction_bias for mlp in mlps]
