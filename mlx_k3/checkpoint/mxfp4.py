"""MXFP4 in numpy: what the bytes of a packed weight mean.

A byte holds two codes, the low nibble first; 32 columns share a scale byte ``s``, worth
``2^(s - 127)``. The converter never needs this: it moves the bytes unread. It is the yardstick
for what others make of them.
"""

import numpy as np

GROUP = 32
# The sixteen codes of E2M1; 8 to 15 are the negatives, -0 included.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Byte -> its two values, low nibble first.
PAIRS = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], axis=-1)


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Scale bytes -> float32 powers of two; 255 is NaN, as the specification has it."""
    values = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return np.where(scales == 255, np.float32(np.nan), values)


def decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """packed uint8 [..., in/2], scales uint8 [..., in/32] -> float32 [..., in].

    Products beyond float32 (scale bytes 253 and 254) become infinite.
    """
    groups = PAIRS[packed].reshape(*scales.shape, GROUP)
    with np.errstate(over="ignore"):
        values = groups * scale_values(scales)[..., None]
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
