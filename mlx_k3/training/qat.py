"""Rounding to MXFP4 while training, with a gradient that passes straight through.

Owns the rule by which a weight becomes the release's bytes (OCP Microscaling, version 1.0): 32
numbers share a power of two, which puts the largest of them between 4 and 8, and each number goes
to the nearest value of the format, a tie to the even code; what lies beyond the largest value
becomes that. ``mx.quantize`` takes the next power of two for groups whose largest number would lie
above 6 here, and on a CPU sends ties towards zero. Knows nothing of models.
"""

import mlx.core as mx

from ..kernels.mxfp8 import scale_value, scaled_groups

FP4_MAX, FP4_EXPONENT = 6.0, 2  # the largest value of E2M1, and its power of two
_SIGN = 31  # the bit of a float32


@mx.custom_function
def mxfp4_fake_quantize(w: mx.array) -> mx.array:
    """The values that ``w [..., in]`` has after packing to MXFP4, in ``w``'s dtype.

    The gradient is that of the identity.

    Raises:
        UnsupportedError: ``in`` is no multiple of 32.
    """
    values, scales = _round_fp4(w)
    return (values * scale_value(scales)).reshape(w.shape).astype(w.dtype)


@mxfp4_fake_quantize.vjp
def _straight_through(primal, cotangent, output):
    return cotangent


def mxfp4_pack(w: mx.array) -> tuple[mx.array, mx.array]:
    """The bytes of ``w [..., in]`` in the release's format.

    Returns:
        Codes uint8 ``[..., in/2]``, two a byte, the low nibble first, and scales uint8
        ``[..., in/32]``, worth ``2^(s - 127)``.

    Raises:
        UnsupportedError: ``in`` is no multiple of 32.
    """
    values, scales = _round_fp4(w)
    size = mx.abs(values)
    codes = mx.where(size < 2, 2 * size, mx.where(size < 4, size + 2, size / 2 + 4))
    codes = codes.astype(mx.uint8) | (values.view(mx.uint32) >> _SIGN << 3).astype(mx.uint8)
    codes = codes.reshape(w.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales.squeeze(-1).astype(mx.uint8)


def _round_fp4(w: mx.array) -> tuple[mx.array, mx.array]:
    """E2M1 values ``[..., in/32, 32]`` float32 and scales ``[..., in/32, 1]`` int32."""
    groups, scales = scaled_groups(w, FP4_EXPONENT)
    size = mx.abs(groups)
    step = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    # Every step's multiples are the codes in order, so that rounding to even finds the even code.
    return mx.clip(mx.round(groups / step) * step, -FP4_MAX, FP4_MAX), scales
