"""Small stacks of packed experts, and tokens for them."""

import mlx.core as mx
import numpy as np

from mlx_k3.kernels.experts import Packed

E = 5


def stack(rng, out: int, inner: int, scales=(116, 122)) -> Packed:
    """E random matrices; ``scales`` are the first scale byte and the one after the last."""
    codes = rng.integers(0, 256, (E, out, inner // 2), dtype=np.uint8)
    scales = rng.integers(*scales, (E, out, inner // 32), dtype=np.uint8)
    return Packed(mx.array(codes).view(mx.uint32), mx.array(scales))


def inputs(D: int, H: int, k: int, tokens: int, dtype: mx.Dtype = mx.float32) -> tuple:
    """What ``mxfp4_experts`` takes, in its order."""
    rng = np.random.default_rng([D, H, k, tokens])
    z = mx.array(rng.normal(size=(tokens, D)).astype(np.float32)).astype(dtype)
    indices = mx.array(np.stack([rng.permutation(E)[:k] for _ in range(tokens)]).astype(np.uint32))
    weights = mx.array(rng.random((tokens, k)).astype(np.float32))
    return z, indices, weights, stack(rng, H, D), stack(rng, H, D), stack(rng, D, H)
