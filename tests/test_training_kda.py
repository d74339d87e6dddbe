"""KDA for training against the operation the model runs with: outputs and every gradient."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_k3.config import K3Config
from mlx_k3.kernels import kda, l2norm
from mlx_k3.training.initialize import new_model
from mlx_k3.training.kda import STRONGEST, bounded_kda

from .support.measure import relative_error

B, H, K, V = 2, 2, 32, 48
NAMES = ("q", "k", "v", "log_decay", "beta")
GATES = {
    "any": lambda x: STRONGEST * mx.sigmoid(3 * x),
    "near the bound": lambda x: STRONGEST * mx.sigmoid(4 + x),
    "at the bound": lambda x: mx.full(x.shape, STRONGEST),
    "almost none": lambda x: -1e-4 * mx.sigmoid(x),
}


def inputs(T: int, gate: str) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(T), 5)
    shapes = [(B, T, H, D) for D in (K, K, V, K)] + [(B, T, H)]
    q, k, v, x, b = (mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=True))
    return [l2norm(q) * K**-0.5, l2norm(k), v, GATES[gate](x), mx.sigmoid(b)]


def assert_equal(arguments: list[mx.array]) -> None:
    """Outputs and gradients of both, towards a random direction."""
    towards = mx.random.normal(arguments[2].shape, key=mx.random.key(7))

    def along(recurrence):
        def run(*arguments):
            output = recurrence(*arguments)[0]
            return (output * towards).sum(), output

        (_, output), gradients = mx.value_and_grad(run, argnums=range(5))(*arguments)
        return output, dict(zip(NAMES, gradients, strict=True))

    (output, got), (expected, want) = along(bounded_kda), along(kda)
    assert relative_error(output, expected) < 1e-5
    # A decay's gradient is the difference of what tokens before and after it give, of this size.
    q, k = arguments[:2]
    size = max(mx.abs(x).max().item() for x in (want["log_decay"], q * want["q"], k * want["k"]))
    assert mx.abs(got.pop("log_decay") - want["log_decay"]).max().item() < 1e-5 * size
    for name, gradient in got.items():
        assert relative_error(gradient, want[name]) < 1e-5, name


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 64, 100, 512])
@pytest.mark.parametrize("gate", GATES)
def test_it_is_the_models_recurrence(gate: str, T: int) -> None:
    assert_equal(inputs(T, gate))


@pytest.mark.parametrize("T", [33, 512])
def test_keys_that_repeat_are_unlearned_exactly(T: int) -> None:
    """The inverse within a chunk is largest where every key meets itself again, undecayed."""
    q, k, v, log_decay, beta = inputs(T, "almost none")
    same = mx.broadcast_to(k[:, :1], k.shape)
    assert_equal([q, same, v, log_decay, 1 - 1e-3 * beta])


@pytest.mark.parametrize("gate", ["any", "at the bound"])
def test_a_token_sees_no_later_one_and_no_other_row(gate: str) -> None:
    arguments = inputs(80, gate)
    output, state = bounded_kda(*arguments)
    changed = [mx.concatenate([x[:, :50], x[:, 50:] * 0.5], axis=1) for x in arguments]
    assert mx.array_equal(bounded_kda(*changed)[0][:, :50], output[:, :50])
    alone = bounded_kda(*(x[:1] for x in arguments))[0]
    assert relative_error(alone, output[:1]) < 1e-6
    assert state is None and output.dtype == mx.float32


def test_half_precision_inputs_are_computed_in_float32() -> None:
    halves = [x.astype(mx.bfloat16) for x in inputs(70, "any")]
    output = bounded_kda(*halves)[0]
    assert output.dtype == mx.float32
    assert relative_error(output, kda(*halves)[0]) < 1e-5


@pytest.mark.parametrize(
    ("bound", "used"), [(-5.0, bounded_kda), (-1.0, bounded_kda), (-5.5, kda), (None, kda)]
)
def test_a_model_trains_with_it_where_its_gates_are_bounded(golden, bound, used) -> None:
    config = replace(K3Config.from_file(golden / "tiny-text"), gate_lower_bound=bound)
    model = new_model(config, seed=0)
    assert len(config.kda_layers) == 3
    for layer in config.kda_layers:
        assert model.layers[layer].self_attn.recurrence is used
