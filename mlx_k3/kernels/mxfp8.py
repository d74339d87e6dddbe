"""Rounding to MXFP8 (OCP Microscaling, version 1.0), and the scales that MX formats share.

32 numbers share a power of two, which puts the largest of them where the format's largest numbers
are; each goes to the nearest value of the format, a tie to the even code; what lies beyond the
largest value becomes that. ``mx.quantize`` chooses other scales.
"""

import mlx.core as mx

from ..errors import UnsupportedError

GROUP = 32
FP8_MAX, FP8_EXPONENT = 448.0, 8  # the largest value of E4M3, and its power of two


@mx.custom_function
def mxfp8_round(x: mx.array) -> mx.array:
    """The values that ``x [..., D]`` has after rounding to MXFP8 (E4M3), in ``x``'s dtype.

    The gradient is that of the identity.

    Raises:
        UnsupportedError: ``D`` is no multiple of 32.
    """
    groups, scales = scaled_groups(x, FP8_EXPONENT)
    values = mx.from_fp8(mx.to_fp8(mx.clip(groups, -FP8_MAX, FP8_MAX)), mx.float32)
    return (values * scale_value(scales)).reshape(x.shape).astype(x.dtype)


@mxfp8_round.vjp
def _straight_through(primal, cotangent, output):
    return cotangent


def scaled_groups(x: mx.array, exponent: int) -> tuple[mx.array, mx.array]:
    """Groups of ``x [..., D]`` divided by their scales, ``[..., D/32, 32]``, and the scales' bytes.

    A scale puts a group's largest number between ``2^exponent`` and twice that. The bytes are
    int32 ``[..., D/32, 1]``.

    Raises:
        UnsupportedError: ``D`` is no multiple of 32.
    """
    if x.shape[-1] % GROUP:
        raise UnsupportedError(
            f"a tensor of shape {x.shape} has rows of {x.shape[-1]}; "
            f"MX formats take multiples of {GROUP}, choose the model's sizes so"
        )
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = mx.abs(groups).max(-1, keepdims=True)
    # The exponent bits are floor(log2) + 127, without a logarithm's rounding.
    scales = mx.maximum((largest.view(mx.int32) >> 23) - exponent, 0)
    return groups * scale_value(254 - scales), scales


def scale_value(byte: mx.array) -> mx.array:
    """``2^(byte - 127)`` float32 for bytes 0 to 254, by its bits; 2^-127 has its own form."""
    return mx.where(byte == 0, 1 << 22, byte << 23).astype(mx.int32).view(mx.float32)
