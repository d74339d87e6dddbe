"""MXFP4 bytes against the reference values, bit for bit, in numpy and in MLX."""

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_k3.checkpoint.mxfp4 import PAIRS, decode


@pytest.fixture(scope="module")
def cases(golden):
    return load_file(golden / "mxfp4/cases.safetensors")


@pytest.mark.parametrize("name", ["all", "bytes", "weight"])
def test_decodes_every_code_and_scale(cases, name):
    want = cases[f"{name}.value_f32"]
    got = decode(cases[f"{name}.packed"], cases[f"{name}.scale"])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    ordinary = ~np.isnan(want)
    # Bits, not values: -0 is not 0.
    assert (got.view(np.uint32) == want.view(np.uint32))[ordinary].all()


def test_product_with_a_decoded_weight(cases):
    weight = decode(cases["weight.packed"], cases["weight.scale"])[1:].astype(np.float64)
    got = cases["matmul.x"].astype(np.float64) @ weight.T
    assert np.abs(got - cases["matmul.y_f64"].reshape(got.shape)).max() == 0


def test_low_nibble_comes_first():
    assert PAIRS[0x21].tolist() == [0.5, 1.0]
    assert PAIRS[0xF7].tolist() == [6.0, -6.0]


def test_mlx_reads_the_same_bytes_the_same_way():
    """The whole point of copying experts: MLX's mxfp4 is the release's format."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (8, 64), np.uint8)
    scales = rng.integers(100, 150, (8, 4), np.uint8)
    words = mx.array(packed.view(np.uint32))
    got = mx.dequantize(words, mx.array(scales), group_size=32, bits=4, mode="mxfp4")
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)), decode(packed, scales))
