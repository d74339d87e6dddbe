"""The softmax of attention whose keys come tile by tile, and of attention that sees all at once.

Both take scores in float32, give the weights to multiply values by, and take up the product.
"""

import mlx.core as mx

from ..kernels import softmax
from ..kernels.host import exp


class Softmax:
    """For scores that come all at once."""

    def weights(self, scores):
        return softmax(scores)

    def add(self, y):
        self.arrays = [y]

    def result(self):
        return self.arrays[0]


class RunningSoftmax:
    """For scores that come tile by tile: all is kept relative to the highest score so far."""

    def __init__(self):
        self._top = self._total = self._y = None

    @property
    def arrays(self):
        return [x for x in (self._top, self._total, self._y) if x is not None]

    def weights(self, scores):
        top = scores.max(-1, keepdims=True)
        if self._top is not None:
            top = mx.maximum(top, self._top)
            fading = mx.exp(self._top - top)
            self._total, self._y = self._total * fading, self._y * fading
        weights = exp(scores - top)
        total = _sum(weights)
        self._top, self._total = top, total if self._total is None else self._total + total
        return weights

    def add(self, y):
        y = y.astype(mx.float32)
        self._y = y if self._y is None else self._y + y

    def result(self):
        return self._y / self._total


def _sum(x: mx.array) -> mx.array:
    """Over the last axis, which stays; on a CPU by BLAS, for MLX adds one after the other there."""
    if mx.default_device() == mx.cpu:
        return x @ mx.ones((x.shape[-1], 1), x.dtype)
    return x.sum(-1, keepdims=True)
