"""The host runner itself: what it must catch, what it must let pass, and its numbers."""

import itertools
import textwrap
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.kernels.build import Kernel, Launch

from .support.metal import KernelFault, available, check, run

pytestmark = pytest.mark.skipif(not available(), reason="no clang++ here")


@pytest.fixture
def launch(tmp_path: Path):
    """Make a launch of a body: one input ``x``, one output ``y`` of its shape, two simd groups."""

    numbers = itertools.count()

    def make(body: str, x: mx.array, *, helpers: str = "// Nothing.", shape=None, **how) -> Launch:
        text = f"{helpers}\n\nKERNEL {{\n{textwrap.dedent(body).strip()}\n}}\n"
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        (folder / "tried.h").write_text(text)
        settings = {"groups": (1, 1, 1), "threads": 64, "template": (), "constants": ()} | how
        kernel = Kernel("tried", ("x",), ("y",), folder=folder)
        outputs = ((x.shape if shape is None else shape, x.dtype),)
        return Launch(kernel, (x,), outputs, **settings)

    return make


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


# What is wrong, and what the runner says of it.
WRONG = {
    "no barrier": (
        REVERSE.replace("BARRIER();", ""),
        r"thread 0 of group \(0, 0, 0\) reads tile\[63\], which nobody has written",
    ),
    "no barrier after reading": (
        REVERSE + "tile[THREAD] = 0.0f;",
        r"writes tile\[0\], which thread 63 read with no barrier between|"
        r"reads tile\[\d+\], which thread \d+ wrote with no barrier between",
    ),
    "two writers": (
        "if (LANE == 0) y[0] = SIMD_GROUP; y[THREAD] = 0.0f;",
        r"thread 32 .* writes y\[0\], which thread 0 wrote with no barrier between",
    ),
    "a barrier for too few": (
        REVERSE.replace("BARRIER()", "SIMD_BARRIER()"),
        r"reads tile\[\d+\], which thread \d+ wrote with no barrier between",
    ),
    "a barrier for other memory": (
        "y[THREAD] = x[THREAD]; BARRIER(); y[THREAD] = y[63 - THREAD];",
        r"reads y\[\d+\], which thread \d+ wrote with no barrier between",
    ),
    "read beyond": (
        "y[THREAD] = x[THREAD + 1];",
        r"thread 63 .*reads x\[64\] outside its 64 items",
    ),
    "read before": ("y[THREAD] = x[int(THREAD) - 1];", r"thread 0 .*reads x\[-1\] outside"),
    "write beyond": ("y[THREAD * 2] = x[THREAD];", r"thread 32 .*writes y\[64\] outside its 64"),
    "far away": ("y[THREAD] = x[THREAD * 100000000];", r"reads x\[100000000\] outside"),
    "a wild address": ("y[THREAD] = x[THREAD * 10000000000000ul];", r"a wild address"),
    "beyond shared": (
        REVERSE.replace("tile[THREAD] =", "tile[THREAD + 1] ="),
        r"thread 63 .*line 5: an index outside its array",
    ),
    "beyond shared by pointer": (
        REVERSE.replace("tile[THREAD] =", "THREADGROUP float* p = tile; p[THREAD + 1] ="),
        r"thread 63 .*writes tile\[64\] outside its 64 items",
    ),
    "beyond a local array": (
        "float kept[4]; for (int i = 0; i < 4; ++i) kept[i] = 0.0f; y[THREAD] = kept[THREAD];",
        r"thread 4 .*line 4: an index outside its array",
    ),
    "uninitialised shared": (
        "SHARED(float, tile, 64); if (THREAD < 63) tile[THREAD] = x[THREAD];\n"
        "BARRIER(); y[THREAD] = tile[THREAD];",
        r"thread 63 .*reads tile\[63\], which nobody has written",
    ),
    "uninitialised sum": (
        "SHARED(float, tile, 64); tile[THREAD] += x[THREAD]; y[THREAD] = tile[THREAD];",
        r"reads tile\[0\], which nobody has written",
    ),
    "some wait": (
        "if (THREAD < 40) { BARRIER(); } y[THREAD] = x[THREAD];",
        r"thread 0 waits in the barrier of line 4 for thread 40, which has ended",
    ),
    "different barriers": (
        "if (SIMD_GROUP == 0) {\nBARRIER();\n} else {\nBARRIER();\n}\ny[THREAD] = x[THREAD];",
        r"waits in the barrier of line 5 for thread 32, which waits in the barrier of line 7",
    ),
    "a lane is missing": (
        "float sum = x[THREAD];\nif (LANE != 7) sum = simd_sum(sum);\ny[THREAD] = sum;",
        r"thread 0 waits in simd_sum of line 5 for thread 7, which has ended",
    ),
    "lanes shuffle apart": (
        "y[THREAD] = LANE < 16 ? simd_shuffle(x[THREAD], 3)\n : simd_shuffle(x[THREAD], 4);",
        r"thread 0 waits in simd_shuffle of line 4 for thread 16, .*simd_shuffle of line 5",
    ),
    "no such lane": ("y[THREAD] = simd_shuffle(x[THREAD], LANE + 1);", r"a lane beyond 31"),
    "not all written": ("if (THREAD > 2) y[THREAD] = 1.0f;", r"3 items of y are never written"),
    "an address off": (
        "y[THREAD] = load4(x + THREAD % 2).x;",
        r"thread 1 .*an address that is not aligned for its type",
    ),
    "a shift too far": ("y[THREAD] = 1u << THREAD;", r"thread 32 .*a shift by more bits"),
    "division by zero": ("y[THREAD] = 7u / THREAD;", r"thread 0 .*an integer division by zero"),
    "too much shared": (
        "SHARED(float, tile, 10000); tile[THREAD] = x[THREAD]; y[THREAD] = tile[THREAD];",
        r"tile brings threadgroup memory to 40000 bytes, more than the 32768",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_is_caught(launch, name: str) -> None:
    body, message = WRONG[name]
    wrong = launch(body, X)
    check(wrong)  # Its language is right.
    with pytest.raises(KernelFault, match=rf"^tried: (?s:.)*({message})"):
        run(wrong)
    # The machine is as good as new afterwards.
    assert run(launch(REVERSE, X))[0].tolist() == X[::-1].tolist()


def test_outputs_that_depend_on_the_order_are_caught(launch) -> None:
    body = "static int calls = 0; y[THREAD] = ++calls;"
    with pytest.raises(KernelFault, match="tried: y depends on the order of the threads"):
        run(launch(body, X))


def test_groups_that_meet_in_memory_are_caught(launch) -> None:
    both = launch("y[THREAD] = x[THREAD];", X, groups=(2, 1, 1))
    with pytest.raises(
        KernelFault, match=r"of group \(1, 0, 0\) writes y\[0\], .* of another group"
    ):
        run(both)


def test_a_wrong_lane_changes_the_numbers(launch) -> None:
    body = "y[THREAD] = simd_shuffle(x[THREAD], LANE ^ 1);"
    right = run(launch(body, X))[0]
    wrong = run(launch(body.replace("^ 1", "^ 2"), X))[0]
    assert right.tolist() == [i ^ 1 for i in range(64)]
    assert wrong.tolist() == [i ^ 2 for i in range(64)]


def test_shared_memory_of_the_last_group_is_gone(launch) -> None:
    body = """
        SHARED(float, tile, 64);
        if (GROUP_X == 0) tile[THREAD] = 1.0f;
        BARRIER();
        y[GROUP_X * 64 + THREAD] = tile[THREAD];
    """
    with pytest.raises(KernelFault, match=r"group \(1, 0, 0\) reads tile\[0\], which nobody"):
        run(launch(body, X, shape=(2, 64), groups=(2, 1, 1)))


# What Metal's compiler would refuse, and what the check says of it.
REFUSED = {
    "device as shared": (
        "SHARED(float, tile, 64); THREADGROUP float* p = tile; p = y; y[THREAD] = p[0];",
        r"changes address space of pointer",
    ),
    "shared as device": (
        "SHARED(float, tile, 64); store4(tile, make4(0.0f, 0.0f, 0.0f, 0.0f)); y[THREAD] = 0.0f;",
        r"no matching function for call to 'store4'",
    ),
    "a write to an input": ("x[THREAD] = 0.0f;", r"read-only|const"),
    "no space": ("const float* p = x; y[THREAD] = p[THREAD];", r"line 4: const float\* p = needs"),
    "a double": ("double sum = 0.0f; y[THREAD] = sum;", r"line 4: double is not in Metal's"),
    "a double literal": ("y[THREAD] = x[THREAD] * 0.5;", r"0.5 is a double in CUDA"),
    "a double exponent": ("y[THREAD] = x[THREAD] * 1e-5;", r"1e-5 is a double in CUDA"),
    "a static": ("static int calls = 0; y[THREAD] = ++calls;", r"static variables"),
    "std": ("y[THREAD] = std::exp(x[THREAD]);", r"std::exp is not in Metal's library"),
    "goto": ("goto end; end: y[THREAD] = 0.0f;", r"goto is not in Metal"),
    "new": ("y[THREAD] = *new float;", r"new is not in Metal"),
    "a lambda": ("auto f = [&](float a) { return a; }; y[THREAD] = f(x[THREAD]);", r"a lambda"),
    "a variable array": ("float a[THREAD + 1]; y[THREAD] = a[0];", r"variable length array"),
    "a comma": ("y[THREAD] = x[THREAD]", r"expected ';'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_metal_lacks_is_refused(launch, name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(KernelFault, match=f"^tried: (?s:.)*{message}"):
        check(launch(body, X))


HELPERS = {
    "recursion": (
        "INLINE float count(int n) { return n > 0 ? count(n - 1) : 0.0f; }",
        r"count calls itself",
    ),
    "recursion by way of another": (
        "float b(int n);\nINLINE float a(int n) { return b(n); }\nfloat b(int n) { return a(n); }",
        r"\w calls itself",
    ),
    "a pointer without a space": (
        "INLINE float first(const float* p) { return p[0]; }",
        r"line 1: const float\* p\) needs an address space",
    ),
    "a local in another space": (
        "INLINE float first(CONST_DEVICE float* p) { return p[0]; }\n"
        "INLINE float own() { float kept[2] = {1.0f, 2.0f}; return first(kept); }",
        r"no matching function for call to 'first'",
    ),
}


@pytest.mark.parametrize("name", HELPERS)
def test_what_metal_lacks_is_refused_in_helpers(launch, name: str) -> None:
    helpers, message = HELPERS[name]
    with pytest.raises(KernelFault, match=f"^tried: (?s:.)*{message}"):
        check(launch("y[THREAD] = x[THREAD];", X, helpers=helpers))


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
