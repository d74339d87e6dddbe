"""What pictures take in memory: the tower, and the largest picture on its way through it."""

import math
from typing import NamedTuple

from ..checkpoint.index import Checkpoint
from ..checkpoint.names import vision_tensors
from ..checkpoint.reader import NUMPY_DTYPES
from ..config import VISION_PARTS, K3Config, VisionConfig
from ..media.processor import Processor
from .machine import Device

# Of the tower's code; a test compares them.
BLOCK_PATCHES = 1024
TILE_BYTES = {"cpu": 8 << 20, "metal": 128 << 20, "cuda": 128 << 20}

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


class StoredVision(NamedTuple):
    """A tower as the headers have it, and the most patches of a picture."""

    config: VisionConfig
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    patches: int


def stored_vision(
    config: K3Config, processor: Processor, checkpoint: Checkpoint | None = None
) -> StoredVision | None:
    """The tower in ``checkpoint``, or as the release stores it; None for a model without.

    Raises:
        CheckpointError, UnsupportedError: the settings make no sense, or are not implemented.
    """
    if config.vision_config is None or config.media_placeholder_token_id is None:
        return None
    if checkpoint is None:
        tensors = {t.name: ("BF16", t.shape) for t in vision_tensors(config)}
    else:
        infos = {n: checkpoint.info(n) for n in checkpoint.files if n.startswith(VISION_PARTS)}
        tensors = {name: (info.dtype, info.shape) for name, info in infos.items()}
    if not tensors:
        return None
    # Rounding and padding add a few to what the release counts.
    patches = processor.in_patch_limit * 33 // 32
    return StoredVision(VisionConfig.from_dict(config.vision_config), tensors, patches)


def vision_bytes(
    vision: StoredVision, device: Device, dtype: str | None, scratch_bytes: int
) -> int:
    """Weights; one picture's vectors, which stay while the prompt is read; and what a picture needs
    for the moment beyond ``scratch_bytes``, which nothing else uses meanwhile."""
    weights = {name: _stored_bytes(*tensor, dtype) for name, tensor in vision.tensors.items()}
    width = max(
        _WIDTHS[dtype] if dtype else NUMPY_DTYPES[stored].itemsize
        for stored, _ in vision.tensors.values()
    )
    rows, columns = vision.config.merge_kernel_size
    vectors = vision.patches // (rows * columns) * vision.config.text_hidden_size * width
    moment = picture_bytes(vision, device, width)
    return sum(weights.values()) + vectors + max(moment - scratch_bytes, 0)


def picture_bytes(vision: StoredVision, device: Device, width: int) -> int:
    """The most that the largest picture needs at a time, with numbers of ``width`` bytes.

    By patch: its pixels; the embedding and a block's input; keys and values, of which one of the
    two is there in parts as well while they are joined. And a block's MLP, and a tile's scores.
    """
    c = vision.config
    patch = 3 * c.patch_size**2 + (2 * c.vt_hidden_size + 3 * c.qkv_hidden_size) * width
    block = min(BLOCK_PATCHES, vision.patches) * 4 * c.vt_intermediate_size * 4
    return vision.patches * patch + block + 3 * TILE_BYTES[device]


def _stored_bytes(stored: str, shape: tuple[int, ...], dtype: str | None) -> int:
    return math.prod(shape) * (_WIDTHS[dtype] if dtype else NUMPY_DTYPES[stored].itemsize)
