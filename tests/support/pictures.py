"""The golden pictures, and pictures of the tests' own."""

from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from mlx_k3.media.medium import Medium
from mlx_k3.media.processor import Processor

MEDIA = ("image0", "clip", "image1")
"""In the order in which the golden file packs them."""
PROMPTS = {"image": ["image0"], "clip": ["clip"], "mixed": list(MEDIA)}


def golden_arrays(golden: Path) -> dict[str, np.ndarray]:
    """What the reference makes of them."""
    return load_file(golden / "tiny-multimodal" / "expected.safetensors")


def golden_media(golden: Path) -> dict[str, Medium]:
    """The golden pictures, prepared."""
    arrays = golden_arrays(golden)
    processor = Processor.from_folder(golden / "tiny-multimodal")
    images = {name: Image.fromarray(arrays[f"media.{name}.rgb"]) for name in ("image0", "image1")}
    media = {name: processor.image(image) for name, image in images.items()}
    frames = [Image.fromarray(frame) for frame in arrays["media.clip.rgb"]]
    return {**media, "clip": processor.clip(frames)}


def unpacked(array: np.ndarray, media: dict[str, Medium]) -> dict[str, np.ndarray]:
    """A packed golden array, picture by picture."""
    ends = np.cumsum([len(media[name].pixels) for name in MEDIA])
    assert ends[-1] == len(array)
    return dict(zip(MEDIA, np.split(array, ends[:-1]), strict=True))


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture that nothing else looks like."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), np.uint8)
    return Image.fromarray(values.squeeze(-1) if bands == 1 else values, mode)


def relative_error(got, want) -> float:
    """The largest difference over the largest number, in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()
