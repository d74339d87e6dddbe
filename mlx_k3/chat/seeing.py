"""What the generation loop does for a prompt with pictures.

Owns how pictures reach mlx-lm's loop, and that whoever waits may leave while one is looked at.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..loader import require_vision
from ..media.medium import Medium
from ..media.placing import plain_ids
from ..models.embeddings import PromptEmbeddings


def with_pictures(
    model: Any, ids: Sequence[int], media: Sequence[Medium], options: dict[str, Any]
) -> tuple[mx.array, dict[str, Any]]:
    """What mlx-lm's loop takes for ``ids``, some of them places of ``media``: ids that a vocabulary
    knows, and ``options`` with their embeddings.

    A ``prompt_progress_callback`` is called between the tower's blocks too, with what it was told
    last: it may end the work by raising.

    Raises:
        UnsupportedError: the model sees nothing.
    """
    if all(token >= 0 for token in ids):
        return mx.array(ids), options
    eyes = require_vision(model)
    callback, said = options.get("prompt_progress_callback"), (0, len(ids))

    def progress(done: int, total: int) -> None:
        nonlocal said
        said = done, total
        callback(done, total)

    def encode(medium: Medium) -> mx.array:
        return eyes.encode(medium, callback and (lambda: callback(*said)))

    embed = model.model.embed_tokens
    options = {**options, "input_embeddings": PromptEmbeddings(embed, encode, ids, media)}
    if callback is not None:
        options["prompt_progress_callback"] = progress
    return mx.array(plain_ids(ids, model.config.media_placeholder_token_id)), options
