"""Rounding to MXFP4 and MXFP8 while training, with a gradient that passes straight through.

Owns the rule by which a weight becomes the release's bytes (OCP Microscaling, version 1.0): 32
numbers share a power of two, which puts the largest of them between 4 and 8 (MXFP4) or 256 and
512 (MXFP8), and each number goes to the nearest value of its format, a tie to the even code; what
lies beyond the largest value becomes that. ``mx.quantize`` takes the next power of two for groups
whose largest number would lie above 6 here, and on a CPU sends ties towards zero. Knows nothing of
models.
"""

import mlx.core as mx

from ..errors import UnsupportedError

GROUP = 32
FP4_MAX, FP4_EXPONENT = 6.0, 2  # the largest value of E2M1, and its power of two
FP8_MAX, FP8_EXPONENT = 448.0, 8  # of E4M3
_SIGN = 31  # the bit of a float32


@mx.custom_function
def mxfp4_fake_quantize(w: mx.array) -> mx.array:
    """The values that ``w [..., in]`` has after packing to MXFP4, in ``w``'s dtype.

    The gradient is that of the identity.

    Raises:
        UnsupportedError: ``in`` is no multiple of 32.
    """
    values, scales = _round_fp4(w)
    return (values * _power(scales)).reshape(w.shape).astype(w.dtype)


@mx.custom_function
def mxfp8_round(x: mx.array) -> mx.array:
    """The values that ``x [..., D]`` has after rounding to MXFP8 (E4M3), in ``x``'s dtype.

    The gradient is that of the identity.

    Raises:
        UnsupportedError: ``D`` is no multiple of 32.
    """
    groups, scales = _scaled_groups(x, FP8_EXPONENT)
    values = mx.from_fp8(mx.to_fp8(mx.clip(groups, -FP8_MAX, FP8_MAX)), mx.float32)
    return (values * _power(scales)).reshape(x.shape).astype(x.dtype)


def _straight_through(primal, cotangent, output):
    return cotangent


mxfp4_fake_quantize.vjp(_straight_through)
mxfp8_round.vjp(_straight_through)


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
    groups, scales = _scaled_groups(w, FP4_EXPONENT)
    size = mx.abs(groups)
    step = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    # Every step's multiples are the codes in order, so that rounding to even finds the even code.
    return mx.clip(mx.round(groups / step) * step, -FP4_MAX, FP4_MAX), scales


def _scaled_groups(x: mx.array, exponent: int) -> tuple[mx.array, mx.array]:
    """Groups divided by their scales ``[..., in/32, 32]``, and the scales' bytes, int32."""
    if x.shape[-1] % GROUP:
        raise UnsupportedError(
            f"a tensor of shape {x.shape} has rows of {x.shape[-1]}; "
            f"MX formats take multiples of {GROUP}, choose the model's sizes so"
        )
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = mx.abs(groups).max(-1, keepdims=True)
    # The exponent bits are floor(log2) + 127, without a logarithm's rounding.
    scales = mx.maximum((largest.view(mx.int32) >> 23) - exponent, 0)
    return groups * _power(254 - scales), scales


def _power(byte: mx.array) -> mx.array:
    """``2^(byte - 127)`` float32 for bytes 0 to 254, by its bits; 2^-127 has its own form."""
    return mx.where(byte == 0, 1 << 22, byte << 23).astype(mx.int32).view(mx.float32)
