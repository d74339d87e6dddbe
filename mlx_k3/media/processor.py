"""Pictures as the vision tower takes them: scaled, padded, cut into patches.

Owns the rules of the release's ``preprocessor_config.json``. Knows nothing of files: a picture is
a PIL image by now, turned the right way up.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, K3Error, UnsupportedError
from .medium import Medium
from .transparency import opaque

if TYPE_CHECKING:
    from PIL.Image import Image

FILE = "preprocessor_config.json"
STAGES = ("before_resize", "after_resize")

# Pictures whose values mean nothing between two neighbours.
_NOT_SCALABLE = ("1", "P", "PA")

_CHESSBOARD = {
    "pattern": "chessboard",
    "chessboard_square_size": 8,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 180,
}


class Size(NamedTuple):
    """What becomes of a picture: what it is scaled to, its grid of patches, and its vectors."""

    width: int
    height: int
    rows: int
    columns: int
    tokens: int


@dataclass(frozen=True)
class Processor:
    """The release's settings, by the names they have in ``media_proc_cfg``, and what they say."""

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536
    in_patch_limit_each_frame: int = 16384
    patch_limit_on_one_side: int = 512
    temporal_merge_kernel_size: int = 4
    sample_fps: float = 8.0
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    transparent_bg_config: dict[str, Any] | None = field(default_factory=lambda: _CHESSBOARD)
    transparent_bg_fill_stage: str = "after_resize"

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Processor":
        """The settings of the model in ``folder``; Kimi K3's own where it has no such file.

        Raises:
            CheckpointError: the file cannot be read, or makes no sense.
            UnsupportedError: it asks for what is not implemented.
        """
        path = Path(folder) / FILE
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except OSError as e:
            raise CheckpointError(f"{path}: {e.strerror}") from None
        except ValueError as e:
            raise CheckpointError(f"{path} is not valid JSON: {e}") from None
        try:
            return cls._read(content["media_proc_cfg"])
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            what = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) else str(e)
            raise CheckpointError(f"{path}: {what}") from None

    @classmethod
    def _read(cls, settings: dict[str, Any]) -> "Processor":
        if settings.get("fixed_output_tokens") is not None:
            raise UnsupportedError(f"{FILE}: fixed_output_tokens is not implemented")
        given = {f.name: settings[f.name] for f in fields(cls) if f.name in settings}
        merge = given.get("merge_kernel_size")
        if isinstance(merge, list):
            rows, columns = merge
            if rows != columns:
                raise ValueError(f"merge_kernel_size is {merge}; only squares are merged")
            given["merge_kernel_size"] = rows
        for name in ("image_mean", "image_std"):
            red, green, blue = given.get(name, (0.5, 0.5, 0.5))
            given[name] = float(red), float(green), float(blue)
        processor = cls(**given)
        for f in fields(cls):
            value = getattr(processor, f.name)
            if f.type in (int, float) and not value > 0:
                raise ValueError(f"{f.name} is {value}")
        if processor.transparent_bg_fill_stage not in STAGES:
            raise ValueError(f"transparent_bg_fill_stage is not one of {', '.join(STAGES)}")
        return processor

    @property
    def frames_per_clip(self) -> int:
        """The most frames that are seen together."""
        return self.temporal_merge_kernel_size

    @cached_property
    def _table(self) -> np.ndarray:
        """``[256, 3]`` float32: what the tower reads for a byte, in each colour."""
        table = (np.arange(256, dtype=np.float32)[:, None] / 255 - self.image_mean) / self.image_std
        return table.astype(np.float32)

    def image(self, picture: "Image") -> Medium:
        """A picture of any mode, as the tower takes it.

        Raises:
            K3Error: it has no pixels.
        """
        return self._medium([picture], self.size(*picture.size))

    def clip(self, frames: Sequence["Image"]) -> Medium:
        """A few frames of one size that follow each other: as many vectors as one of them.

        Raises:
            K3Error: none, more than a clip has, without pixels, or of different sizes.
        """
        if not 1 <= len(frames) <= self.frames_per_clip:
            raise K3Error(f"a clip of {len(frames)} frames; it has 1 to {self.frames_per_clip}")
        sizes = {frame.size for frame in frames}
        if len(sizes) > 1:
            raise K3Error("the frames of a clip differ in size; scale them to one")
        return self._medium(frames, self.size(*sizes.pop(), of_clip=True))

    def size(self, width: int, height: int, *, of_clip: bool = False) -> Size:
        """What becomes of a picture of this size, without looking at it.

        It shrinks until its patches are no more than the limits, and is never enlarged. The grid
        counts the padding that makes both sides multiples of what one vector covers.

        Raises:
            K3Error: it has no pixels.
        """
        if width < 1 or height < 1:
            raise K3Error(f"a picture of {width}x{height} pixels shows nothing")
        p = self.patch_size
        limit = self.in_patch_limit_each_frame if of_clip else self.in_patch_limit
        side = self.patch_limit_on_one_side * p
        # The release counts whole patches here, and padding may add a few beyond the limit.
        patches = max(width // p, 1) * max(height // p, 1)
        scale = min(1.0, math.sqrt(limit / patches), side / width, side / height)
        new_width = min(max(int(width * scale), 1), side)
        new_height = min(max(int(height * scale), 1), side)
        merge = self.merge_kernel_size
        rows, columns = (-(-n // (p * merge)) * merge for n in (new_height, new_width))
        return Size(new_width, new_height, rows, columns, rows * columns // merge**2)

    def _medium(self, frames: Sequence["Image"], size: Size) -> Medium:
        p, (rows, columns) = self.patch_size, (size.rows, size.columns)
        pixels = np.zeros((len(frames), rows * p, columns * p, 3), np.uint8)
        for i, frame in enumerate(frames):
            pixels[i, : size.height, : size.width] = np.asarray(self._scale(frame, size))
        pixels = pixels.reshape(len(frames), rows, p, columns, p, 3)
        pixels = pixels.transpose(0, 1, 3, 5, 2, 4).reshape(-1, 3, p, p)
        width, height = frames[0].size
        return Medium(
            pixels=pixels,
            grid=(len(frames), rows, columns),
            tokens=size.tokens,
            width=width,
            height=height,
            table=self._table,
        )

    def _scale(self, picture: "Image", size: Size) -> "Image":
        """The picture in RGB, of its new size, without padding."""
        from PIL.Image import Resampling

        background = self.transparent_bg_config
        if self.transparent_bg_fill_stage == "before_resize":
            picture = opaque(picture, background)
        elif picture.mode in _NOT_SCALABLE or picture.mode.startswith(("I", "F")):
            picture = picture.convert("RGBA")
        picture = picture.resize((size.width, size.height), Resampling.BICUBIC)
        return opaque(picture, background)
