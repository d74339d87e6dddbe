"""A model that sees, with a tokenizer: the golden one with a token for every byte, and pictures."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mlx_k3.convert.stream import convert

from .releases import copy_release
from .vocabulary import write_ranks

_RANKS = 256
_IDS = {"bos_token_id": _RANKS, "eos_token_id": _RANKS + 2, "pad_token_id": _RANKS + 255}


def seeing_model(golden: Path, out: Path) -> Path:
    """``tiny-multimodal``, converted, with a vocabulary of bytes and the format's markers."""
    release = copy_release(golden / "tiny-multimodal", out / "release")
    write_ranks(release, {bytes([i]): i for i in range(_RANKS)})
    config = json.loads((release / "config.json").read_text())
    config |= _IDS | {"media_placeholder_token_id": _RANKS + 21}
    config["text_config"] |= _IDS
    (release / "config.json").write_text(json.dumps(config))
    convert(release, out / "model", trunk="bf16")
    return out / "model"


def photo(seed: int = 0, width: int = 60, height: int = 40) -> np.ndarray:
    """A picture of noise, ``[height, width, 3]``."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of it."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def parts(text: str, *images: Any) -> list[dict[str, Any]]:
    """A message's content: images, then a text."""
    shown = [{"type": "image", "image": image} for image in images]
    return [*shown, {"type": "text", "text": text}]
