"""Products on the workbench: those of MLX's own parts, to the bit, however many are under way."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.kernels import quantized
from mlx_k3.kernels.quantized import Workbench, expand

HOW = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.mark.parametrize("strip", [1, 1000, 1 << 18])
def test_products_equal_those_of_expanded_matrices(strip, monkeypatch):
    monkeypatch.setattr(quantized, "_STRIP", strip)
    mx.random.seed(0)
    # As an expert's are: two of one shape, then one the other way round, and a smaller one.
    shapes = [(96, 160), (96, 160), (160, 96), (64, 32)] * 4
    cases = []
    for rows, columns in shapes:
        weight = mx.random.randint(0, 256, (rows, columns // 2)).astype(mx.uint8)
        scales = mx.random.randint(100, 140, (rows, columns // 32)).astype(mx.uint8)
        cases.append((mx.random.normal((5, columns)), weight, scales))
    mx.eval(cases)
    bench = Workbench(96 * 160)
    got = [bench.multiply(x, np.array(weight), np.array(scales)) for x, weight, scales in cases]
    bench.finish()
    for y, (x, weight, scales) in zip(got, cases, strict=True):
        want = x @ expand(weight.view(mx.uint32), scales, None, mx.float32, **HOW).T
        assert mx.array_equal(y, want)


def test_no_place_is_filled_while_a_product_of_it_is_under_way():
    # Products that take far longer than filling: a place refilled too early would show.
    mx.random.seed(1)
    x = mx.random.normal((4096, 256))
    scales = np.full((64, 8), 127, np.uint8)
    codes = [np.full((64, 128), code * 17, np.uint8) for code in range(1, 8)]
    bench = Workbench(64 * 256)
    got = [bench.multiply(x, code, scales) for code in codes]
    bench.finish()
    sums = np.array(x.sum(axis=-1, keepdims=True))
    for y, value in zip(got, (0.5, 1, 1.5, 2, 3, 4, 6), strict=True):
        np.testing.assert_allclose(np.array(y), sums * value + np.zeros(64), rtol=1e-3, atol=1e-2)
