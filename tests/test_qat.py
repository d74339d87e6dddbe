"""MXFP4 and MXFP8 rounding: the specification's rule, the release's bytes, straight gradients."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.checkpoint.mxfp4 import VALUES, decode
from mlx_k3.errors import UnsupportedError
from mlx_k3.kernels.mxfp8 import mxfp8_round
from mlx_k3.training.qat import mxfp4_fake_quantize, mxfp4_pack

MODE = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
# In units of a group's scale: every code's value, every tie, and both sides of each.
POINTS = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7], np.float32)
TIES = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
LAST_SCALE = 252  # of a finite float32: 2^(254 - 127) has exponent bits 254


def weights(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Groups of very different sizes."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-40, 40, size=(*shape[:-1], shape[-1] // 32, 1)))
    groups = rng.normal(size=(*shape[:-1], shape[-1] // 32, 32)) * scale
    return groups.reshape(shape).astype(np.float32)


def same_bits(a: mx.array | np.ndarray, b: mx.array | np.ndarray) -> bool:
    return np.array_equal(np.array(a).view(np.uint32), np.array(b).view(np.uint32))


def reference(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[..., in]`` and scale bytes by comparing with every value of the format."""
    groups = w.reshape(*w.shape[:-1], -1, 32).astype(np.float64)
    _, exponent = np.frexp(np.abs(groups).max(-1))  # largest = mantissa * 2^exponent, from 1/2 on
    scales = np.maximum(exponent - 1 - 2 + 127, 0)
    sizes = np.abs(groups) / np.exp2(scales - 127.0)[..., None]
    distances = np.abs(sizes[..., None] - VALUES[:8])
    nearest = distances == distances.min(-1, keepdims=True)
    even_first = [0, 2, 4, 6, 1, 3, 5, 7]
    codes = np.take(even_first, nearest[..., even_first].argmax(-1))
    return (codes + 8 * np.signbit(groups)).reshape(w.shape), scales


@pytest.mark.parametrize("shape", [(32,), (3, 64), (4, 5, 96)])
def test_bytes_are_the_specifications(shape: tuple[int, ...]) -> None:
    w = weights(shape)
    packed, scales = mxfp4_pack(mx.array(w))
    codes, expected_scales = reference(w)
    assert packed.dtype == scales.dtype == mx.uint8
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(packed, codes[..., 0::2] + 16 * codes[..., 1::2])


def test_the_packed_bytes_hold_exactly_the_fake_quantized_values() -> None:
    w = mx.array(weights((4, 48, 64)))
    rounded = mxfp4_fake_quantize(w)
    packed, scales = mxfp4_pack(w)
    assert packed.shape == (4, 48, 32) and scales.shape == (4, 48, 2)
    assert same_bits(rounded, decode(np.array(packed), np.array(scales)))
    by_mlx = mx.dequantize(packed.view(mx.uint32), scales, dtype=mx.float32, **MODE)
    assert same_bits(rounded, by_mlx)


def test_rounded_twice_is_rounded_once() -> None:
    w = mx.array(weights((8, 32, 32)))
    once = mxfp4_fake_quantize(w)
    assert not mx.array_equal(once, w)
    assert same_bits(mxfp4_fake_quantize(once), once)
    for first, second in zip(mxfp4_pack(w), mxfp4_pack(once), strict=True):
        assert mx.array_equal(first, second)


@pytest.mark.parametrize("largest", [6, 7])
def test_every_code_and_scale_is_reproduced(largest: int) -> None:
    scales = np.arange(LAST_SCALE + 1, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    codes[codes % 8 > largest] = 0  # Then 4 is the largest value, not 6.
    packed = np.broadcast_to(codes[0::2] | codes[1::2] << 4, (len(scales), 16))
    w = mx.array(decode(packed, scales))
    found_packed, found_scales = mxfp4_pack(w)
    assert np.array_equal(found_scales, scales)
    assert np.array_equal(found_packed, packed)
    assert same_bits(mxfp4_fake_quantize(w), w)


def test_ties_go_to_the_even_code_and_what_is_too_large_to_the_largest() -> None:
    w = np.zeros((2, 32), np.float32)
    w[:, : len(POINTS)] = [POINTS, -POINTS]
    expected = np.array([TIES.get(x, min(x, 6)) for x in POINTS.tolist()], np.float32)
    rounded = np.array(mxfp4_fake_quantize(mx.array(w)))
    assert same_bits(rounded[:, : len(POINTS)], np.stack([expected, -expected]))


def test_zeros_stay_and_do_not_disturb() -> None:
    w = np.zeros((2, 64), np.float32)
    w[0, 0] = 1e-3
    packed, scales = mxfp4_pack(mx.array(w))
    assert not np.array(mxfp4_fake_quantize(mx.array(w)))[:, 1:].any()
    assert not np.array(packed)[1].any() and scales[1].tolist() == [0, 0]
    assert np.array(scales)[0].tolist() == [127 - 10 - 2, 0]


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1.2e-38, 1e-37, 1e30, 3.4e38])
def test_tiny_and_huge_groups(size: float) -> None:
    w = np.float32(size) * np.linspace(-1, 1, 32, dtype=np.float32)
    packed, scales = mxfp4_pack(mx.array(w))
    codes, expected_scales = reference(w)
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(packed, codes[0::2] + 16 * codes[1::2])
    rounded = mxfp4_fake_quantize(mx.array(w))
    assert same_bits(rounded, decode(np.array(packed), np.array(scales)))
    assert mx.all(mx.isfinite(rounded)).item()


def test_what_is_not_finite_shows() -> None:
    w = mx.zeros(64)
    w[3] = mx.nan
    rounded = mxfp4_fake_quantize(w)
    assert mx.isnan(rounded[3]).item() and not mx.any(rounded[32:]).item()


@pytest.mark.parametrize("function", [mxfp4_fake_quantize, mxfp8_round])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gradients_pass_straight_through(function, dtype: mx.Dtype) -> None:
    w = mx.array(weights((3, 64))).astype(dtype)
    towards = mx.random.normal((3, 64), key=mx.random.key(0)).astype(dtype)
    value, gradient = mx.value_and_grad(lambda w: (function(w) * towards).sum())(w)
    assert mx.array_equal(gradient, towards) and gradient.dtype == dtype
    assert mx.allclose(value, (function(w) * towards).sum()).item()
    assert function(w).dtype == dtype


def test_the_gradient_is_taken_at_the_rounded_weight() -> None:
    w, x = mx.array(weights((8, 32))) * 1e-3, mx.random.normal((5, 32), key=mx.random.key(1))
    gradient = mx.grad(lambda w: (x @ mxfp4_fake_quantize(w).T).square().sum())(w)
    expected = mx.grad(lambda w: (x @ w.T).square().sum())(mxfp4_fake_quantize(w))
    assert mx.array_equal(gradient, expected)


@pytest.mark.parametrize("function", [mxfp4_fake_quantize, mxfp8_round])
def test_compiled_it_is_the_same(function) -> None:
    w = mx.array(weights((3, 64)))
    assert same_bits(mx.compile(function)(w), function(w))
    gradient = mx.compile(mx.grad(lambda w: function(w).sum()))(w)
    assert mx.array_equal(gradient, mx.ones_like(w))


def test_bfloat16_holds_what_float32_does() -> None:
    w = mx.array(weights((3, 64))).astype(mx.bfloat16)
    assert mx.array_equal(mxfp4_fake_quantize(w), mxfp4_fake_quantize(w.astype(mx.float32)))


def test_mlx_quantizes_as_the_specification_only_up_to_six() -> None:
    rng = np.random.default_rng(0)
    w = rng.uniform(-3.9, 3.9, size=(64, 32)).astype(np.float32)
    for largest, same in ((4.1, True), (5.9, True), (6.1, False), (7.9, False)):
        w[:, 0] = largest
        _, scales = mxfp4_pack(mx.array(w))
        theirs, their_scales = mx.quantize(mx.array(w), **MODE)
        assert mx.array_equal(scales, their_scales).item() == same
        values = mx.dequantize(theirs, their_scales, dtype=mx.float32, **MODE)
        assert mx.array_equal(mxfp4_fake_quantize(mx.array(w)), values).item() == same
        if not same:
            assert mx.array_equal(scales + 1, their_scales)


def test_mlx_sends_ties_towards_zero_on_a_cpu() -> None:
    w = np.zeros((1, 32), np.float32)
    w[0, 0], w[0, 1 : 1 + len(TIES)] = 6, [*TIES]
    packed = mx.quantize(mx.array(w), stream=mx.cpu, **MODE)
    values = mx.dequantize(*packed, dtype=mx.float32, stream=mx.cpu, **MODE)
    assert values[0, 1 : 1 + len(TIES)].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]


def test_mxfp8_keeps_three_bits_and_saturates() -> None:
    x = mx.array(weights((16, 128)))
    rounded = mxfp8_round(x)
    groups = np.abs(np.array(x).reshape(-1, 32)).astype(np.float64)
    unit = np.exp2(np.floor(np.log2(groups.max(-1, keepdims=True))) - 8)
    exponent = np.maximum(np.floor(np.log2(groups / unit)), -6)  # below are E4M3's subnormals
    step = np.exp2(exponent - 3)
    expected = np.minimum(np.round(groups / unit / step) * step, 448) * unit
    expected = np.copysign(expected.reshape(x.shape), np.array(x))
    assert np.array_equal(rounded, expected)
    assert same_bits(mxfp8_round(rounded), rounded)
    assert not mx.any(mxfp8_round(mx.zeros((2, 32)))).item()


@pytest.mark.parametrize("function", [mxfp4_fake_quantize, mxfp4_pack, mxfp8_round])
def test_rows_that_do_not_fit_are_refused(function) -> None:
    with pytest.raises(UnsupportedError, match=r"\(4, 48\) has rows of 48.*multiples of 32"):
        function(mx.zeros((4, 48)))
