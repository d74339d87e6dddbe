"""The vision tower of a loaded model: read when the first picture comes, never before.

Owns when its weights are read and in which precision it computes. What a picture becomes is the
processor's and the tower's business.
"""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from .checkpoint.index import LocalFolder, open_checkpoint
from .config import VISION_PARTS, K3Config, VisionConfig
from .media.medium import Medium
from .media.processor import Processor
from .models.vision import BLOCK_PATCHES, PatchEmbedding, Vision
from .models.weights import check_parameters


class Eyes:
    """Pictures as vectors for the model in ``folder``.

    Args:
        folder: it holds a tower; see :func:`has_tower`.
        config: of the model.
        dtype: of the tower's weights and arithmetic; None is as stored, and float32 on a CPU.

    Raises:
        CheckpointError: the settings make no sense.
        UnsupportedError: they ask for what is not implemented.
    """

    def __init__(self, folder: Path, config: K3Config, dtype: str | None = None):
        self._folder, self._dtype = folder, dtype
        self._config = VisionConfig.from_dict(config.vision_config or {})
        self.processor = Processor.from_folder(folder)
        self._vision: Vision | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the tower is in memory."""
        return self._vision is not None

    def encode(self, medium: Medium, on_block: Callable[[], None] | None = None) -> mx.array:
        """The vectors of ``medium``, computed: ``[tokens, text hidden]``.

        ``on_block`` is called between the tower's blocks; what it raises ends the work.

        Raises:
            CheckpointError: the tower's weights are missing or damaged.
        """
        if self._vision is None:
            self._vision = self._load()
        return encode(self._vision, medium, on_block)

    def _load(self) -> Vision:
        tower = Vision(self._config)
        weights: dict[str, mx.array] = {}
        files = open_checkpoint(LocalFolder(self._folder)).files
        for file in sorted({f for name, f in files.items() if name.startswith(VISION_PARTS)}):
            weights |= mx.load(str(self._folder / file))  # mapped; others' tensors are never read
        weights = tower.sanitize(weights)
        check_parameters(tower, weights, str(self._folder))
        dtype = self._dtype or ("float32" if mx.default_device() == mx.cpu else None)
        if dtype is not None:
            weights = {name: array.astype(getattr(mx, dtype)) for name, array in weights.items()}
        tower.load_weights(list(weights.items()))
        tower.eval()
        mx.eval(tower.parameters())
        return tower


def encode(vision: Vision, medium: Medium, on_block: Callable[[], None] | None = None) -> mx.array:
    """The vectors of ``medium``, computed: ``[tokens, text hidden]``."""
    tower, grid = vision.vision_tower, medium.grid
    x = tower.encoder(_embedded(tower.patch_embed, medium), grid, on_block)
    features = tower.merged(x, grid)
    parts = []
    for start in range(0, medium.tokens, BLOCK_PATCHES):
        parts.append(vision.mm_projector(features[:, start : start + BLOCK_PATCHES]))
        mx.eval(parts[-1])
    vectors = mx.concatenate(parts, axis=1)[0]
    mx.eval(vectors)
    mx.clear_cache()
    return vectors


def _embedded(embedding: PatchEmbedding, medium: Medium) -> mx.array:
    """All patches ``[1, N, hidden]``; what they are read as is there for a few at a time only."""
    parts = []
    for start in range(0, len(medium.pixels), BLOCK_PATCHES):
        pixels = mx.array(medium.values(start, start + BLOCK_PATCHES))[None]
        parts.append(embedding.proj(pixels.astype(embedding.proj.weight.dtype)))
        mx.eval(parts[-1])
    return embedding.place(mx.concatenate(parts, axis=1), medium.grid)


def has_tower(folder: Path, config: K3Config) -> bool:
    """Whether the model in ``folder`` can see. Some builds leave out the tower of one that could.

    Raises:
        CheckpointError: the folder is incomplete.
    """
    if config.vision_config is None or config.media_placeholder_token_id is None:
        return False
    return any(name.startswith(VISION_PARTS) for name in open_checkpoint(LocalFolder(folder)).files)
