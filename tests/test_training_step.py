"""One step of training: true gradients, what it tells, and a state that is left alone."""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from mlx_k3.config import K3Config
from mlx_k3.models import moe
from mlx_k3.models.kimi import Model
from mlx_k3.training import bank
from mlx_k3.training import step as stepping
from mlx_k3.training.config import TrainConfig
from mlx_k3.training.initialize import new_model
from mlx_k3.training.muon import make_optimizer
from mlx_k3.training.precision import as_stored
from mlx_k3.training.qat import mxfp4_fake_quantize
from mlx_k3.training.schedule import learning_rate
from mlx_k3.training.step import State, cross_entropy, initial_state, make_step, split

TOKENS = 80


class Watch:
    """An optimizer that changes nothing and keeps the gradients it was given."""

    state: dict = {}  # noqa: RUF012
    gradients: Any = None

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        self.gradients = gradients
        return parameters


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"model": Path(), "out": Path(), "steps": 20, **changes})


@pytest.fixture
def model(start: Path) -> Model:
    """With parameters that are not all equal or zero, as some begin."""
    model = new_model(K3Config.from_file(start), seed=0)
    keys = iter(mx.random.split(mx.random.key(1), 200))

    def moved(path: str, parameter: mx.array) -> mx.array:
        if path.endswith("correction_bias"):
            return parameter
        return parameter + 0.1 * mx.random.normal(parameter.shape, key=next(keys))

    model.update(tree_map_with_path(moved, model.parameters()))
    return model


@pytest.fixture
def batch(model: Model) -> tuple[mx.array, mx.array]:
    ids = mx.random.randint(0, model.config.vocab_size, (2, TOKENS // 2 + 1), key=mx.random.key(2))
    counts = mx.random.uniform(shape=(2, TOKENS // 2), key=mx.random.key(3)) > 0.3
    return ids, counts.astype(mx.float32)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank, "CAPACITY", 1e6)


def fixed_choice(model: Model) -> Callable[..., tuple[mx.array, mx.array]]:
    """The router, choosing in every pass what it chose in the first: no jumps in the loss."""
    route, chosen, layers = moe.route, [], len(model.config.moe_layers)

    def wrapped(logits: mx.array, bias: mx.array, top_k: int, **options: Any):
        if len(chosen) < layers:
            indices, weights = route(logits, bias, top_k, **options)
            mx.eval(indices)
            chosen.append(indices)
            return indices, weights
        chosen.append(chosen[-layers])
        was = (chosen[-1][..., None] == mx.arange(logits.shape[-1])).sum(-2)
        return route(logits, bias + 100 * was, top_k, **options)

    return wrapped


def test_gradients_are_the_slopes_of_the_loss(
    model: Model, batch: tuple, roomy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of parameter: along its gradient and, as much, in a random direction."""
    monkeypatch.setattr(moe, "route", fixed_choice(model))
    monkeypatch.setattr(stepping, "as_stored", lambda parameters: parameters)  # Steps too coarse.
    watch = Watch()
    step = make_step(model, watch, settings(max_grad_norm=math.inf), quantized=False)
    tree, biases = split(model)
    parameters = dict(tree_flatten(tree))

    def loss(parameters: dict[str, mx.array]) -> float:
        state = State(tree_unflatten(list(parameters.items())), biases, {})
        return step(state, *batch)[1].loss.item()

    loss(parameters)
    gradients = dict(tree_flatten(watch.gradients))
    assert set(gradients) == set(parameters)
    kinds = defaultdict(list)
    for name in parameters:
        kinds[re.sub(r"layers\.\d+\.", "", name)].append(name)
    assert len(kinds) == 38
    eps, wrong = 3e-3, {}
    for i, (kind, names) in enumerate(kinds.items()):
        norm = math.sqrt(sum(gradients[n].square().sum().item() for n in names))
        size = sum(parameters[n].size for n in names)
        towards = {
            n: gradients[n] / norm
            + mx.random.normal(gradients[n].shape, key=mx.random.key(100 * i + j)) / size**0.5
            for j, n in enumerate(names)
        }
        slope = sum((gradients[n] * towards[n]).sum().item() for n in names)
        there, back = (
            loss(parameters | {n: parameters[n] + sign * eps * towards[n] for n in names})
            for sign in (1, -1)
        )
        if abs((there - back) / (2 * eps) / slope - 1) > 0.01:
            wrong[kind] = slope, (there - back) / (2 * eps)
    assert not wrong


def test_a_step_is_a_function(model: Model, batch: tuple) -> None:
    """It leaves the state it is given as it is, and gives the same again."""
    optimizer = make_optimizer(model.config, 1e-3, 0.1)
    state = initial_state(model, optimizer)
    step = make_step(model, optimizer, settings(), quantized=False)
    before, _ = step(state, *batch)  # Now moments are not zero.
    arrays = tree_flatten(before._asdict())
    first = [tree_flatten(part) for part in step(before, *batch)]
    after = tree_flatten(before._asdict())
    assert [name for name, _ in after] == [name for name, _ in arrays]
    assert all(a is b for (_, a), (_, b) in zip(arrays, after, strict=True))
    second = [tree_flatten(part) for part in step(before, *batch)]
    for one, other in zip(first, second, strict=True):
        for (name, a), (_, b) in zip(one, other, strict=True):
            assert mx.array_equal(a, b), name


def test_it_computes_with_what_a_checkpoint_holds(model: Model, batch: tuple, roomy: None) -> None:
    parameters, biases = split(model)

    def rounded_experts(path: str, parameter: mx.array) -> mx.array:
        return mxfp4_fake_quantize(parameter) if "switch_mlp" in path else parameter

    def loss(parameters: Any, quantized: bool) -> float:
        step = make_step(model, Watch(), settings(), quantized=quantized)
        return step(State(parameters, biases, {}), *batch)[1].loss.item()

    exact = loss(parameters, quantized=False)
    assert loss(as_stored(parameters), quantized=False) == exact
    in_mxfp4 = loss(tree_map_with_path(rounded_experts, parameters), quantized=False)
    assert loss(parameters, quantized=True) == in_mxfp4 != exact


def test_what_counts_for_nothing_teaches_nothing(model: Model, batch: tuple, roomy: None) -> None:
    parameters, biases = split(model)
    ids, weights = batch
    longer = mx.concatenate([ids, ids[::-1]]), mx.concatenate([weights, 0 * weights])
    step = make_step(model, Watch(), settings(), quantized=False)
    one, other = (step(State(parameters, biases, {}), *part)[1] for part in (batch, longer))
    assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-5)
    assert other.grad_norm.item() == pytest.approx(one.grad_norm.item(), rel=1e-3)


def test_gradients_are_clipped_and_their_norm_is_told(model: Model, batch: tuple) -> None:
    parameters, biases = split(model)
    norms = {}
    for most in (0.5, math.inf):
        watch = Watch()
        step = make_step(model, watch, settings(max_grad_norm=most), quantized=False)
        told = step(State(parameters, biases, {}), *batch)[1].grad_norm.item()
        total = sum(g.square().sum().item() for _, g in tree_flatten(watch.gradients))
        norms[most] = told, math.sqrt(total)
    assert norms[0.5][0] == norms[math.inf][0] > 1
    assert norms[0.5][1] == pytest.approx(0.5, rel=1e-4)
    assert norms[math.inf][1] == pytest.approx(norms[math.inf][0], rel=1e-4)


@pytest.mark.parametrize("balance", ["none", "sign", "quantile"])
def test_balance_and_what_is_told_of_it(model: Model, batch: tuple, balance: str) -> None:
    """All tokens go to the same two experts, of which each has places for a part of them."""
    parameters, _ = split(model)
    skewed = [mx.array([3.0, 3.0] + [0.0] * 6)] * len(model.config.moe_layers)
    config = settings(balance=balance, balance_rate=0.25)
    step = make_step(model, Watch(), config, quantized=False)
    state, metrics = step(State(parameters, skewed, {}), *batch)
    assert metrics.max_load.item() == pytest.approx(8 / 2)
    capacity = 48  # twice 160 / 8 pairs, rounded up to 16
    assert metrics.dropped.item() == pytest.approx(2 * (TOKENS - capacity) / (2 * TOKENS))
    for bias in state.biases:
        if balance == "none":
            assert bias.tolist() == skewed[0].tolist()
        elif balance == "sign":
            assert bias.tolist() == [2.75, 2.75] + [0.25] * 6
        else:
            # A quarter of the way to a balanced bias, which differs by less than scores do.
            moved = np.array(bias) - 0.75 * np.array(skewed[0])
            assert np.abs(moved).max() < 0.25 and abs(moved.sum()) < 1e-5


def test_the_load_that_is_told_is_what_the_router_chose(
    model: Model, batch: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    route, loads = moe.route, []

    def recorded(logits: mx.array, *arguments: Any, **options: Any):
        indices, weights = route(logits, *arguments, **options)
        loads.append(np.bincount(np.array(indices).ravel(), minlength=logits.shape[-1]))
        return indices, weights

    monkeypatch.setattr(moe, "route", recorded)
    parameters, biases = split(model)
    step = make_step(model, Watch(), settings(), quantized=False)
    told = step(State(parameters, biases, {}), *batch)[1].max_load.item()
    assert len(loads) == 4 and told == pytest.approx(max(n.max() / n.mean() for n in loads))


def test_quantile_balancing_balances(model: Model, batch: tuple) -> None:
    parameters, biases = split(model)
    step = make_step(model, Watch(), settings(balance_rate=0.5), quantized=False)
    state, first = step(State(parameters, biases, {}), *batch)
    for _ in range(8):
        state, last = step(state, *batch)
    assert last.max_load.item() < 1.3 < 1.5 < first.max_load.item()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_steps_on_one_batch_learn_it(model: Model, batch: tuple, optimizer: str) -> None:
    made = make_optimizer(model.config, 3e-3, 0.1, optimizer)
    state = initial_state(model, made)
    step = make_step(model, made, settings(), quantized=False)
    losses = []
    for _ in range(8):
        state, metrics = step(state, *batch)
        losses.append(metrics.loss.item())
    assert losses[-1] < losses[0] - 2


def test_cross_entropy_is_of_what_counts() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    targets, weights = rng.integers(0, 5, (2, 3)), np.array([[1, 0, 0], [0, 1, 1]], np.float32)
    expected = 0.0
    for row, column in zip(*weights.nonzero(), strict=True):
        x = logits[row, column].astype(np.float64)
        expected += math.log(np.exp(x).sum()) - x[targets[row, column]]
    loss = cross_entropy(mx.array(logits), mx.array(targets), mx.array(weights))
    assert loss.item() == pytest.approx(expected / 3, rel=1e-5)
    nothing = cross_entropy(mx.array(logits), mx.array(targets), mx.zeros((2, 3)))
    assert nothing.item() == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"warmup": 0.2, "decay": 0.3},
            {0: 1 / 4, 2: 1 / 4 + 2 * 3 / 16, 4: 1, 13: 1, 14: 1, 17: 1 / 2, 19: 1 / 6, 20: 0},
        ),
        ({"warmup": 0, "decay": 0}, {0: 1, 10: 1, 19: 1}),
        ({"warmup": 0.5, "decay": 0.9}, {0: 1 / 10, 10: 1, 15: 1 / 2, 19: 1 / 10, 20: 0}),
        ({"warmup": 1.0, "decay": 0.3}, {0: 1 / 20, 20: 1}),
        (
            {"schedule": "cosine", "warmup": 0.2},
            {
                0: 1 / 4,
                4: 1,
                8: (1 + math.cos(math.pi / 4)) / 2,
                12: 1 / 2,
                19: (1 + math.cos(math.pi * 15 / 16)) / 2,
                20: 0,
            },
        ),
    ],
    ids=str,
)
def test_learning_rates(changes: dict[str, Any], expected: dict[int, float]) -> None:
    rate = learning_rate(settings(learning_rate=0.5, **changes))
    found = {step: rate(mx.array(step, mx.uint64)).item() / 0.5 for step in expected}
    assert found == pytest.approx(expected, abs=1e-6)
