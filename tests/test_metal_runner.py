"""The host runner itself: right kernels pass, and their numbers are a GPU's."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from .support.metal import KernelFault, available, check, run
from .support.metal.trial import trial

pytestmark = pytest.mark.skipif(not available(), reason="no clang++ here")


@pytest.fixture
def launch(tmp_path: Path):
    return partial(trial, tmp_path)


X = mx.arange(64).astype(mx.float32)

REVERSE = """
    SHARED(float, tile, GROUP_SIZE);
    tile[THREAD] = x[THREAD];
    BARRIER();
    y[THREAD] = tile[GROUP_SIZE - 1 - THREAD];
"""


def test_right_kernel_passes(launch) -> None:
    right = launch(REVERSE, X)
    check(right)
    assert run(right)[0].tolist() == X[::-1].tolist()


def test_sum_of_rows(launch) -> None:
    """Each group sums a row: in registers, by simd groups, through shared memory."""
    body = """
        SHARED(float, sums, 2);
        float sum = 0.0f;
        for (int i = THREAD; i < 100; i += GROUP_SIZE) sum += x[GROUP_X * 100 + i];
        sum = simd_sum(sum);
        if (LANE == 0) sums[SIMD_GROUP] = sum;
        BARRIER();
        if (THREAD == 0) y[GROUP_X] = sums[0] + sums[1];
    """
    x = mx.random.normal((5, 100))
    rows = launch(body, x, shape=(5,), groups=(5, 1, 1))
    check(rows)
    assert mx.allclose(run(rows)[0], x.sum(-1), atol=1e-4)


def test_transpose_through_shared_memory(launch) -> None:
    body = """
        SHARED(T, tile, 64 * 2);
        for (int i = 0; i < 2; ++i) tile[i * 64 + THREAD] = x[i * 64 + THREAD];
        BARRIER();
        for (int i = 0; i < 2; ++i) y[THREAD * 2 + i] = tile[i * 64 + THREAD];
    """
    x = mx.arange(128).astype(mx.bfloat16).reshape(2, 64)
    turned = launch(body, x, shape=(64, 2), template=(("T", mx.bfloat16),))
    check(turned)
    assert mx.array_equal(run(turned)[0], x.T)


def test_scan_with_shuffles(launch) -> None:
    body = """
        float sum = x[THREAD];
        for (uint delta = 1; delta < 32; delta *= 2) {
          const float other = simd_shuffle_up(sum, delta);
          if (LANE >= delta) sum += other;
        }
        y[THREAD] = sum;
    """
    scan = launch(body, X)
    check(scan)
    want = np.arange(64).reshape(2, 32).cumsum(-1).ravel()
    assert run(scan)[0].tolist() == want.tolist()


def test_each_shuffle_takes_the_lane_it_names(launch) -> None:
    body = """
        float a = simd_shuffle(x[THREAD], 31 - LANE);
        float b = simd_shuffle_xor(x[THREAD], 5);
        float c = simd_shuffle_down(x[THREAD], 3);
        float d = simd_max(x[THREAD]) - simd_min(x[THREAD]);
        y[THREAD * 4] = a;
        y[THREAD * 4 + 1] = b;
        y[THREAD * 4 + 2] = c;
        y[THREAD * 4 + 3] = d;
    """
    lanes = np.arange(64)
    simd, lane = lanes // 32 * 32, lanes % 32
    down = np.where(lane + 3 < 32, lanes + 3, lanes)
    want = np.stack([simd + 31 - lane, simd + (lane ^ 5), down, np.full(64, 31)], axis=1)
    got = run(launch(body, X, shape=(64, 4)))[0]
    assert got.tolist() == want.tolist()


def test_matrix_product_of_a_simd_group(launch) -> None:
    """The lanes hold what Apple's hold: two neighbours of a row each."""
    body = """
        const uint row = LANE / 16 * 4 + LANE / 2 % 4, column = LANE / 8 % 2 * 4 + LANE % 2 * 2;
        simdgroup_float8x8 a, b, c;
        for (int i = 0; i < 2; ++i) {
          a.thread_elements()[i] = x[row * 8 + column + i];
          b.thread_elements()[i] = x[64 + row * 8 + column + i];
          c.thread_elements()[i] = 1.0f;
        }
        simdgroup_multiply_accumulate(c, a, b, c);
        for (int i = 0; i < 2; ++i) y[row * 8 + column + i] = c.thread_elements()[i];
    """
    x = mx.random.normal((2, 8, 8))
    product = launch(body, x, shape=(8, 8), threads=32)
    check(product)
    assert mx.allclose(run(product)[0], x[0] @ x[1] + 1, atol=1e-5)


def test_places_in_the_grid(launch) -> None:
    body = """
        const uint at = ((GROUP_Z * 3 + GROUP_Y) * 2 + GROUP_X) * GROUP_SIZE + THREAD;
        y[at] = GROUP_X + 10.0f * GROUP_Y + 100.0f * GROUP_Z + 1000.0f * SIMD_GROUP + LANE / 100.0f;
    """
    grid = launch(body, X, shape=(2, 3, 2, 64), groups=(2, 3, 2))
    check(grid)
    z, y, x, thread = np.indices((2, 3, 2, 64))
    want = x + 10 * y + 100 * z + 1000 * (thread // 32) + np.float32(thread % 32) / np.float32(100)
    assert np.allclose(np.array(run(grid)[0]), want, atol=1e-3)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_floats_round_as_mlx_does(launch, dtype) -> None:
    """All that a float can round to: every 16-bit value, and the floats around every middle."""
    middles = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x7FFF
    near = [middles, middles + 1, middles + 2]
    if dtype == mx.float16:
        # A half's last place is bit 13; what lies between: the middle, and one to either side.
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        bits = every.view(np.uint32)
        near = [bits, bits + 0xFFF, bits + 0x1000, bits + 0x1001]
    values = mx.array(np.concatenate(near).view(np.float32))
    body = """
        const uint i = GROUP_X * GROUP_SIZE + THREAD;
        y[i] = to_float(from_float<T>(x[i]));
    """
    rounding = {"groups": (values.size // 1024, 1, 1), "threads": 1024}
    got = run(launch(body, values, template=(("T", dtype),), **rounding), orders=1)[0]
    want = values.astype(dtype).astype(mx.float32)
    assert mx.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_arithmetic_rounds_every_step(launch, dtype) -> None:
    body = """
        const T half_way = x[THREAD] * x[THREAD + 64] + x[THREAD + 128];
        y[THREAD] = half_way / x[THREAD];
    """
    mx.random.seed(0)
    x = mx.random.normal((192,)).astype(dtype)
    a, b, c = x.split(3)
    got = run(launch(body, x, shape=(64,), template=(("T", dtype),)))[0]
    assert mx.array_equal(got, (a * b + c) / a)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_wide_loads_and_stores(launch, dtype) -> None:
    body = """
        float values[8];
        load<8>(values, x + THREAD * 8);
        const float4 first = load4(x + THREAD * 8);
        SHARED(T, tile, GROUP_SIZE * 4);
        shared_store4(tile + THREAD * 4, make4(values[4], values[5], values[6], values[7]));
        values[0] += first.w;
        store<8>(y + THREAD * 8, values);
        BARRIER();
        store4(y + (63 - THREAD) * 8 + 4, shared_load4(tile + (63 - THREAD) * 4));
    """
    x = mx.random.normal((64, 8)).astype(dtype)
    want = mx.concatenate([x[:, :1] + x[:, 3:4], x[:, 1:]], axis=1)
    # The second half of each row is written by two threads, with a barrier between.
    wide = launch(body.replace("BARRIER", "BARRIER_DEVICE"), x, template=(("T", dtype),))
    check(wide)
    assert mx.array_equal(run(wide)[0], want)


def test_a_wrong_lane_changes_the_numbers(launch) -> None:
    body = "y[THREAD] = simd_shuffle(x[THREAD], LANE ^ 1);"
    right = run(launch(body, X))[0]
    wrong = run(launch(body.replace("^ 1", "^ 2"), X))[0]
    assert right.tolist() == [i ^ 1 for i in range(64)]
    assert wrong.tolist() == [i ^ 2 for i in range(64)]


def test_small_inputs_lie_in_constant_memory(launch) -> None:
    """As MLX passes them: a helper that takes device memory does not take them."""
    helpers = "INLINE float first(CONST_DEVICE float* p) { return p[0]; }"
    body = "y[THREAD] = first(x);"
    check(launch(body, X, helpers=helpers, shape=(64,)))
    with pytest.raises(KernelFault, match="no matching function for call to 'first'"):
        check(launch(body, X[:7], helpers=helpers, shape=(64,)))
    assert run(launch("y[THREAD] = x[6];", X[:7], shape=(64,)))[0].tolist() == [6.0] * 64


def test_shapes_and_strides_are_parameters_when_named(launch) -> None:
    body = """
        y[THREAD] = x_shape[1] + 10.0f * x_strides[0] + 10000.0f * x_ndim;
    """
    shaped = launch(body, mx.zeros((3, 4, 5)), shape=(64,))
    check(shaped)
    assert run(shaped)[0].tolist() == [4 + 200 + 30000] * 64
