"""Every kernel against its reference: on the GPU, or its Metal text on the host runner."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.kernels import (
    attention_residual,
    gated_rms_norm,
    residual_step,
    route,
    situ,
    using,
)

from .support import cuda
from .support.measure import relative_error
from .support.metal import KernelFault, available, on_host, run, with_kernels
from .support.metal.trial import without_each_barrier

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Of the output's scale. A 16-bit output is rounded once, here and there.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}

needs_clang = pytest.mark.skipif(not available(), reason="no clang++ here")
needs_nvcc = pytest.mark.skipif(not cuda.available(), reason="no nvcc here")


def both(operation: Callable, *arrays: mx.array, **settings) -> tuple[list, list]:
    """What the kernel and what the reference gives, as lists of float32 arrays."""

    def outputs(path) -> list[mx.array]:
        with path:
            result = operation(*arrays, **settings)
            result = list(result) if isinstance(result, (list, tuple)) else [result]
            mx.eval(result)
            return [x.astype(mx.float32) for x in result]

    return outputs(with_kernels()), outputs(using("reference"))


def assert_equal(operation: Callable, *arrays: mx.array, dtype: mx.Dtype, **settings) -> None:
    """Kernel and reference agree in every output."""
    for got, want in zip(*both(operation, *arrays, **settings), strict=True):
        assert relative_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 1024), (1, 1025)])
@pytest.mark.parametrize("linear", [25.0, None])
def test_situ(dtype, shape, linear) -> None:
    mx.random.seed(0)
    gate, up = (5 * mx.random.normal(shape).astype(dtype) for _ in range(2))
    assert_equal(situ, gate, up, 4.0, linear, dtype=dtype)


def test_situ_at_the_ends() -> None:
    ends = mx.array([-mx.inf, -1e30, -1e4, -100, -0.0, 0.0, 1e-30, 100, 1e4, 1e30])
    assert_equal(situ, ends[1:], ends[1:][::-1], 4.0, 25.0, dtype=mx.float32)
    with with_kernels():
        assert situ(ends[:1], mx.ones((1,)), 4.0, 25.0).item() == 0


# dtype, M, D: a width of K3, odd ones, ones with a ragged last vector.
RESIDUALS = [
    *((mx.float32, M, D) for M, D in ((1, 48), (3, 8), (9, 7168), (16, 132), (31, 33), (5, 4100))),
    *((dtype, M, D) for dtype in DTYPES[1:] for M, D in ((9, 7168), (31, 33))),
]


@pytest.mark.parametrize("dtype, M, D", RESIDUALS)
def test_attention_residual(dtype, M, D) -> None:
    mx.random.seed(0)
    candidates = (3 * mx.random.normal((2, 1, M, D))).astype(dtype)
    weight = mx.random.normal((D,))
    assert_equal(attention_residual, candidates, weight, 1e-5, dtype=dtype)


@pytest.mark.parametrize("dtype, M, D", RESIDUALS)
def test_residual_step(dtype, M, D) -> None:
    mx.random.seed(0)
    blocks = (3 * mx.random.normal((2, M, D))).astype(dtype)
    last, update = (mx.random.normal((2, D)).astype(dtype) for _ in range(2))
    weight, norm = mx.random.normal((D,)), mx.random.normal((D,)).astype(dtype)
    assert_equal(residual_step, blocks, last, update, weight, norm, 1e-5, dtype=dtype)


def test_attention_residual_of_many_tokens() -> None:
    mx.random.seed(0)
    candidates, weight = mx.random.normal((257, 2, 40)), mx.random.normal((40,))
    assert_equal(attention_residual, candidates, weight, 1e-5, dtype=mx.float32)


def test_attention_residual_with_scores_far_apart() -> None:
    """Scores of a thousand: one candidate takes all, and nothing overflows."""
    candidates = mx.stack([mx.full((64,), -1e3), mx.full((64,), 2e3), mx.full((64,), 1e-3)])
    got, want = both(attention_residual, candidates, mx.full((64,), 20.0), 1e-5)
    assert relative_error(got[0], want[0]) < 1e-6
    assert mx.allclose(got[0], mx.full((64,), 2e3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 32), (2, 5, 3, 64), (1, 3, 3, 128), (9, 96), (3, 256)])
def test_gated_rms_norm(dtype, shape) -> None:
    mx.random.seed(0)
    x, gate = 3 * mx.random.normal(shape), (5 * mx.random.normal(shape)).astype(dtype)
    assert_equal(gated_rms_norm, x, gate, mx.random.normal(shape[-1:]), 1e-5, dtype=dtype)


def test_gated_rms_norm_at_the_ends() -> None:
    """A row of zeros, gates that close and open, and a width that no kernel takes."""
    x = mx.stack([mx.zeros((64,)), mx.full((64,), 1e4), mx.full((64,), 1e-6)])
    gate = mx.broadcast_to(mx.array([-1e30, -100.0, 100.0, 1e30]), (3, 16, 4)).reshape(3, 64)
    for D in (64, 33):
        assert_equal(gated_rms_norm, x[:, :D], gate[:, :D], mx.ones((D,)), 1e-5, dtype=mx.float32)


def by_index(indices: mx.array, weights: mx.array) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.array(indices), axis=-1)
    return tuple(np.take_along_axis(np.array(x), order, -1) for x in (indices, weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, E, top_k", [(1, 896, 16), (6, 896, 16), (5, 33, 32), (9, 1, 1)])
@pytest.mark.parametrize("renormalize, scale", [(True, 2.5), (False, 1.0)])
def test_router(dtype, N, E, top_k, renormalize, scale) -> None:
    mx.random.seed(0)
    # Far enough apart that the two sigmoids cannot order them differently.
    logits = mx.random.permutation(mx.arange(N * E)).reshape(N, E) / (N * E) * 4 - 2
    bias = 0.1 * mx.random.normal((E,))
    settings = {"renormalize": renormalize, "scale": scale}
    got, want = both(route, logits.astype(dtype)[None], bias, top_k, **settings)
    for x, y in zip(by_index(*got), by_index(*want), strict=True):
        assert x.shape == (1, N, top_k)
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_router_takes_the_lower_of_equal_experts() -> None:
    logits = mx.zeros((3, 100))
    logits[1, 70] = 1.0
    bias = mx.zeros((100,))
    bias[50] = 0.5
    with with_kernels():
        indices, weights = route(logits, bias, 4)
    assert indices.tolist() == [[50, 0, 1, 2], [50, 70, 0, 1], [50, 0, 1, 2]]
    # The bias chooses and does not weigh.
    assert mx.allclose(weights[0], mx.full((4,), 0.25))


def test_router_at_the_ends() -> None:
    """Scores of 0 and 1 and negative choices are in order; equal scores of 0 have equal shares."""
    logits = mx.array([[-1e30, 1e30, -1e30, 1e30, 0.0, -100.0, 100.0, 5.0]])
    bias = mx.array([-1.0, -2.0, -mx.inf, 0.0, 0.0, 0.0, -0.5, -3.0])
    with with_kernels():
        indices, weights = route(logits, bias, 8)
    assert indices.tolist() == [[3, 4, 6, 5, 0, 1, 7, 2]]
    assert np.isfinite(np.array(weights)).all()


def test_golden_cases(golden) -> None:
    arrays = mx.load(str(golden / "ops/cases.safetensors"))
    with with_kernels():
        got = situ(arrays["situ.gate"], arrays["situ.up"], 4.0, 25.0)
        assert relative_error(got, arrays["situ.b4_l25"]) < 1e-6
        for M in (1, 3):
            case = {k: arrays[f"attnres.{M}.{k}"] for k in ("blocks", "prefix_sum", "out")}
            weight = arrays[f"attnres.{M}.norm_weight"] * arrays[f"attnres.{M}.proj_weight"][0]
            candidates = mx.concatenate([case["blocks"], case["prefix_sum"][:, None]], axis=1)
            assert relative_error(attention_residual(candidates, weight, 1e-5), case["out"]) < 1e-6
        logits = arrays["router.x"] @ arrays["router.weight"].T
        indices, weights = by_index(*route(logits, arrays["router.bias"], 4))
    assert (indices == np.array(arrays["router.sigmoid.topk_idx"])).all()
    assert relative_error(weights, arrays["router.sigmoid.topk_weight"]) < 1e-6


def gradients(operation: Callable, *arrays: mx.array) -> tuple[list, list]:
    """Gradients of a function of all outputs, by way of the kernel and of the reference."""

    def loss(*arrays: mx.array) -> mx.array:
        result = operation(*arrays)
        result = result if isinstance(result, (list, tuple)) else [result]
        return sum(mx.sin(x).sum() for x in result)

    found = []
    for path in (with_kernels(), using("reference")):
        with path:
            found.append(mx.grad(loss, argnums=tuple(range(len(arrays))))(*arrays))
            mx.eval(found[-1])
    return tuple(found)


OPERATIONS = {
    "situ": (lambda g, u: situ(g, u, 4.0, 25.0), [(3, 40), (3, 40)]),
    "attention_residual": (lambda c, w: attention_residual(c, w, 1e-5), [(3, 5, 40), (40,)]),
    "residual_step": (
        lambda *x: residual_step(*x, 1e-5),
        [(3, 5, 260), (3, 260), (3, 260), (260,), (260,)],
    ),
    "gated_rms_norm": (lambda *x: gated_rms_norm(*x, 1e-5), [(3, 5, 64), (3, 5, 64), (64,)]),
    "route": (lambda x, b: route(x, mx.stop_gradient(b), 4, scale=2.0)[1:], [(3, 40), (40,)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_the_references(name: str) -> None:
    mx.random.seed(0)
    operation, shapes = OPERATIONS[name]
    arrays = [mx.random.normal(shape) for shape in shapes]
    for got, want in zip(*gradients(operation, *arrays), strict=True):
        assert mx.allclose(got, want, atol=1e-5)


@needs_clang
@pytest.mark.parametrize("name", ["residual_step"])
def test_every_barrier_is_needed(name: str, tmp_path) -> None:
    """Without any one of its barriers a kernel is caught."""
    operation, shapes = OPERATIONS[name]
    with on_host() as launches:
        mx.eval(operation(*(mx.random.normal(shape) for shape in shapes)))
    assert launches
    for launch in launches:
        for line, less in without_each_barrier(tmp_path, launch):
            with pytest.raises(KernelFault, match=r"with no barrier|nobody has written"):
                run(less)
                pytest.fail(f"the barrier of line {line} changes nothing")


@needs_nvcc
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_cuda_text_compiles(name: str, dtype) -> None:
    operation, shapes = OPERATIONS[name]
    with cuda.compiling() as told:
        mx.eval(operation(*(mx.zeros(shape, dtype) for shape in shapes)))
    assert told and all("0 bytes spill stores" in text for text in told)
