"""The experts' kernels against plain MLX ops."""

import ctypes
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.checkpoint.mxfp4 import VALUES
from mlx_k3.kernels import using
from mlx_k3.kernels.build import SOURCE
from mlx_k3.kernels.experts import MOST_TOKENS, Packed, mxfp4_experts, mxfp4_experts_pay
from mlx_k3.kernels.mxfp8 import mxfp8_round

from .support import cuda
from .support.measure import relative_error
from .support.metal import KernelFault, available, on_host, run, with_kernels
from .support.metal.trial import without_each_barrier
from .support.packed import E, inputs

BETAS = {"beta": 4.0, "linear_beta": 25.0}
# Of the output's scale. A 16-bit output is rounded once, here and there, as are activations.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}

needs_clang = pytest.mark.skipif(not available(), reason="no clang++ here")
needs_nvcc = pytest.mark.skipif(not cuda.available(), reason="no nvcc here")


def both(arrays: tuple, **settings) -> tuple[mx.array, mx.array]:
    """What the kernels and what plain ops give."""
    with with_kernels():
        got = mxfp4_experts(*arrays, **BETAS | settings)
        mx.eval(got)
    with using("reference"):
        want = mxfp4_experts(*arrays, **BETAS | settings)
        mx.eval(want)
    assert got.dtype == want.dtype == arrays[0].dtype
    return got.astype(mx.float32), want.astype(mx.float32)


# Latent, intermediate size, experts a token, tokens: a lone group of 32 columns, rows and groups
# that fill no simd group or some and a part.
SIZES = [(64, 32, 1, 1), (96, 64, 2, 3), (128, 96, 4, 9), (320, 288, 3, 2)]
CASES = [(*sizes, mx.float32) for sizes in SIZES]
CASES += [(*sizes, dtype) for sizes in SIZES[1:3] for dtype in (mx.float16, mx.bfloat16)]


@pytest.mark.parametrize("D, H, k, tokens, dtype", CASES)
def test_kernels(D, H, k, tokens, dtype) -> None:
    got, want = both(inputs(D, H, k, tokens, dtype))
    assert relative_error(got, want) <= TOLERANCE[dtype]


def test_tokens_of_several_sequences() -> None:
    arrays = inputs(64, 64, 2, 6)
    flat, _ = both(arrays)
    z, indices, weights = (x.reshape(2, 3, -1) for x in arrays[:3])
    got, want = both((z, indices, weights, *arrays[3:]))
    assert got.shape == (2, 3, 64)
    assert mx.array_equal(got.reshape(6, 64), flat)
    assert relative_error(got, want) <= 1e-5


def test_a_token_does_not_depend_on_the_others() -> None:
    z, indices, weights, *stacks = inputs(96, 64, 2, 3)
    with with_kernels():
        all_of_them = mxfp4_experts(z, indices, weights, *stacks, **BETAS)
        alone = mxfp4_experts(z[1:2], indices[1:2], weights[1:2], *stacks, **BETAS)
    assert mx.array_equal(all_of_them[1:2], alone)


def test_without_a_linear_beta() -> None:
    got, want = both(inputs(64, 64, 2, 1), linear_beta=None)
    assert relative_error(got, want) <= 1e-5


def test_more_experts_than_a_group_has_simd_groups() -> None:
    z, _, _, *stacks = inputs(64, 64, 1, 2)
    indices = mx.array(np.arange(22).reshape(2, 11) % E)
    weights = mx.random.uniform(shape=(2, 11))
    got, want = both((z, indices, weights, *stacks))
    assert relative_error(got, want) <= 1e-5


@pytest.mark.parametrize("scale, size", [(254, 2.0**-110), (253, 2.0**-109), (1, 2.0**118)])
def test_scales_at_the_ends(scale: int, size: float) -> None:
    """Such a scale in every other group; ``size`` is that of the inputs it meets.

    Inputs times codes stay normal numbers, of which a GPU may keep no smaller ones; what they sum
    up to is large, and without a ``linear_beta`` seen as it is.
    """
    z, indices, weights, gate, up, down = inputs(128, 64, 2, 3)
    there = np.arange(4) % 2 == 0
    large = z * mx.array(np.repeat(np.where(there, size, 1.0), 32).astype(np.float32))

    def with_scale(stack: Packed) -> Packed:
        scales = np.where(there, scale, np.array(stack.scales)).astype(np.uint8)
        # Values up to 1.5: those of the largest scale are finite then.
        return Packed(stack.weight & 0xBBBBBBBB, mx.array(scales))

    arrays = (large, indices, weights, with_scale(gate), with_scale(up), down)
    got, want = both(arrays, linear_beta=None)
    assert mx.isfinite(want).all()
    assert relative_error(got, want) <= 1e-5


def test_the_least_scale_counts_as_zero() -> None:
    z, indices, weights, gate, up, down = inputs(64, 64, 2, 1)
    scales = np.array(gate.scales)
    scales[..., 0] = 0
    gate = Packed(gate.weight, mx.array(scales))
    got, want = both((z, indices, weights, gate, up, down))
    assert relative_error(got, want) <= 1e-5
    large = z * mx.array([1e30] * 32 + [1.0] * 32)
    got, _ = both((large, indices, weights, gate, stack_of_zeros(), down))
    assert not mx.any(got)


def stack_of_zeros() -> Packed:
    """Zeros of either sign."""
    codes = np.random.default_rng(0).integers(0, 2, (E, 64, 64)) * 8
    return Packed(
        mx.array((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)).view(mx.uint32),
        mx.full((E, 64, 2), 127, mx.uint8),
    )


@pytest.mark.parametrize("which", range(3))
def test_zeros_of_either_sign(which: int) -> None:
    z, indices, weights, *stacks = inputs(64, 64, 2, 1)
    stacks[which] = stack_of_zeros()
    got, want = both((z, indices, weights, *stacks))
    assert not mx.any(got) and not mx.any(want)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_mxfp8(dtype) -> None:
    arrays = inputs(96, 64, 2, 3, dtype)
    got, want = both(arrays, mxfp8=True)
    assert relative_error(got, want) <= TOLERANCE[dtype]
    exact, _ = both(arrays)
    assert 1e-3 < relative_error(got, exact) < 0.2


def test_mxfp8_rounds_as_the_format_does() -> None:
    """Every value, every tie and both neighbours of it, subnormals, and groups of other sizes."""
    values = np.array(mx.from_fp8(mx.arange(127).astype(mx.uint8), mx.float32))
    ties = (values[1:] + values[:-1]) / 2
    points = np.concatenate(
        [values, ties, np.nextafter(ties, 0), np.nextafter(ties, 512), [-0.0, 479, 500, 511.9]]
    )
    points = np.resize(points * np.resize([1, -1, -1], points.size), (17, 31))
    points = np.concatenate([np.full((17, 1), 448), points], axis=1).astype(np.float32)
    exponents = np.resize([0, -100, 60, -8], 17)
    # One more group holds the 256 that opens the gate and that comes through unchanged.
    open_gate = np.append(256, np.zeros(31)).astype(np.float32)[None]
    z = mx.array(np.concatenate([np.ldexp(points, exponents[:, None]), open_gate]).reshape(1, -1))

    # Up brings every number back to its size and leaves it alone otherwise, and so does down.
    one_each = np.arange(z.size)
    up = one_hot(one_each, 127 - np.append(exponents, 0))
    gate = one_hot(np.full(z.size, z.size - 32), np.full(z.size // 32, 127))
    down = one_hot(one_each, np.full(z.size // 32, 127))
    arrays = (z, mx.array([[0]]), mx.array([[1.0]]), gate, up, down)
    got, _ = both(arrays, mxfp8=True, beta=1e8, linear_beta=None)
    want = np.ldexp(np.array(mxfp8_round(z)).reshape(18, 32), -np.append(exponents, 0)[:, None])
    assert np.array_equal(got, 256 * want.reshape(1, -1))


def one_hot(columns: np.ndarray, scales: np.ndarray) -> Packed:
    """A stack of one matrix whose row ``i`` is 1 in ``columns[i]``, times the column's scale."""
    size = columns.size
    codes = np.zeros((1, size, size), np.uint8)
    codes[0, np.arange(size), columns] = 2
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    scales = np.broadcast_to(scales.astype(np.uint8), (1, size, size // 32))
    return Packed(mx.array(packed).view(mx.uint32), mx.array(scales))


@needs_clang
def test_the_barrier_is_needed(tmp_path: Path) -> None:
    with on_host() as launches:
        mx.eval(mxfp4_experts(*inputs(64, 32, 3, 1), **BETAS))
    _, down = launches
    tried = list(without_each_barrier(tmp_path, down))
    assert len(tried) == 1
    with pytest.raises(KernelFault, match="mxfp4_down"):
        run(tried[0][1])


# What stands for CUDA where its text runs on the CPU.
CUDA_ON_CPU = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
typedef unsigned int uint;
struct float2 { float x, y; };
struct uint4 { uint x, y, z, w; };
struct __half2 { uint16_t x, y; };
struct __nv_bfloat16 { uint16_t bits; };
using std::fma;
template <int N, typename T>
void load(float* to, const T* from);
static float bits_to_float(uint bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static float widen(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float units = exponent ? 1024 + fraction : fraction;
  const float size = std::ldexp(units, (exponent ? exponent : 1) - 25);
  return h >> 15 ? -size : size;
}
static float2 __half22float2(__half2 h) { return {widen(h.x), widen(h.y)}; }
static uint __byte_perm(uint x, uint y, uint which) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint result = 0;
  for (int i = 0; i < 4; ++i) result |= uint(bytes >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
#define INLINE inline
#define LOCAL
#define UNROLL
"""


@needs_clang
def test_cuda_s_way_to_unpack(tmp_path: Path) -> None:
    """Its text, on the CPU: every code in every place, and every bfloat16."""
    source = CUDA_ON_CPU + (SOURCE / "mxfp4.cuda.h").read_text()
    source += """
    extern "C" void unpack(const uint* codes, int count, float* values) {
      for (int i = 0; i < count * 8; ++i) {
        float x[8] = {};
        x[i % 8] = CODE_UNIT;
        const float2 sums = dot8(codes[i / 8], x, float2{0.0f, 0.0f});
        values[i] = sums.x + sums.y;
      }
    }
    extern "C" void widen(const __nv_bfloat16* from, int count, float* to) {
      for (int i = 0; i < count; i += 8) load<8>(to + i, from + i);
    }
    """
    (tmp_path / "unpack.cpp").write_text(source)
    library = tmp_path / "unpack.so"
    command = ["clang++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library]
    subprocess.run([*command, tmp_path / "unpack.cpp"], check=True, capture_output=True)
    codes = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    codes[:256] = np.arange(256, dtype=np.uint32) * 0x01010101
    got = np.empty((codes.size, 8), np.float32)
    run_in = ctypes.CDLL(str(library))
    run_in.unpack(_pointer(codes), codes.size, _pointer(got))
    np.testing.assert_array_equal(got, VALUES[codes[:, None] >> 4 * np.arange(8) & 15])

    bits = np.arange(1 << 16, dtype=np.uint16)
    got = np.empty(bits.size, np.float32)
    run_in.widen(_pointer(bits), bits.size, _pointer(got))
    np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)


def _pointer(x: np.ndarray) -> ctypes.c_void_p:
    return x.ctypes.data_as(ctypes.c_void_p)


@needs_nvcc
@pytest.mark.parametrize("dtype, mxfp8", [(mx.bfloat16, False), (mx.float32, True)])
def test_cuda_compiles_k3_s_sizes(dtype, mxfp8) -> None:
    D, H, k = 3584, 3072, 16
    wide = Packed(mx.zeros((1, H, D // 8), mx.uint32), mx.zeros((1, H, D // 32), mx.uint8))
    high = Packed(mx.zeros((1, D, H // 8), mx.uint32), mx.zeros((1, D, H // 32), mx.uint8))
    z, indices, weights = mx.zeros((1, D), dtype), mx.zeros((1, k), mx.uint32), mx.zeros((1, k))
    with cuda.compiling() as told:
        mx.eval(mxfp4_experts(z, indices, weights, wide, wide, high, **BETAS, mxfp8=mxfp8))
    assert len(told) == 2
    for text in told:
        assert " 0 bytes stack frame" in text and " 0 bytes spill" in text
        registers = int(text.split("Used ")[1].split()[0])
        assert registers <= 128, "then a processor holds two groups, which the tiling counts on"


def test_they_are_for_a_few_tokens() -> None:
    assert not mxfp4_experts_pay(1) or mx.default_device() == mx.gpu
    with using("cuda"):
        assert mxfp4_experts_pay(1) and mxfp4_experts_pay(MOST_TOKENS)
        assert not mxfp4_experts_pay(MOST_TOKENS + 1)
