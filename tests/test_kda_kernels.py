"""KDA's kernels against plain MLX ops: on the GPU, or their Metal text on the host runner."""

import json
import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from mlx_k3.config import K3Config
from mlx_k3.kernels import kda_log_decay, l2norm
from mlx_k3.kernels.build import using
from mlx_k3.kernels.kda import kda, plain_kda
from mlx_k3.kernels.kda_conv import kda_conv, kda_conv_reference
from mlx_k3.kernels.kda_decode import MOST_TOKENS, kda_decode, kda_decode_reference
from mlx_k3.models.kda import KimiDeltaAttention

from .support import cuda
from .support.measure import relative_error
from .support.metal import with_kernels

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Of the output's scale. In 16 bits the inputs' products round, too.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}

needs_nvcc = pytest.mark.skipif(not cuda.available(), reason="no nvcc here")


def layer_inputs(B, T, H, D, dtype=mx.float32, gate_scale=1.0):
    """What ``kda_decode`` takes, in its order."""
    mx.random.seed(0)

    def projection(*shape):
        return mx.random.normal(shape).astype(dtype)

    return (
        projection(B, T, 3 * H * D),
        projection(B, 3, 3 * H * D),
        0.5 * mx.random.normal((3 * H * D, 4)),
        gate_scale * projection(B, T, H * D),
        0.5 * mx.random.normal((H,)),
        mx.random.normal((H * D,)),
        projection(B, T, H),
        projection(B, T, H * D),
        mx.random.normal((D,)),
        mx.random.normal((B, H, D, D)),
    )


def assert_close(got, want, dtype) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert relative_error(x.astype(mx.float32), y.astype(mx.float32)) < TOLERANCE[dtype]


@pytest.mark.parametrize("T", [1, 2, 3, MOST_TOKENS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, bound", [(32, -5.0), (64, None), (128, -5.0)])
def test_decode(T, dtype, D, bound) -> None:
    inputs = layer_inputs(2, T, 2 if D < 128 else 1, D, dtype)
    want = kda_decode_reference(*inputs, lower_bound=bound, eps=1e-5)
    with with_kernels():
        got = kda_decode(*inputs, lower_bound=bound, eps=1e-5)
    assert_close(got, want, dtype)
    assert mx.array_equal(got[1], want[1])


@pytest.mark.parametrize("bound", [-5.0, None])
def test_decode_with_gates_at_their_ends(bound) -> None:
    """Channels that decay at the bound or by e^-100 a token, and others not at all."""
    inputs = layer_inputs(1, 3, 2, 32, gate_scale=40.0)
    want = kda_decode_reference(*inputs, lower_bound=bound, eps=1e-5)
    with with_kernels():
        assert_close(kda_decode(*inputs, lower_bound=bound, eps=1e-5), want, mx.float32)


def test_decode_in_one_call_or_token_by_token() -> None:
    inputs = layer_inputs(1, 3, 2, 32, mx.bfloat16)
    qkv, conv_state, conv_weight, a, A_log, dt_bias, b, g, o_norm, state = inputs
    outputs = []
    with with_kernels():
        want = kda_decode(*inputs, lower_bound=-5.0, eps=1e-5)
        for t in range(3):
            x, x_a, x_b, x_g = (z[:, t : t + 1] for z in (qkv, a, b, g))
            y, conv_state, state = kda_decode(
                *(x, conv_state, conv_weight, x_a, A_log, dt_bias, x_b, x_g, o_norm, state),
                lower_bound=-5.0,
                eps=1e-5,
            )
            outputs.append(y)
    assert mx.array_equal(mx.concatenate(outputs, axis=1), want[0])
    assert mx.array_equal(conv_state, want[1])
    assert mx.array_equal(state, want[2])


@pytest.mark.parametrize("T", [1, 3])
def test_decode_of_padded_rows(T) -> None:
    """Whatever padding on the left holds, a row's results are those of its real tokens."""
    inputs = layer_inputs(3, T, 2, 32)
    mask = mx.arange(T) >= mx.array([0, 1, T])[:, None]
    spoilt = list(inputs)
    for i in (0, 3, 6, 7):
        spoilt[i] = mx.where(mask[..., None], inputs[i], mx.nan)
    settings = {"lower_bound": -5.0, "eps": 1e-5, "mask": mask}
    want = kda_decode_reference(*inputs, **settings)
    with with_kernels():
        got = kda_decode(*spoilt, **settings)
    for results in (got, kda_decode_reference(*spoilt, **settings)):
        assert all(mx.isfinite(x).all() for x in results)
        real = (mx.where(mask[..., None], x, 0) for x in (results[0], want[0]))
        assert relative_error(*real) < 1e-5
        assert_close(results[1:], want[1:], mx.float32)
    # A row without any real token keeps its state.
    assert mx.array_equal(got[2][2], inputs[-1][2])


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


def kda_inputs(B, T, H, D, gates="random", dtype=mx.float32):
    mx.random.seed(0)
    q, k = (l2norm(mx.random.normal((B, T, H, D))) for _ in range(2))
    v = mx.random.normal((B, T, H, D))
    q, k, v = (x.astype(dtype) for x in (D**-0.5 * q, k, v))
    strengths = mx.random.uniform(shape=(B, T, H, D))
    log_decay = {
        "bound": mx.full((B, T, H, D), -5.0),
        "random": -5 * strengths,
        "weak": -0.01 * strengths,
        "stronger than any bound": -50 * strengths,
    }[gates]
    beta = mx.random.uniform(shape=(B, T, H))
    return q, k, v, log_decay, beta, mx.random.normal((B, H, D, D))


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


@pytest.fixture(params=["tiny-text", "tiny-kimi-linear"])
def layer(request, golden) -> KimiDeltaAttention:
    """A KDA layer with K3's full output gate, or with Kimi Linear's low-rank one."""
    config = K3Config.from_file(golden / request.param / "config.json")
    mx.random.seed(1)
    layer = KimiDeltaAttention(config)
    layer.update(tree_map(lambda x: 0.3 * mx.random.normal(x.shape), layer.parameters()))
    return layer


def test_layer_goes_on_with_few_tokens(layer) -> None:
    """Prompt, one token, three tokens: the same outputs and cache as in plain ops."""
    H = layer.qkv_proj.weight.shape[1]
    x = mx.random.normal((2, 24, H))

    def outputs():
        cache = ArraysCache(2, left_padding=[0, 4])
        steps = []
        for first, last in ((0, 20), (20, 21), (21, 24)):
            part = x[:, first:last]
            steps.append(layer(part, cache.make_mask(last - first), cache))
        y = mx.concatenate(steps, axis=1)
        return [mx.where((mx.arange(24) >= mx.array([[0], [4]]))[..., None], y, 0), *cache.cache]

    with using("reference"):
        want = outputs()
        mx.eval(want)
    with with_kernels():
        assert_close(outputs(), want, mx.float32)


def test_few_tokens_take_one_kernel(layer, monkeypatch) -> None:
    calls = []

    def counted(*inputs, **settings):
        calls.append(inputs[0].shape[1])
        return kda_decode(*inputs, **settings)

    monkeypatch.setattr("mlx_k3.models.kda.kda_decode", counted)
    x = mx.random.normal((1, 9, layer.qkv_proj.weight.shape[1]))
    with with_kernels():
        cache = ArraysCache(2)
        layer(x, None, cache)  # more than it takes
        layer(x[:, :8], None, cache)
        layer(x[:, :1], None, cache)
        layer(x[:, :1])  # no cache: perhaps training
    assert calls == [8, 1]


@needs_nvcc
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, D, bound, masked", [(1, 128, -5.0, False), (8, 64, None, True)])
def test_cuda_compiles_decode(dtype, T, D, bound, masked) -> None:
    inputs = layer_inputs(1, T, 1, D, dtype)
    mask = mx.ones((1, T), mx.bool_) if masked else None
    with cuda.compiling() as told:
        mx.eval(kda_decode(*inputs, lower_bound=bound, eps=1e-5, mask=mask))
    assert_no_spills(told, 1)


@needs_nvcc
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("D", [32, 64, 128])
def test_cuda_compiles_prefill(dtype, D) -> None:
    mask = mx.ones((1, 40), mx.bool_)
    qkv, weight = mx.zeros((1, 40, 3 * D), dtype), mx.zeros((3 * D, 4), dtype)
    with cuda.compiling() as told:
        mx.eval(kda(*kda_inputs(1, 40, 1, D, dtype=dtype), mask))
        mx.eval(kda_conv(qkv, weight, None, 1, mask))
    assert_no_spills(told, 3)


def assert_no_spills(told: list[str], kernels: int) -> None:
    assert len(told) == kernels
    for text in told:
        assert " 0 bytes stack frame" in text and " 0 bytes spill" in text
