"""Random inputs for KDA's operations, and how close their results have to be."""

import mlx.core as mx

from mlx_k3.kernels import l2norm

from .measure import relative_error

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Of the output's scale. In 16 bits the inputs' products round, too.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}


def assert_close(got, want, dtype) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert relative_error(x.astype(mx.float32), y.astype(mx.float32)) < TOLERANCE[dtype]


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


def assert_no_spills(told: list[str], kernels: int) -> None:
    assert len(told) == kernels
    for text in told:
        assert " 0 bytes stack frame" in text and " 0 bytes spill" in text
