"""The router's bias: numpy's quantiles, balance reached, and reached sooner than by signs."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.kernels import route
from mlx_k3.training.balancing import expert_load, max_over_mean, quantile_bias, sign_bias

E, TOP_K = 32, 4


def skewed_scores(tokens: int, seed: int) -> mx.array:
    """Router scores of which some experts are liked far more than others."""
    liking = np.random.default_rng(99).normal(scale=1.5, size=E)
    noise = np.random.default_rng(seed).normal(size=(tokens, E))
    return mx.array(1 / (1 + np.exp(-liking - noise)), mx.float32)


def imbalance(scores: mx.array, bias: mx.array) -> float:
    return max_over_mean(expert_load(scores, bias, TOP_K)).item()


def reference_bias(scores: np.ndarray, bias: np.ndarray, top_k: int, rounds: int) -> np.ndarray:
    """The rule token by token and expert by expert, by partitions."""
    N, experts = scores.shape

    def between(values: np.ndarray, n: int) -> float:
        place = len(values) - n
        parted = np.partition(values, [place - 1, place])
        return (parted[place - 1] + parted[place]) / 2

    for _ in range(rounds):
        prices = [between(row + bias, top_k) for row in scores]
        share = max(round(N * top_k / experts), 1)
        bias = np.array([-between(scores[:, j] - prices, share) for j in range(experts)])
    return bias - bias.mean()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(64, 8, 2), (37, 5, 3), (9, 32, 1)])
@pytest.mark.parametrize("rounds", [1, 3])
def test_equals_the_rule_in_numpy(tokens: int, experts: int, top_k: int, rounds: int) -> None:
    rng = np.random.default_rng(tokens)
    scores, bias = rng.random((tokens, experts)), rng.normal(scale=0.1, size=experts)
    expected = reference_bias(scores, bias, top_k, rounds)
    given = (mx.array(x, mx.float32) for x in (scores, bias))
    np.testing.assert_allclose(quantile_bias(*given, top_k, rounds), expected, atol=1e-6)


def test_one_expert_takes_exactly_its_share_of_tokens_at_their_prices() -> None:
    """With all tokens' thresholds equal the bias is the plain quantile of an expert's scores."""
    rng = np.random.default_rng(0)
    scores = rng.random((1000, 4))
    scores[:, 2:] = [10, -10]  # One is always first, one always last.
    bias = np.array(quantile_bias(mx.array(scores, mx.float32), mx.zeros(4), 2))
    first = scores[:, 0] + bias[0] > scores[:, 1] + bias[1]
    assert bias[2] < bias[0] < bias[3]
    assert abs(first.mean() - 0.5) < 0.02


def test_balances_what_it_saw_and_what_it_did_not() -> None:
    seen, fresh = skewed_scores(16384, seed=1), skewed_scores(16384, seed=2)
    before = imbalance(seen, mx.zeros(E))
    bias = quantile_bias(seen, mx.zeros(E), TOP_K, rounds=6)
    assert before > 3
    assert imbalance(seen, bias) <= 1.03
    assert imbalance(fresh, bias) <= 1.1


def test_signs_need_far_more_steps() -> None:
    def steps(update) -> int:
        bias = mx.zeros(E)
        for step in range(1000):
            scores = skewed_scores(2048, seed=step)
            if imbalance(held_out, bias) <= 1.15:
                return step
            bias = update(scores, bias)
        raise AssertionError("never balanced")

    held_out = skewed_scores(16384, seed=5000)
    by_quantiles = steps(lambda s, b: 0.5 * b + 0.5 * quantile_bias(s, b, TOP_K))
    by_signs = steps(lambda s, b: sign_bias(expert_load(s, b, TOP_K), b, rate=0.001))
    assert by_quantiles <= 15
    assert by_signs >= 10 * by_quantiles


def test_signs_move_by_the_rate() -> None:
    load, bias = mx.array([0.5, 1.5, 1.0, 1.0]), mx.array([0.0, 0.0, 0.25, -0.25])
    assert sign_bias(load, bias, 0.125).tolist() == [0.125, -0.125, 0.25, -0.25]


def test_padding_does_not_count() -> None:
    scores = skewed_scores(512, seed=1)
    padded = mx.concatenate([mx.full((77, E), mx.nan), scores, mx.ones((100, E))])
    mask = mx.array([False] * 77 + [True] * 512 + [False] * 100)
    start = 0.01 * mx.arange(E)
    without = quantile_bias(scores, start, TOP_K, 2)
    assert mx.array_equal(quantile_bias(padded, start, TOP_K, 2, mask), without)
    padded = mx.where(mask[:, None], padded, 0.5)
    load = expert_load(padded, without, TOP_K, mask)
    assert mx.allclose(load, expert_load(scores, without, TOP_K)).item()


def test_layers_side_by_side_are_layers_one_by_one() -> None:
    layers = mx.stack([skewed_scores(300, seed) for seed in range(3)])
    start = mx.random.normal((3, E), key=mx.random.key(0))
    together = quantile_bias(layers, start, TOP_K, 2)
    for scores, bias, result in zip(layers, start, together, strict=True):
        assert mx.array_equal(quantile_bias(scores, bias, TOP_K, 2), result)


def test_compiled_it_is_the_same() -> None:
    scores, mask = skewed_scores(300, seed=3), mx.arange(300) < 250
    compiled = mx.compile(lambda s, b, m: quantile_bias(s, b, TOP_K, 2, m))
    expected = quantile_bias(scores, mx.zeros(E), TOP_K, 2, mask)
    assert mx.allclose(compiled(scores, mx.zeros(E), mask), expected, atol=1e-6).item()


def test_the_load_is_what_the_router_chooses_and_the_bias_changes_no_weight() -> None:
    logits = mx.random.normal((200, E), key=mx.random.key(1))
    scores = mx.sigmoid(logits)
    bias = quantile_bias(scores, mx.zeros(E), TOP_K, 3)
    indices, weights = route(logits, bias, TOP_K, renormalize=False)
    counts = np.bincount(np.array(indices).ravel(), minlength=E)
    np.testing.assert_allclose(expert_load(scores, bias, TOP_K), counts / 200, atol=1e-6)
    assert mx.array_equal(weights, mx.take_along_axis(scores, indices, axis=-1))
    assert not mx.array_equal(indices, route(logits, mx.zeros(E), TOP_K)[0])


def test_no_gradient_comes_through_the_bias() -> None:
    gradient = mx.grad(lambda s: quantile_bias(s, mx.zeros(E), TOP_K).square().sum())
    assert not mx.any(gradient(skewed_scores(64, seed=0))).item()
