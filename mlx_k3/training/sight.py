"""The model over a batch that may have pictures: their vectors in the places of their pads."""

import mlx.core as mx

from ..models.kimi import Model
from .pictures import Pictures


def logits(model: Model, ids: mx.array, pictures: Pictures | None = None) -> mx.array:
    """``[B, T, vocab]`` for ids ``[B, T]``; gradients reach the tower, ``model.vision``."""
    if pictures is None:
        return model(ids)
    return model(ids, input_embeddings=_embedded(model, ids, pictures))


def _embedded(model: Model, ids: mx.array, pictures: Pictures) -> mx.array:
    """``[B, T, hidden]``."""
    tower = model.vision.vision_tower
    colours = mx.arange(3)[:, None, None]
    values = mx.array(pictures.table)[mx.array(pictures.pixels), colours]
    values = values.astype(tower.patch_embed.proj.weight.dtype)
    vectors = model.vision(values, pictures.grid).flatten(0, 1)
    x = model.model.embed_tokens(ids)
    # One position more, for what is there for the shape alone.
    rows = mx.concatenate([x.flatten(0, 1), mx.zeros((1, x.shape[-1]), x.dtype)])
    rows[mx.array(pictures.places)] = vectors.astype(x.dtype)
    return rows[:-1].reshape(x.shape)
