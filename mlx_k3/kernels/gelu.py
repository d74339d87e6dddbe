"""GELU, in the two forms that the vision tower and its projector use; in float32."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .host import on_host

_SLOPE, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def _tanh_form(x: mx.array) -> mx.array:
    # (1 + tanh(y)) / 2 is sigmoid(2 y).
    return x * mx.sigmoid(_SLOPE * (x + _CUBE * x * x * x))


def _np_tanh_form(x: np.ndarray) -> np.ndarray:
    y = x * x
    y *= -_SLOPE * _CUBE
    y -= _SLOPE
    y *= x
    with np.errstate(over="ignore"):  # to infinity, which is right: the result is then 0
        np.exp(y, out=y)
    y += 1
    return np.divide(x, y, out=y)


_by_host = on_host(_tanh_form, _np_tanh_form)


def gelu_tanh(x: mx.array) -> mx.array:
    """``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``, in ``x``'s dtype."""
    wide = x.astype(mx.float32)
    # On a GPU in one pass; a CPU would need a compiler for that.
    y = _by_host(wide) if mx.default_device() == mx.cpu else nn.gelu_approx(wide)
    return y.astype(x.dtype)


def gelu_exact(x: mx.array) -> mx.array:
    """``x (1 + erf(x / sqrt(2))) / 2``, in ``x``'s dtype."""
    wide = x.astype(mx.float32)
    return (wide * (1 + mx.erf(wide * math.sqrt(0.5))) / 2).astype(x.dtype)
