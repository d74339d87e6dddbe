"""What is seen through the transparent parts of a picture."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError

if TYPE_CHECKING:
    from PIL.Image import Image

_PLAIN = {"white": 255, "gray": 128, "black": 0}


def is_transparent(picture: "Image") -> bool:
    """Whether a picture may have transparent parts. A colour that stands for "nothing" in a
    picture without palette is none: the release shows it as it is."""
    if picture.mode == "RGB":
        return False
    return "A" in picture.getbands() or "transparency" in picture.info


def opaque(picture: "Image", background: dict[str, Any] | None) -> "Image":
    """``picture`` in RGB, on the background that the release's settings describe.

    Raises:
        CheckpointError: they describe one that is not known.
    """
    from PIL import Image

    if background is None or not is_transparent(picture):
        return picture.convert("RGB")
    pixels = np.asarray(picture.convert("RGBA"))
    alpha = pixels[:, :, 3:].astype(np.float32) / 255
    behind = _background(*pixels.shape[:2], background)
    mixed = alpha * pixels[:, :, :3] + (1 - alpha) * behind
    return Image.fromarray(mixed.astype(np.uint8))


def _background(height: int, width: int, how: dict[str, Any]) -> np.ndarray:
    """``[height, width, 1]`` uint8."""
    pattern = how.get("pattern", "black")
    if pattern in _PLAIN:
        return np.full((height, width, 1), _PLAIN[pattern], np.uint8)
    if pattern != "chessboard":
        raise CheckpointError(
            f"preprocessor_config.json: transparent_bg_config has the pattern {pattern!r}; "
            f"known are chessboard, {', '.join(_PLAIN)}"
        )
    square = int(how.get("chessboard_square_size", 16))
    rows, columns = np.arange(height) // square, np.arange(width) // square
    odd = (rows[:, None] + columns) % 2 == 1
    is_white = ~odd if how.get("chessboard_square_on_top_left", True) else odd
    white, gray = how.get("chessboard_white_value", 255), how.get("chessboard_gray_value", 200)
    return np.where(is_white, white, gray).astype(np.uint8)[:, :, None]
