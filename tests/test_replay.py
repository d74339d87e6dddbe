"""Recorded routing: spread over experts of any number, and replayed by models of any width."""

import json
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.config import K3Config
from mlx_k3.experts.bank import OffloadedBank
from mlx_k3.loader import assemble
from mlx_k3.models.bank import ResidentBank
from mlx_k3.models.kimi import Model

from .support.models import convert_golden
from .support.offload import NAMES, answer, in_memory, offloaded, prompt
from .support.replay import RIGHT_GUESSES, replay
from .support.routing import EXPERTS, RECORDED, routing

COUNTS = [(EXPERTS, 4), (896, 16), (256, 8), (112, 16), (16, 4), (8, 3), (8, 2)]


def test_the_bundled_models_own_width_is_what_was_recorded() -> None:
    width = RECORDED.shape[1]
    assert np.array_equal(routing(200, width), RECORDED[:200])
    later = routing(200, 2 * width)[:, width:]
    assert np.array_equal(later, np.roll(RECORDED, -131, axis=0)[:200])


@pytest.mark.parametrize(("experts", "k"), COUNTS)
def test_a_token_has_k_different_experts_and_none_is_idle(experts: int, k: int) -> None:
    tokens = len(RECORDED)
    choices = routing(tokens, 6, experts, k)
    assert choices.shape == (tokens, 6, k)
    assert np.diff(choices, axis=-1).min() > 0
    for layer in range(6):
        assert len(np.unique(choices[:, layer])) == experts
    assert choices.min() == 0 and choices.max() == experts - 1


@pytest.mark.parametrize(("experts", "k"), COUNTS)
def test_experts_come_back_more_often_than_at_random(experts: int, k: int) -> None:
    choices = routing(1000, 4, experts, k)
    both = choices[1:, :, :, None] == choices[:-1, :, None, :]
    assert both.any(-1).mean() > k / experts


@pytest.fixture(scope="module", params=NAMES)
def package(golden, tmp_path_factory, request):
    return convert_golden(golden, request.param, tmp_path_factory.mktemp("package"))


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Fills with each bank's (indices, weights, ids looked ahead to)."""
    seen: list[tuple] = []
    for bank in (ResidentBank, OffloadedBank):

        def note(self, z, indices, weights, alongside=None, ahead=None, call=bank.__call__):
            seen.append((indices, weights, ahead))
            return call(self, z, indices, weights, alongside, ahead)

        monkeypatch.setattr(bank, "__call__", note)
    return seen


def table(model, tokens: int) -> np.ndarray:
    config = model.config
    counts = (n for n in config.expert_counts if n)
    return routing(tokens, len(config.moe_layers), next(counts), config.num_experts_per_token)


def chosen(calls: list[tuple], layers: int) -> np.ndarray:
    """[B, T, layers, k], ascending, of the passes one after the other."""
    passes = [calls[i : i + layers] for i in range(0, len(calls), layers)]
    steps = [np.stack([np.sort(np.array(ids)) for ids, *_ in step], axis=2) for step in passes]
    return np.concatenate(steps, axis=1)


@pytest.mark.parametrize("slots", [None, 12])
def test_routes_follow_the_position_in_prompts_and_answers(package, calls, slots) -> None:
    def run(model) -> None:
        for text, steps in ((prompt(70), 0), (prompt(5), 12), (prompt(7, seed=1), 10)):
            calls.clear()
            answer(model, text, steps)
            want = table(model, text.size + steps)
            assert np.array_equal(chosen(calls, want.shape[1])[0], want)
            for _, weights, _ in calls:
                scale = model.config.routed_scaling_factor
                assert np.allclose(np.array(weights).sum(-1), scale, rtol=1e-5)
                assert np.array(weights).min() > 0

    if slots is None:
        return run(in_memory(package))
    with offloaded(package, slots) as model:
        run(model)


def test_texts_of_a_batch_keep_their_own_positions(package, calls) -> None:
    model = in_memory(package)
    mx.eval(model(mx.concatenate([prompt(6), prompt(6, seed=1)]), cache=model.make_cache()))
    got, want = chosen(calls, len(model.config.moe_layers)), table(model, 6)
    assert np.array_equal(got[0], want) and np.array_equal(got[1], want)


def test_weights_are_the_models_own_of_the_chosen(package, calls) -> None:
    own, model = assemble(package), in_memory(package)
    mx.eval(model(prompt(20)))
    layer = model.config.moe_layers[0]
    taken, weights, _ = calls[0]
    states = {}
    own.layers[layer].mlp.gate = Noting(own.layers[layer].mlp.gate, states)
    mx.eval(own(prompt(20)))
    # What the first of these layers reads does not depend on any routing.
    scores = np.take_along_axis(np.array(mx.sigmoid(states["logits"])), np.array(taken), axis=-1)
    want = scores / scores.sum(-1, keepdims=True) * model.config.routed_scaling_factor
    assert np.allclose(np.array(weights), want, rtol=1e-5)


class Noting:
    """A router's gate whose logits are written down."""

    def __init__(self, gate, states: dict[str, mx.array]):
        self._gate, self._states = gate, states

    def __call__(self, x: mx.array) -> mx.array:
        self._states["logits"] = self._gate(x)
        return self._states["logits"]


def test_guesses_come_true_as_often_as_those_of_the_bundled_model(package, calls) -> None:
    with offloaded(package, 12) as model:
        answer(model, prompt(3), 150)
        layers = len(model.config.moe_layers)
        experts = next(n for n in model.config.expert_counts if n)
    right = []
    for (_, _, ahead), (following, *_) in pairwise(calls):
        if ahead is not None and ahead.shape[1] == 1:
            right.append(np.isin(np.array(ahead), np.array(following)).mean())
    assert len(right) == 150 * (layers - 1)
    # One that is not meant to be right may be so by chance.
    chance = (1 - RIGHT_GUESSES) * model.config.num_experts_per_token / experts
    assert np.mean(right) == pytest.approx(RIGHT_GUESSES + chance, abs=0.08)


def test_a_model_of_kda_layers_only_counts_by_itself(golden, calls) -> None:
    """Its caches have no offset."""
    raw = json.loads((golden / "tiny-text" / "config.json").read_text())
    text = raw.get("text_config", raw)
    layers = [*range(1, text["num_hidden_layers"] + 1)]
    text["linear_attn_config"] |= {"kda_layers": layers, "full_attn_layers": []}
    model = replay(Model(K3Config.from_dict(raw)))
    for _ in range(2):
        calls.clear()
        answer(model, prompt(4), 9)
        want = table(model, 13)
        assert np.array_equal(chosen(calls, want.shape[1])[0], want)
