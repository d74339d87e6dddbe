"""The host runner itself: what is wrong in a kernel is caught, and said with its place."""

from functools import partial
from pathlib import Path

import mlx.core as mx
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
        r"thread 63 .*tried.h:5: an index outside its array",
    ),
    "beyond shared by pointer": (
        REVERSE.replace("tile[THREAD] =", "THREADGROUP float* p = tile; p[THREAD + 1] ="),
        r"thread 63 .*writes tile\[64\] outside its 64 items",
    ),
    "beyond a local array": (
        "float kept[4]; for (int i = 0; i < 4; ++i) kept[i] = 0.0f; y[THREAD] = kept[THREAD];",
        r"thread 4 .*tried.h:4: an index outside its array",
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
    "no space": (
        "const float* p = x; y[THREAD] = p[THREAD];",
        r"tried.h:4: const float\* p = needs",
    ),
    "a double": ("double sum = 0.0f; y[THREAD] = sum;", r"tried.h:4: double is not in Metal's"),
    "a double literal": ("y[THREAD] = x[THREAD] * 0.5;", r"0.5 is a double in CUDA"),
    "a double exponent": ("y[THREAD] = x[THREAD] * 1e-5;", r"1e-5 is a double in CUDA"),
    "a static": ("static int calls = 0; y[THREAD] = ++calls;", r"static variables"),
    "std": ("y[THREAD] = std::exp(x[THREAD]);", r"std::exp is not in Metal's library"),
    "goto": ("goto end; end: y[THREAD] = 0.0f;", r"goto is not in Metal"),
    "new": ("y[THREAD] = *new float;", r"new is not in Metal"),
    "a lambda": ("auto f = [&](float a) { return a; }; y[THREAD] = f(x[THREAD]);", r"a lambda"),
    "a variable array": ("float a[THREAD + 1]; y[THREAD] = a[0];", r"variable length array"),
    "shared in a block": (
        "if (THREAD < 64) { SHARED(float, tile, 64); tile[THREAD] = 0.0f; }",
        r"the shared array tile is not at the top of the body",
    ),
    "a keyword": (
        "int half = 2; y[THREAD] = half;",
        r"tried.h:4: int half has a keyword of Metal as its name",
    ),
    "a semicolon": ("y[THREAD] = x[THREAD]", r"expected ';'"),
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
    "shared in a helper": (
        "INLINE void none() {\n  SHARED(float, tile, 64);\n}",
        r"the shared array tile is not at the top of the body",
    ),
    "a pointer without a space": (
        "INLINE float first(const float* p) { return p[0]; }",
        r"tried.h:1: const float\* p\) needs an address space",
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
