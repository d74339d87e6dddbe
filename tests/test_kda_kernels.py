"""KDA's kernels for prompts against plain MLX ops: on the GPU, or on the host runner."""

import json
import sys

import mlx.core as mx
import pytest

from mlx_k3.kernels import kda_log_decay, l2norm
from mlx_k3.kernels.kda import kda, plain_kda
from mlx_k3.kernels.kda_conv import kda_conv, kda_conv_reference

from .support import cuda
from .support.kda import DTYPES, TOLERANCE, assert_close, assert_no_spills, kda_inputs
from .support.measure import relative_error
from .support.metal import with_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, D", [(1, 32), (2, 64), (3, 32), (40, 128), (65, 32)])
def test_conv(dtype, T, D) -> None:
    mx.random.seed(0)
    qkv, state = (mx.random.normal((2, n, 3 * 2 * D)).astype(dtype) for n in (T, 3))
    weight = 0.5 * mx.random.normal((3 * 2 * D, 4))
    *want, want_state = kda_conv_reference(qkv, weight, state, 2)
    with with_kernels():
        *got, got_state = kda_conv(qkv, weight, state, 2)
        without = kda_conv(qkv, weight, None, 2)
    assert_close(got, [x.astype(dtype) for x in want], dtype)
    assert mx.array_equal(got_state, want_state)
    want = kda_conv_reference(qkv, weight, mx.zeros_like(state), 2)
    assert_close(without, [x.astype(dtype) for x in want], dtype)


@pytest.mark.parametrize("T", [2, 70])
def test_conv_of_padded_rows(T) -> None:
    """Padding left and right holds NaN; a row's state ends at its last real token."""
    mx.random.seed(0)
    qkv, state = mx.random.normal((3, T, 3 * 32)), mx.random.normal((3, 3, 3 * 32))
    weight = mx.random.normal((3 * 32, 4))
    first, lengths = mx.array([0, T // 2, T]), mx.array([T, T, T])
    for start, end in ((first, lengths), (mx.array([0, 0, 0]), mx.array([T, T // 2, 0]))):
        position = mx.arange(T)
        mask = (position >= start[:, None]) & (position < end[:, None])
        qkv = mx.where(mask[..., None], qkv, mx.nan)
        given = None if start is first else end
        want = kda_conv_reference(qkv, weight, state, 1, mask, given)
        with with_kernels():
            got = kda_conv(qkv, weight, state, 1, mask, given)
        assert_close(got, want, mx.float32)
        qkv = mx.random.normal(qkv.shape)


def test_gradients_of_the_convolution() -> None:
    mx.random.seed(0)
    inputs = mx.random.normal((1, 9, 3 * 32)), mx.random.normal((3 * 32, 4))

    def loss(form):
        def f(qkv, weight):
            q, k, v, state = form(qkv, weight, None, 1)
            return mx.sin(q).sum() + (k * k[:, ::-1]).sum() + (v * v).sum() + state.sum()

        return mx.grad(f, argnums=(0, 1))(*inputs)

    with with_kernels():
        got = loss(kda_conv)
    assert_close(got, loss(kda_conv_reference), mx.float32)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_prefill(T) -> None:
    inputs = kda_inputs(2 if T < 1000 else 1, T, 2, 32)
    with with_kernels():
        got = kda(*inputs)
    assert_close(got, plain_kda(*inputs), mx.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [32, 64, 128])
def test_prefill_of_every_width_and_dtype(D, dtype) -> None:
    inputs = kda_inputs(1, 65, 1, D, dtype=dtype)
    with with_kernels():
        got = kda(*inputs)
    assert_close(got, plain_kda(*inputs), dtype)


@pytest.mark.parametrize("gates", ["bound", "weak", "stronger than any bound"])
def test_prefill_with_gates(gates) -> None:
    inputs = kda_inputs(1, 100, 2, 32, gates)
    with with_kernels():
        got = kda(*inputs)
    assert_close(got, plain_kda(*inputs), mx.float32)


def test_prefill_without_a_state() -> None:
    *inputs, state = kda_inputs(1, 40, 2, 32)
    with with_kernels():
        got = kda(*inputs)
    assert_close(got, plain_kda(*inputs, mx.zeros_like(state)), mx.float32)


def test_prefill_of_padded_rows() -> None:
    *inputs, state = kda_inputs(3, 70, 2, 32)
    position = mx.arange(70)
    mask = (position >= mx.array([0, 33, 5])[:, None]) & (
        position < mx.array([70, 70, 40])[:, None]
    )
    spoilt = [mx.where(mask.reshape(3, 70, *[1] * (x.ndim - 2)), x, mx.nan) for x in inputs]
    with with_kernels():
        output, final = kda(*spoilt, state, mask)
    want_output, want_final = plain_kda(*inputs, state, mask)
    assert mx.isfinite(output).all()
    output, want_output = (mx.where(mask[..., None, None], x, 0) for x in (output, want_output))
    assert_close((output, final), (want_output, want_final), mx.float32)


def test_prefill_in_segments_is_the_same(monkeypatch) -> None:
    inputs = kda_inputs(1, 100, 2, 32)
    with with_kernels():
        whole = kda(*inputs)
        monkeypatch.setattr(sys.modules[kda.__module__], "SCRATCH_BYTES", 1)
        parts = kda(*inputs)
    for got, want in zip(parts, whole, strict=True):
        assert mx.array_equal(got, want)


def test_other_widths_take_the_plain_ops() -> None:
    inputs = kda_inputs(1, 10, 2, 48)
    with with_kernels():
        got = kda(*inputs)
    for x, y in zip(got, plain_kda(*inputs), strict=True):
        assert mx.array_equal(x, y)


def test_gradients_are_those_of_the_plain_ops() -> None:
    inputs = kda_inputs(1, 40, 1, 32)

    def loss(form):
        def f(*inputs):
            output, state = form(*inputs)
            return mx.sin(output).sum() + (state * state).sum()

        return mx.grad(f, argnums=tuple(range(6)))(*inputs)

    with with_kernels():
        got = loss(kda)
    assert_close(got, loss(plain_kda), mx.float32)


GOLDEN = [
    *("d64_lb", "d64_lb_init", "d64_softplus", "d64_softplus_init"),
    *("d128_lb_init", "d128_softplus", "batch2", "extreme"),
]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_prefill_matches_golden(golden, name, dtype) -> None:
    case = json.loads((golden / "kda/cases.json").read_text())["cases"][name]
    arrays = mx.load(str(golden / "kda/cases.safetensors"))
    H, D, T, tensors = case["H"], case["D"], case["T"], case["tensors"]
    q, k, v, a, beta = (
        arrays[tensors[x]][:, :T].astype(mx.float32) for x in ("q", "k", "v", "g", "beta")
    )
    state = None
    if tensors["initial_state"]:
        state = arrays[tensors["initial_state"]].astype(mx.float32).swapaxes(-1, -2)
    dt_bias = arrays[tensors["dt_bias"]].reshape(H, D)
    inputs = (
        *(x.astype(dtype) for x in (l2norm(q) * D**-0.5, l2norm(k), v)),
        kda_log_decay(a, arrays[tensors["A_log"]], dt_bias, case["lower_bound"]),
        mx.sigmoid(beta),
    )
    for tokens in sorted({T, *case["states_at"]}):
        with with_kernels():
            output, final = kda(*(x[:, :tokens] for x in inputs), state)
        assert relative_error(output, arrays[f"case.{name}.o"][:, :tokens]) < TOLERANCE[dtype]
        if tokens in case["states_at"]:
            want = arrays[f"case.{name}.state_T{tokens}"].swapaxes(-1, -2)
            assert relative_error(final, want) < TOLERANCE[dtype]


@pytest.mark.skipif(not cuda.available(), reason="no nvcc here")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("D", [32, 64, 128])
def test_cuda_compiles_prefill(dtype, D) -> None:
    mask = mx.ones((1, 40), mx.bool_)
    qkv, weight = mx.zeros((1, 40, 3 * D), dtype), mx.zeros((3 * D, 4), dtype)
    with cuda.compiling() as told:
        mx.eval(kda(*kda_inputs(1, 40, 1, D, dtype=dtype), mask))
        mx.eval(kda_conv(qkv, weight, None, 1, mask))
    assert_no_spills(told, 3)
