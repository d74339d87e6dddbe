"""The operations against the golden cases and against each other."""

import json

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_k3.kernels import (
    attention_residual,
    kda,
    kda_log_decay,
    l2norm,
    quantized_matmul,
    route,
    short_conv,
    situ,
)
from mlx_k3.kernels.kda_reference import _fused_gate, kda_chunked, kda_step
from mlx_k3.kernels.quantized import expand

from .support.measure import relative_error


@pytest.fixture(scope="module")
def kda_cases(golden):
    cases = json.loads((golden / "kda/cases.json").read_text())["cases"]
    return cases, mx.load(str(golden / "kda/cases.safetensors"))


KDA_CASES = [
    *("d64_lb", "d64_lb_init", "d64_softplus", "d64_softplus_init"),
    *("d128_lb_init", "d128_softplus", "batch2", "extreme"),
]


@pytest.mark.parametrize("name", KDA_CASES)
def test_kda_matches_golden(kda_cases, name):
    cases, arrays = kda_cases
    case, tensors = cases[name], cases[name]["tensors"]
    q, k, v, g, beta = (
        arrays[tensors[x]][:, : case["T"]].astype(mx.float32) for x in ("q", "k", "v", "g", "beta")
    )
    D = case["D"]
    state = None
    if tensors["initial_state"]:
        state = arrays[tensors["initial_state"]].astype(mx.float32).swapaxes(-1, -2)
    log_decay = kda_log_decay(
        g,
        arrays[tensors["A_log"]],
        arrays[tensors["dt_bias"]].reshape(case["H"], D),
        case["lower_bound"],
    )
    inputs = l2norm(q) * D**-0.5, l2norm(k), v, log_decay, mx.sigmoid(beta)
    for T in sorted({case["T"], *case["states_at"]}):
        output, final = kda(*(x[:, :T] for x in inputs), state)
        assert relative_error(output, arrays[f"case.{name}.o"][:, :T]) < 1e-5
        if T in case["states_at"]:
            want = arrays[f"case.{name}.state_T{T}"]
            assert relative_error(final.swapaxes(-1, -2), want) < 1e-5


@pytest.mark.parametrize("bound", [-5.0, None])
def test_gate_matches_golden(golden, bound):
    arrays = mx.load(str(golden / "kda/cases.safetensors"))
    x, A_log = arrays["gate.x"], arrays["gate.A_log"]
    # x holds a + dt_bias already; the grid is [x, A_log].
    got = kda_log_decay(
        mx.broadcast_to(x[:, None, None], (len(x), len(A_log), 1)),
        A_log,
        mx.zeros((len(A_log), 1)),
        bound,
    )[..., 0]
    want = arrays["gate.softplus" if bound is None else "gate.lower_bound_-5"]
    assert relative_error(got, want) < 1e-5


def random_kda_inputs(B, T, H, D, gates, seed=0):
    mx.random.seed(seed)
    q, k = (l2norm(mx.random.normal((B, T, H, D))) for _ in range(2))
    v = mx.random.normal((B, T, H, D))
    beta = mx.random.uniform(shape=(B, T, H))
    log_decay = {
        "bound": lambda: mx.full((B, T, H, D), -5.0),
        "random": lambda: -5 * mx.random.uniform(shape=(B, T, H, D)),
        "weak": lambda: -0.01 * mx.random.uniform(shape=(B, T, H, D)),
        "stronger than any bound": lambda: -50 * mx.random.uniform(shape=(B, T, H, D)),
    }[gates]()
    state = mx.random.normal((B, H, D, D))
    return q, k, v, log_decay, beta, state


def recurrence(q, k, v, log_decay, beta, state):
    outputs = []
    for t in range(q.shape[1]):
        output, state = kda_step(*(x[:, t] for x in (q, k, v, log_decay, beta)), state)
        outputs.append(output)
        if t % 128 == 0:
            mx.eval(output, state)
    return mx.stack(outputs, axis=1), state


@pytest.mark.parametrize("gates", ["bound", "random", "weak", "stronger than any bound"])
@pytest.mark.parametrize("T", [2, 3, 16, 17, 63, 64, 65, 200, 1000, 4096])
def test_chunked_kda_equals_the_recurrence(T, gates):
    inputs = random_kda_inputs(1 if T > 500 else 2, T, 2, 64, gates)
    output, state = kda_chunked(*inputs)
    want_output, want_state = recurrence(*inputs)
    assert relative_error(output, want_output) < 1e-5
    assert relative_error(state, want_state) < 1e-5


def test_long_input_in_segments_is_the_same(monkeypatch):
    inputs = random_kda_inputs(2, 300, 2, 32, "random")
    whole = kda_chunked(*inputs)
    monkeypatch.setattr("mlx_k3.kernels.kda_reference.SCRATCH_BYTES", 1)
    for got, want in zip(kda_chunked(*inputs), whole, strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("T", [1, 7, 130])
def test_masked_tokens_leave_the_state_alone(T):
    q, k, v, log_decay, beta, state = random_kda_inputs(1, T, 2, 32, "random")

    def pad(x, left, right):
        nan = [mx.full((1, n, *x.shape[2:]), mx.nan) for n in (left, right)]
        return mx.concatenate([nan[0], x, nan[1]], axis=1)

    want_output, want_state = kda(q, k, v, log_decay, beta, state)
    for left, right in ((5, 0), (0, 9), (64, 3)):
        mask = (mx.arange(left + T + right) >= left) & (mx.arange(left + T + right) < left + T)
        padded = (pad(x, left, right) for x in (q, k, v, log_decay, beta))
        output, got_state = kda(*padded, state, mask[None])
        assert relative_error(output[:, left : left + T], want_output) < 1e-5
        assert relative_error(got_state, want_state) < 1e-5
        assert mx.isfinite(output).all()


def test_gradients_flow_through_the_chunked_form():
    inputs = random_kda_inputs(1, 70, 1, 32, "random")

    def loss(form):
        def f(*inputs):
            output, state = form(*inputs)
            return mx.sin(output).sum() + (state * state).sum()

        return mx.grad(f, argnums=tuple(range(6)))

    for got, want in zip(loss(kda_chunked)(*inputs), loss(recurrence)(*inputs), strict=True):
        assert relative_error(got, want) < 1e-4


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_gate_in_one_pass_is_the_same(bound):
    """What a GPU takes, over lengths and dtypes, and its gradient."""
    mx.random.seed(0)
    A_log, dt_bias = mx.random.normal((3,)), mx.random.normal((3, 32))
    fused = _fused_gate(bound)
    for T, dtype in ((1, mx.float32), (7, mx.bfloat16), (7, mx.float32), (40, mx.float32)):
        a = (20 * mx.random.normal((2, T, 3, 32))).astype(dtype)
        got, want = fused(a, A_log[:, None], dt_bias), kda_log_decay(a, A_log, dt_bias, bound)
        assert got.dtype == mx.float32 and relative_error(got, want) < 1e-6

    def loss(gate):
        return mx.grad(lambda a, rate, bias: mx.sin(gate(a, rate, bias)).sum(), argnums=(0, 1, 2))

    got = loss(lambda a, rate, bias: fused(a, rate[:, None], bias))(a, A_log, dt_bias)
    want = loss(lambda a, rate, bias: kda_log_decay(a, rate, bias, bound))(a, A_log, dt_bias)
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < 1e-5


def test_short_conv_continues_and_masks():
    mx.random.seed(0)
    x, weight = mx.random.normal((2, 20, 6)), mx.random.normal((6, 4))
    y, state = short_conv(x, weight)
    # The convolution as numpy's, channel by channel; the last tap is the current token's.
    for c in range(6):
        want = np.convolve(np.array(x[1, :, c]), np.array(weight[c])[::-1])[:20]
        assert np.allclose(y[1, :, c], want / (1 + np.exp(-want)), atol=1e-5)
    assert mx.array_equal(state, x[:, -3:])

    first, middle = short_conv(x[:, :2], weight)
    second, last = short_conv(x[:, 2:], weight, middle)
    assert mx.allclose(mx.concatenate([first, second], axis=1), y, atol=1e-6)
    assert mx.array_equal(last, state)

    # A row of 12 real tokens, padded right with NaN: its state ends at its last real token.
    padded = mx.concatenate([x[:1, :12], mx.full((1, 8, 6), mx.nan)], axis=1)
    mask = (mx.arange(20) < 12)[None]
    got, got_state = short_conv(padded, weight, mask=mask, lengths=mx.array([12]))
    assert mx.allclose(got[:, :12], y[:1, :12], atol=1e-6)
    assert mx.array_equal(got_state, x[:1, 9:12])


@pytest.mark.parametrize(
    "variant", ["sigmoid", "sigmoid_scaled", "sigmoid_no_renorm", "groups_4_top2", "softmax"]
)
def test_router_matches_golden(golden, variant):
    arrays = mx.load(str(golden / "ops/cases.safetensors"))
    how = json.loads((golden / "ops/cases.json").read_text())["router"][variant]
    indices, weights = route(
        arrays["router.x"] @ arrays["router.weight"].T,
        arrays["router.bias"],
        how["num_experts_per_token"],
        activation=how["moe_router_activation_func"],
        renormalize=how["moe_renormalize"],
        scale=how["routed_scaling_factor"],
        n_group=how["num_expert_group"],
        topk_group=how["topk_group"],
    )
    order = mx.argsort(indices, axis=-1)
    got = mx.take_along_axis(indices, order, axis=-1)
    assert mx.array_equal(got, arrays[f"router.{variant}.topk_idx"])
    got = mx.take_along_axis(weights, order, axis=-1)
    assert relative_error(got, arrays[f"router.{variant}.topk_weight"]) < 1e-6


@pytest.mark.parametrize("name, beta, linear", [("b4_l25", 4, 25), ("b4_none", 4, None)])
def test_situ_matches_golden(golden, name, beta, linear):
    arrays = mx.load(str(golden / "ops/cases.safetensors"))
    got = situ(arrays["situ.gate"], arrays["situ.up"], float(beta), linear and float(linear))
    assert relative_error(got, arrays[f"situ.{name}"]) < 1e-6


@pytest.mark.parametrize("M", [1, 3])
def test_attention_residual_matches_golden(golden, M):
    arrays = mx.load(str(golden / "ops/cases.safetensors"))
    case = {k: arrays[f"attnres.{M}.{k}"] for k in ("blocks", "prefix_sum", "out")}
    weight = arrays[f"attnres.{M}.norm_weight"] * arrays[f"attnres.{M}.proj_weight"][0]
    candidates = mx.concatenate([case["blocks"], case["prefix_sum"][:, None]], axis=1)
    got = attention_residual(candidates, weight, 1e-5)
    assert relative_error(got, case["out"]) < 1e-6


def test_mlx_reads_the_release_s_mxfp4_bytes(golden):
    arrays = load_file(golden / "mxfp4/cases.safetensors")
    for case in ("bytes", "weight", "all"):
        packed, scale = arrays[f"{case}.packed"], arrays[f"{case}.scale"]
        packed = mx.array(packed).view(mx.uint32)
        got = mx.dequantize(
            packed, mx.array(scale), group_size=32, bits=4, mode="mxfp4", dtype=mx.float32
        )
        got, want = np.array(got), arrays[f"{case}.value_f32"]
        # Scale byte 255 is NaN to the specification and does not occur; MLX makes it infinite.
        rows = scale.max(-1) < 255
        np.testing.assert_array_equal(got[rows], want[rows])
        got = expand(packed, mx.array(scale), None, mx.float32, group_size=32, bits=4, mode="mxfp4")
        np.testing.assert_array_equal(np.array(got)[rows], want[rows])


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 64])
@pytest.mark.parametrize("mode, bits, group", [("mxfp4", 4, 32), ("affine", 8, 64)])
def test_quantized_matmul_is_one_product_at_any_row_count(rows, mode, bits, group):
    mx.random.seed(0)
    x = mx.random.normal((rows, 128))
    packed = mx.quantize(mx.random.normal((96, 128)), group_size=group, bits=bits, mode=mode)
    weight, scales, biases = (*packed, None)[:3]
    how = {"group_size": group, "bits": bits, "mode": mode}
    got = quantized_matmul(x, weight, scales, biases, **how)
    dense = mx.dequantize(weight, scales, biases, **how).astype(mx.float32)
    assert got.dtype == x.dtype
    assert relative_error(got, x @ dense.T) < 1e-6
