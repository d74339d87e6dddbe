"""Precision of the trunk: what each ``--trunk`` choice quantizes, to what, and how far off.

Owns the quantization parameters and their cost. Knows nothing about files. MLX is imported only
when something is quantized.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint.names import MlxTensor
from ..errors import UnsupportedError

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True)
class Profile:
    """One way of storing a weight. ``bits`` None: as it is in the source.

    ``max_error`` bounds ``|stored - source| / |source|`` (Frobenius) of any tensor whatever its
    values. For affine modes the worst group of 64 has one large value: the error of each value is
    at most half a step, so sqrt(64) / 2 / (2^bits - 1) * sqrt(2), plus bfloat16 rounding of scale
    and bias. For the mx modes it is half a step of the element format, relative to the value, and
    the loss of what is small beside its group's largest.
    """

    name: str
    bits: int | None = None
    group_size: int = 0
    mode: str = ""
    max_error: float = 0.0

    @property
    def mlx(self) -> dict[str, int | str]:
        """The parameters as mlx-lm writes them in ``config.json``."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def applies(self, tensor: MlxTensor) -> bool:
        """Whether this profile quantizes ``tensor``; the last dimension must fill its groups."""
        wanted = tensor.role in ("linear", "embedding", "expert") and self.bits is not None
        return wanted and tensor.shape[-1] % self.group_size == 0

    def stored(
        self, tensor: MlxTensor, dtype: str
    ) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        """``(name, (dtype, shape))`` of the tensors that a quantized ``tensor`` is stored as."""
        *rows, width = tensor.shape
        groups = (*rows, width // self.group_size)
        yield f"{tensor.module}.weight", ("U32", (*rows, width * self.bits // 32))
        if self.mode == "affine":
            yield f"{tensor.module}.scales", (dtype, groups)
            yield f"{tensor.module}.biases", (dtype, groups)
        else:
            yield f"{tensor.module}.scales", ("U8", groups)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("bf16"),
        Profile("mxfp8", 8, 32, "mxfp8", 0.065),
        Profile("q8", 8, 64, "affine", 0.06),
        Profile("q6", 6, 64, "affine", 0.14),
        Profile("q4", 4, 64, "affine", 0.45),
    )
}
MXFP4 = Profile("mxfp4", 4, 32, "mxfp4", 0.3)


def profile(name: str) -> Profile:
    """The trunk profile called ``name``.

    Raises:
        UnsupportedError: if there is none.
    """
    if name not in PROFILES:
        raise UnsupportedError(f"--trunk {name}: choose one of {', '.join(PROFILES)}")
    return PROFILES[name]


@dataclass
class Error:
    """Accumulated squared error and squared size of what was quantized."""

    error: float = 0.0
    size: float = 0.0

    def add(self, other: "Error") -> None:
        """Take ``other`` in."""
        self.error += other.error
        self.size += other.size

    @property
    def relative(self) -> float:
        """Frobenius norm of the error over that of the source."""
        return math.sqrt(self.error / self.size) if self.size else 0.0


def quantize(rows: np.ndarray, dtype: str, how: Profile) -> tuple[list[np.ndarray], Error]:
    """Quantize ``rows`` [..., width] as :meth:`Profile.stored` lays them out, and say how far off.

    ``dtype`` is the safetensors name of what ``rows`` holds (bfloat16 comes as uint16).
    """
    import mlx.core as mx

    weight = to_mlx(rows, dtype)
    parts = mx.quantize(weight, group_size=how.group_size, bits=how.bits, mode=how.mode)
    mx.eval(parts)
    error = compare(weight, parts, how)
    return [_to_numpy(part) for part in parts], error


def compare(weight: "mx.array", parts: list["mx.array"], how: Profile) -> Error:
    """The error of quantized ``parts`` against the MLX array ``weight``."""
    import mlx.core as mx

    stored = mx.dequantize(
        *parts, group_size=how.group_size, bits=how.bits, mode=how.mode, dtype=mx.float32
    )
    weight = weight.astype(mx.float32)
    difference = weight - stored.astype(mx.float32)
    sums = [(x * x).sum() for x in (difference, weight)]
    mx.eval(sums)
    return Error(*(float(x.item()) for x in sums))


def to_mlx(array: np.ndarray, dtype: str) -> "mx.array":
    """A numpy array as MLX sees it; ``dtype`` tells bfloat16 from uint16."""
    import mlx.core as mx

    result = mx.array(array)
    return result.view(mx.bfloat16) if dtype == "BF16" else result


def _to_numpy(array: "mx.array") -> np.ndarray:
    import mlx.core as mx

    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
