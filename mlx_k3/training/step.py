"""One step of training: loss, gradients, the optimizer's update, and the router's balance.

A function of a :class:`State` and a batch, so that a run can be resumed exactly. Not compiled:
fusing a step takes CUDA's compiler minutes, and a CPU gains nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import clip_grad_norm
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..models.kimi import Model
from .balancing import expert_load, max_over_mean
from .config import TrainConfig
from .pictures import Pictures
from .precision import as_stored
from .router import rebalance
from .sight import logits
from .two_optimizers import TOWER

_BIAS = "e_score_correction_bias"


class State(NamedTuple):
    """Everything a step changes: trees of arrays."""

    parameters: dict[str, Any]
    biases: list[mx.array]
    """The routers' selection biases ``[E]``, one per MoE layer."""
    optimizer: dict[str, Any]


class Metrics(NamedTuple):
    """What a step tells; scalars, not evaluated yet."""

    loss: mx.array
    grad_norm: mx.array
    max_load: mx.array
    """The busiest expert's load over the mean, in the worst layer."""
    dropped: mx.array
    """Share of token-expert pairs that found no place, in the worst layer."""


Step = Callable[..., tuple[State, Metrics]]
"""Of a state, ids, weights and maybe pictures."""


def initial_state(model: Model, optimizer: Any) -> State:
    """The state of a fresh model and optimizer."""
    parameters, biases = split(model)
    optimizer.init(parameters)
    return State(parameters, biases, optimizer.state)


def split(model: Model) -> tuple[dict[str, Any], list[mx.array]]:
    """What gradients train, and the biases that balancing sets."""
    named = tree_flatten(model.parameters())
    biases = [model.layers[layer].mlp[_BIAS] for layer in model.config.moe_layers]
    return tree_unflatten([(n, p) for n, p in named if not n.endswith(_BIAS)]), biases


def place(model: Model, parameters: dict[str, Any], biases: list[mx.array]) -> None:
    """Give the model these weights."""
    model.update(parameters)
    for layer, bias in zip(model.config.moe_layers, biases, strict=True):
        model.layers[layer].mlp[_BIAS] = bias


def make_step(model: Model, optimizer: Any, config: TrainConfig, *, quantized: bool) -> Step:
    """The step for this phase of the training.

    ``ids`` are ``[B, T + 1]``; ``weights [B, T]`` say how much the prediction of each next id
    counts; ``pictures`` are those of the batch.
    """
    banks = [model.layers[layer].mlp.switch_mlp for layer in model.config.moe_layers]
    gates = [model.layers[layer].mlp.gate for layer in model.config.moe_layers]
    top_k = model.config.num_experts_per_token

    def loss_of(parameters, biases, ids, weights, pictures):
        for bank in banks:
            bank.quantized = quantized
        place(model, as_stored(parameters), biases)
        loss = cross_entropy(logits(model, ids[:, :-1], pictures), ids[:, 1:], weights)
        scores = [gate.scores(model.config) for gate in gates]
        return loss, scores, [bank._dropped for bank in banks]

    def step(
        state: State, ids: mx.array, weights: mx.array, pictures: Pictures | None = None
    ) -> tuple[State, Metrics]:
        grad = mx.value_and_grad(lambda p: loss_of(p, state.biases, ids, weights, pictures))
        (loss, scores, dropped), gradients = grad(state.parameters)
        if pictures is None:
            gradients.pop(TOWER, None)  # Zeros.
        # MLX's optimizers hand trees back in any order, and the norm is a sum over the tree.
        gradients = tree_unflatten(sorted(tree_flatten(gradients)))
        gradients, norm = clip_grad_norm(gradients, config.max_grad_norm)
        # A tree of its own: optimizers change theirs, and the given state must stay what it is.
        optimizer.state = tree_map(lambda array: array, state.optimizer)
        parameters = optimizer.apply_gradients(gradients, state.parameters)
        biases, worst = [], [mx.array(1.0)]
        for s, bias in zip(scores, state.biases, strict=True):
            load = expert_load(s, bias, top_k)
            worst.append(max_over_mean(load))
            biases.append(rebalance(config.balance, config.balance_rate, s, bias, load, top_k))
        dropped = [mx.array(0.0), *dropped]  # What a model without experts has.
        metrics = Metrics(loss, norm, mx.stack(worst).max(), mx.stack(dropped).max())
        return State(parameters, biases, optimizer.state), metrics

    return step


def cross_entropy(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Weighted mean negative log likelihood; logits ``[B, T, vocab]``, the others ``[B, T]``."""
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), targets)
    return (losses * weights).sum() / mx.maximum(weights.sum(), 1)
