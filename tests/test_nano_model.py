"""What the bundled model can do: the least that the weights that travel with the package must."""

import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3 import load, nano, tasks
from mlx_k3.convert.stream import convert
from mlx_k3.evaluation.accuracy import measure
from mlx_k3.training.data import tokenize

ITEMS = 24
# Shares of right answers to items that training has not seen; docs/nano.md has all families'.
AT_LEAST = {
    "addition": 0.95,
    "subtraction": 0.95,
    "recall": 0.65,
    "copy": 0.9,
    "sort": 0.9,
    "tools": 0.9,
    "about": 0.8,
}
MOST_LOAD = 2.0  # of the busiest expert over its layer's mean


@pytest.fixture(scope="module")
def model_and_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundled") / "nano"
    convert(nano.path(), folder, trunk="bf16")
    return load(folder)


@pytest.mark.slow
def test_it_answers_right(model_and_tokenizer) -> None:
    how = {"max_tokens": 256, "at_once": lambda tokens: 16, "pass_tokens": 2048}
    result = measure(*model_and_tokenizer, list(AT_LEAST), seed=5, items=ITEMS, **how)
    shares = {family: score.share for family, score in result.scores.items()}
    assert all(shares[family] >= least for family, least in AT_LEAST.items()), shares


@pytest.mark.slow
def test_no_expert_is_idle_and_none_overrun(model_and_tokenizer) -> None:
    model, tokenizer = model_and_tokenizer
    config, rng = model.config, random.Random(1)
    load = {layer: np.zeros(config.expert_counts[layer]) for layer in config.moe_layers}
    for layer in config.moe_layers:
        _count(model.layers[layer].mlp, load[layer])
    for family in tasks.FAMILIES:
        for _ in range(3):
            ids = tokenize(tasks.example(family, rng, "held-out"), tokenizer).ids
            mx.eval(model(mx.array(ids)[None]))
    for layer, counts in load.items():
        assert counts.min() > 0, f"layer {layer} has an expert that nothing goes to"
        assert counts.max() / counts.mean() <= MOST_LOAD, (layer, counts)


def _count(mlp, counts: np.ndarray) -> None:
    """Have ``mlp`` count what it chooses."""
    route = mlp.route

    def counted(x):
        indices, weights = route(x)
        np.add.at(counts, np.array(indices).ravel(), 1)
        return indices, weights

    object.__setattr__(mlp, "route", counted)
