"""Products with quantized weights, by the way that is fast on the device.

MLX's CPU backend multiplies packed weights one row at a time without BLAS; from a few rows on,
expanding the weights and calling BLAS is tens of times faster. GPUs have kernels for every case.
"""

import mlx.core as mx

# Rows from which expanding wins on a CPU, by mode: expanding costs 5.6 ns a weight for mxfp4 and
# 0.9 ns for 8-bit affine, a packed row 0.26 and 0.65 ns (two-core x86-64).
_EXPAND_ROWS = {"mxfp4": 20, "affine": 2}


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
    if mx.default_device() == mx.cpu and rows >= _EXPAND_ROWS.get(mode, 4):
        return x @ mx.dequantize(weight, scales, biases, dtype=x.dtype, **how).T
    return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **how)
