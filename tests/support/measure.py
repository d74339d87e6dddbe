"""How the tests measure numbers: the golden data's own measure."""

import mlx.core as mx
import numpy as np


def relative_error(got: mx.array, want: mx.array) -> float:
    """``max|got - want| / max|want|`` in float64; the shapes must agree."""
    got, want = np.array(got, np.float64), np.array(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.abs(got - want).max() / np.abs(want).max())
