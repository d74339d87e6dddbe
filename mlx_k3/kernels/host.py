"""Element-wise functions over large arrays on a CPU, by numpy.

MLX's CPU backend calls the C library for every exponential on x86; numpy's are vectorised, 5 to
10 times faster. A GPU, and small inputs, take the MLX ops.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

HOST_FROM = 1 << 15  # elements from which leaving MLX's graph pays


def on_host(
    reference: Callable[..., mx.array], host: Callable[..., np.ndarray]
) -> Callable[..., mx.array]:
    """``reference`` (MLX ops), or ``host`` (numpy) for large arrays on a CPU.

    Both take float32 arrays of one shape and return one more. Gradients are those of
    ``reference``, whichever runs. The two round differently, so who needs the same numbers for a
    row whatever comes with it passes ``use_host``.
    """

    @mx.custom_function
    def by_numpy(*arrays: mx.array) -> mx.array:
        return mx.array(host(*(np.array(x, copy=False) for x in arrays)))

    @by_numpy.vjp
    def by_numpy_vjp(primals, cotangent, _):
        primals = primals if isinstance(primals, (list, tuple)) else [primals]
        return mx.vjp(reference, list(primals), [cotangent])[1]

    def pick(*arrays: mx.array, use_host: bool | None = None) -> mx.array:
        if use_host is None:
            use_host = arrays[0].size >= HOST_FROM and mx.default_device() == mx.cpu
        return by_numpy(*arrays) if use_host else reference(*arrays)

    return pick


def _np_sigmoid(x: np.ndarray) -> np.ndarray:
    # 1 / (1 + exp(-x)); exp overflows to infinity for very negative x, which is right here.
    with np.errstate(over="ignore"):
        y = np.exp(-x)
    y += 1
    return np.reciprocal(y, out=y)


def _np_silu(x: np.ndarray) -> np.ndarray:
    y = _np_sigmoid(x)
    return np.multiply(y, x, out=y)


def _np_softmax(x: np.ndarray) -> np.ndarray:
    y = x - x.max(-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(-1, keepdims=True)
    return y


sigmoid = on_host(mx.sigmoid, _np_sigmoid)
silu = on_host(lambda x: x * mx.sigmoid(x), _np_silu)
exp = on_host(mx.exp, np.exp)
softmax = on_host(lambda x: mx.softmax(x, axis=-1, precise=True), _np_softmax)
