"""KDA's layer for a few tokens in one kernel, on the GPU or the host runner, against plain ops."""

import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from mlx_k3.config import K3Config
from mlx_k3.kernels import using
from mlx_k3.kernels.kda_decode import MOST_TOKENS, kda_decode, kda_decode_reference
from mlx_k3.models.kda import KimiDeltaAttention

from .support import cuda
from .support.kda import DTYPES, assert_close, assert_no_spills, layer_inputs
from .support.measure import relative_error
from .support.metal import with_kernels


@pytest.mark.parametrize(
    "dtype, D, bound, T",
    [
        *((mx.float32, 32, -5.0, T) for T in (1, 2, 3, MOST_TOKENS)),
        *((mx.float32, 64, None, T) for T in (1, MOST_TOKENS)),
        *((mx.float32, 128, -5.0, T) for T in (1, MOST_TOKENS)),
        *((dtype, D, -5.0, 2) for dtype in DTYPES[1:] for D in (32, 64, 128)),
    ],
)
def test_decode(dtype, D, bound, T) -> None:
    inputs = layer_inputs(2, T, 2 if D < 128 else 1, D, dtype)
    want = kda_decode_reference(*inputs, lower_bound=bound, eps=1e-5)
    with with_kernels():
        got = kda_decode(*inputs, lower_bound=bound, eps=1e-5)
    assert_close(got, want, dtype)
    assert mx.array_equal(got[1], want[1])


@pytest.mark.parametrize("D, T", [(32, 1), (64, 3), (128, 1), (128, 2)])
def test_small_groups_compute_the_same(D, T, monkeypatch) -> None:
    inputs = layer_inputs(2, T, 1, D, mx.bfloat16)
    with with_kernels():
        want = kda_decode(*inputs, lower_bound=-5.0, eps=1e-5)
        monkeypatch.setattr(sys.modules[kda_decode.__module__], "FEW_GROUPS", 0)
        got = kda_decode(*inputs, lower_bound=-5.0, eps=1e-5)
    assert all(mx.array_equal(x, y) for x, y in zip(got, want, strict=True))


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


@pytest.mark.skipif(not cuda.available(), reason="no nvcc here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, D, bound, masked", [(1, 128, -5.0, False), (8, 64, None, True)])
def test_cuda_compiles_decode(dtype, T, D, bound, masked, monkeypatch) -> None:
    inputs = layer_inputs(1, T, 1, D, dtype)
    mask = mx.ones((1, T), mx.bool_) if masked else None
    with cuda.compiling() as told:
        mx.eval(kda_decode(*inputs, lower_bound=bound, eps=1e-5, mask=mask))
        monkeypatch.setattr(sys.modules[kda_decode.__module__], "FEW_GROUPS", 0)
        mx.eval(kda_decode(*inputs, lower_bound=bound, eps=1e-5, mask=mask))
    assert_no_spills(told, 2)
