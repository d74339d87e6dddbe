"""The bank that learns: the model's numbers, a plain loop's gradients, and places that add up."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_k3.config import K3Config
from mlx_k3.models.bank import ResidentBank
from mlx_k3.models.layers import gated_activation
from mlx_k3.training import bank as training_bank
from mlx_k3.training.bank import TrainingBank, places
from mlx_k3.training.qat import mxfp4_fake_quantize

from .support.measure import relative_error

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def config(golden) -> K3Config:
    return K3Config.from_file(golden / "tiny-text")


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places enough for every pair to go to one expert."""
    monkeypatch.setattr(training_bank, "CAPACITY", 1e6)


def stacks(config: K3Config, experts: int) -> dict[str, mx.array]:
    """Weights of a size that makes outputs of about 1."""
    D, I = config.expert_dim, config.moe_intermediate_size  # noqa: E741
    shapes = (experts, I, D), (experts, I, D), (experts, D, I)
    keys = mx.random.split(mx.random.key(1), 3)
    return {
        name: mx.random.normal(shape, key=key) * shape[-1] ** -0.5
        for name, shape, key in zip(PROJECTIONS, shapes, keys, strict=True)
    }


def choice(config: K3Config, shape: tuple[int, ...], experts: int, seed: int = 0):
    """Latents, chosen experts (some more often than others) and their weights."""
    rng = np.random.default_rng(seed)
    k = config.num_experts_per_token
    favour = rng.normal(size=(*shape, experts)) + np.linspace(0, 2, experts)
    indices = np.argsort(-favour, axis=-1)[..., :k].astype(np.uint32)
    z = rng.normal(size=(*shape, config.expert_dim)).astype(np.float32)
    weights = rng.uniform(0.1, 1, size=indices.shape).astype(np.float32)
    return mx.array(z), mx.array(indices), mx.array(weights)


def placed(bank, weights: dict[str, mx.array]):
    """The bank with these stacks."""
    for name, stack in weights.items():
        bank[name].weight = stack
    return bank.train()


def by_loop(config, weights, z, indices, scales, left_out=()):
    """The weighted sum, one token and one expert after the other, less some flat pairs."""
    k = indices.shape[-1]
    rows, scales = z.reshape(-1, z.shape[-1]), scales.reshape(-1)
    total = [mx.zeros(z.shape[-1])] * len(rows)
    for pair, expert in enumerate(indices.reshape(-1).tolist()):
        if pair in left_out:
            continue
        gate, up, down = (weights[name][expert] for name in PROJECTIONS)
        x = rows[pair // k]
        y = down @ gated_activation(config, gate @ x, up @ x)
        total[pair // k] = total[pair // k] + scales[pair] * y
    return mx.stack(total).reshape(z.shape)


def assert_same_gradients(f, g, weights, z, scales, bound: float = 1e-5) -> None:
    """Values and gradients of ``f`` and ``g (weights, z, scales)``, towards a random direction."""
    towards = mx.random.normal(z.shape, key=mx.random.key(9))
    results = []
    for function in (f, g):

        def loss(weights, z, scales, function=function):
            return (function(weights, z, scales) * towards).sum()

        results.append(mx.value_and_grad(loss, argnums=(0, 1, 2))(weights, z, scales))
    (value, got), (expected, want) = results
    assert abs((value - expected).item()) < bound * max(abs(expected.item()), 1)
    for name in PROJECTIONS:
        assert relative_error(got[0][name], want[0][name]) < bound, name
    assert relative_error(got[1], want[1]) < bound
    assert relative_error(got[2], want[2]) < bound


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (3, 64)])
def test_it_gives_what_the_resident_bank_gives(config, roomy, shape) -> None:
    weights = stacks(config, 16)
    z, indices, scales = choice(config, shape, 16)
    ours, theirs = (
        placed(bank(config, 16), weights)(z, indices, scales)
        for bank in (TrainingBank, ResidentBank)
    )
    assert relative_error(ours, theirs) < 1e-5
    assert ours.dtype == z.dtype


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_few_tokens_have_places_whatever_they_choose(config, tokens) -> None:
    weights = stacks(config, 16)
    z, _, scales = choice(config, (1, tokens), 16)
    indices = mx.broadcast_to(mx.array([3, 0, 15, 7], mx.uint32), scales.shape)  # The same for all.
    bank = placed(TrainingBank(config, 16), weights)
    y = bank(z, indices, scales)
    assert bank._dropped.item() == 0
    assert relative_error(y, by_loop(config, weights, z, indices, scales)) < 1e-5


def test_gradients_are_those_of_a_plain_loop(config, roomy) -> None:
    weights = stacks(config, 16)
    z, indices, scales = choice(config, (2, 9), 16)
    bank = TrainingBank(config, 16)
    assert_same_gradients(
        lambda weights, z, scales: placed(bank, weights)(z, indices, scales),
        lambda weights, z, scales: by_loop(config, weights, z, indices, scales),
        weights,
        z,
        scales,
    )
    assert bank._dropped.item() == 0


def test_what_finds_no_place_adds_nothing_and_is_counted(config) -> None:
    """All tokens choose the same four experts: each has places for a part of them."""
    weights = stacks(config, 16)
    z, _, scales = choice(config, (1, 60), 16)
    indices = mx.broadcast_to(mx.array([3, 0, 15, 7], mx.uint32), scales.shape)
    capacity = 32  # 1.5 times 240 / 16 pairs, rounded up to 16
    place, _ = places(indices.reshape(-1), 16, capacity)
    left_out = {pair for pair, spot in enumerate(place.tolist()) if spot == 16 * capacity}
    assert len(left_out) == 4 * (60 - capacity)
    bank = TrainingBank(config, 16)
    assert_same_gradients(
        lambda weights, z, scales: placed(bank, weights)(z, indices, scales),
        lambda weights, z, scales: by_loop(config, weights, z, indices, scales, left_out),
        weights,
        z,
        scales,
    )
    placed(bank, weights)(z, indices, scales)
    assert bank._dropped.item() == pytest.approx(len(left_out) / 240)


def test_quantized_it_computes_with_rounded_weights_and_trains_the_others(config, roomy) -> None:
    weights = stacks(config, 16)
    z, indices, scales = choice(config, (2, 9), 16)
    bank = placed(TrainingBank(config, 16), weights)
    exact = bank(z, indices, scales)
    bank.quantized = True
    rounded = {name: mxfp4_fake_quantize(stack) for name, stack in weights.items()}
    expected = placed(TrainingBank(config, 16), rounded)(z, indices, scales)
    assert mx.array_equal(bank(z, indices, scales), expected)
    assert relative_error(exact, expected) > 0.01

    def loss(bank, weights):
        return placed(bank, weights)(z, indices, scales).square().sum()

    got = mx.grad(lambda weights: loss(bank, weights))(weights)
    want = mx.grad(lambda weights: loss(TrainingBank(config, 16), weights))(rounded)
    for name in PROJECTIONS:
        assert mx.array_equal(got[name], want[name])


def test_half_precision_goes_in_and_out(config, roomy) -> None:
    weights = stacks(config, 16)
    z, indices, scales = choice(config, (2, 9), 16)
    bank = placed(TrainingBank(config, 16), weights)
    y = bank(z.astype(mx.bfloat16), indices, scales)
    assert y.dtype == mx.bfloat16
    assert relative_error(y.astype(mx.float32), bank(z, indices, scales)) < 0.03


@settings(deadline=None)
@given(st.data())
def test_places(data: st.DataObject) -> None:
    E = data.draw(st.integers(1, 9), "experts")
    chosen = data.draw(st.lists(st.integers(0, E - 1), min_size=1, max_size=60), "chosen")
    capacity = data.draw(st.integers(1, len(chosen) + 2), "capacity")
    P, nowhere = len(chosen), E * capacity
    place, source = (x.tolist() for x in places(mx.array(chosen, mx.uint32), E, capacity))
    assert (len(place), len(source)) == (P, nowhere)
    have = [(pair, spot) for pair, spot in enumerate(place) if spot != nowhere]
    # Each is the other's inverse, so that no place is taken twice.
    assert sorted((pair, spot) for spot, pair in enumerate(source) if pair != P) == have
    for expert in range(E):
        own = sorted(spot for pair, spot in have if chosen[pair] == expert)
        begin, count = expert * capacity, min(chosen.count(expert), capacity)
        assert own == [*range(begin, begin + count)]
