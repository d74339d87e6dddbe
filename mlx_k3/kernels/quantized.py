"""Products with quantized weights, by the way that is fast on the device.

MLX's CPU backend multiplies packed weights one row at a time without BLAS; from a few rows on,
expanding the weights and calling BLAS is many times faster. GPUs have kernels for every case.
"""

from collections import deque

import mlx.core as mx
import numpy as np

# Rows from which expanding wins on a CPU, by mode; a packed row costs about 0.25 ns a weight in
# mxfp4 and 0.7 ns in 8-bit affine, expanding 0.6 (see Workbench) and 0.9 ns, and a product with a
# few rows by BLAS 0.3 ns (two-core x86-64).
_EXPAND_ROWS = {"mxfp4": 4, "affine": 2}

_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_CODES = np.concatenate([_CODES, -_CODES])
# Both values of a byte, low nibble first, as one 64-bit word: one look-up yields two weights.
_PAIRS = np.stack([_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], axis=-1)
_PAIRS = np.ascontiguousarray(_PAIRS.view(np.int64)[:, 0])
_SCALES = np.append(np.exp2(np.arange(255) - 127.0), np.nan).astype(np.float32)
_STRIP = 1 << 18  # numbers that are looked up and scaled while they are in the core's cache


def quantized_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    group_size: int,
    bits: int,
    mode: str,
) -> mx.array:
    """``x @ W^T`` for a packed ``W [out, in]``.

    Args:
        x: ``[..., in]``.
        weight, scales, biases: as from ``mx.quantize``; ``biases`` only in affine mode.
        group_size, bits, mode: as in ``mx.quantize``.

    Returns:
        ``[..., out]`` in ``x``'s dtype.
    """
    how = {"group_size": group_size, "bits": bits, "mode": mode}
    rows = x.size // x.shape[-1]
    if expanding_pays(rows, mode):
        return x @ expand(weight, scales, biases, x.dtype, **how).T
    return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **how)


def expanding_pays(rows: int, mode: str) -> bool:
    """Whether ``rows`` products with one packed weight are faster with it expanded."""
    return mx.default_device() == mx.cpu and rows >= _EXPAND_ROWS.get(mode, 4)


def expand(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    dtype: mx.Dtype,
    *,
    group_size: int,
    bits: int,
    mode: str,
) -> mx.array:
    """``mx.dequantize``, twice as fast for mxfp4 on a CPU and equal to the bit."""
    if mode != "mxfp4" or mx.default_device() != mx.cpu:
        how = {"group_size": group_size, "bits": bits, "mode": mode}
        return mx.dequantize(weight, scales, biases, dtype=dtype, **how)
    pairs = mx.array(_PAIRS)[weight.view(mx.uint8)].view(mx.float32)
    values = pairs.reshape(*scales.shape, group_size) * mx.array(_SCALES)[scales][..., None]
    return values.flatten(-2).astype(dtype)


class Workbench:
    """Float32 products with one packed mxfp4 matrix after the other, on a CPU.

    The weights are looked up here and not by MLX, whose gather takes four times as long, in two
    places that are used in turn: while MLX multiplies by one matrix the next is expanded. Equal to
    the bit to :func:`expand` and a product.
    """

    def __init__(self, numbers: int) -> None:
        """For matrices of up to ``numbers`` weights."""
        self._places = [mx.zeros(numbers), mx.zeros(numbers)]
        mx.eval(self._places)
        self._flying: deque[mx.array] = deque()  # products under way

    def multiply(self, x: mx.array, weight: np.ndarray, scales: np.ndarray) -> mx.array:
        """``x @ W^T``, under way, for ``x [rows, in]``.

        ``weight`` is ``[out, in / 2]`` and ``scales [out, in / 32]``, both bytes.
        """
        if len(self._flying) == len(self._places):
            mx.eval(self._flying.popleft())  # done with the place that is filled next
        place = self._places[0]
        self._places.reverse()
        rows, columns = len(weight), 2 * weight.shape[1]
        _fill(np.asarray(memoryview(place))[: rows * columns], weight, scales)
        y = x @ place[: rows * columns].reshape(rows, columns).T
        mx.async_eval(y)
        self._flying.append(y)
        return y

    def finish(self) -> None:
        """Wait until nothing uses the places any more."""
        mx.eval(*self._flying)


def _fill(place: np.ndarray, weight: np.ndarray, scales: np.ndarray) -> None:
    columns, groups = 2 * weight.shape[1], scales.shape[1]
    strip = max(_STRIP // columns, 1)
    for first in range(0, len(weight), strip):
        codes = weight[first : first + strip]
        part = place[first * columns :][: codes.size * 2]
        # Clipping changes no byte; it spares numpy a check of every index and a copy.
        np.take(_PAIRS, codes, out=part.view(np.int64).reshape(codes.shape), mode="clip")
        values = part.reshape(len(codes), groups, columns // groups)
        values *= _SCALES[scales[first : first + strip]][..., None]
