"""A model's cache taken apart and put together again: what belongs to a token, what to a text.

A cache object that can be trimmed holds something for each token: every array of its ``state``
has the tokens on the last axis but one, and ``offset`` says how many there are (mlx-lm's KVCache,
and quantized ones). Any other (ArraysCache, for a KDA layer) holds what all tokens before have
made together. Only caches of one row.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

Arrays = dict[str, mx.array]
"""Layer and place in the cache object's ``state`` -> array."""


def tokens_held(cache: Sequence[Any]) -> int | None:
    """How many tokens the cache holds, None where no layer counts them."""
    return next((c.offset for c in cache if c.is_trimmable()), None)


def bytes_per_token(cache: Sequence[Any]) -> int:
    """What one token takes in the cache."""
    return sum(
        x.nbytes // x.shape[-2]
        for i, c in enumerate(cache)
        if c.is_trimmable()
        for x in _arrays(i, c).values()
    )


def total_bytes(arrays: Arrays) -> int:
    """Bytes of all ``arrays``."""
    return sum(x.nbytes for x in arrays.values())


def token_arrays(cache: Sequence[Any], start: int, end: int) -> Arrays:
    """What belongs to the tokens ``start`` to ``end``, in arrays of its own."""
    if start == end:
        return {}
    return {
        name: mx.contiguous(x[..., start:end, :])
        for i, c in enumerate(cache)
        if c.is_trimmable()
        for name, x in _arrays(i, c).items()
    }


def state_arrays(cache: Sequence[Any]) -> Arrays:
    """What all tokens together have made."""
    return {
        name: mx.contiguous(x)
        for i, c in enumerate(cache)
        if not c.is_trimmable()
        for name, x in _arrays(i, c).items()
    }


def rebuild(fresh: list[Any], spans: Sequence[Arrays], state: Arrays, tokens: int) -> list[Any]:
    """``fresh``, an empty cache, with the content that ``spans`` and ``state`` were taken from.

    ``spans`` are :func:`token_arrays` that follow each other and cover ``tokens``.
    """
    names = spans[0].keys() if spans else ()
    joined = {name: mx.concatenate([s[name] for s in spans], axis=-2) for name in names}
    for i, c in enumerate(fresh):
        source = joined if c.is_trimmable() else state
        prefix = f"{i}."
        arrays = {k.removeprefix(prefix): x for k, x in source.items() if k.startswith(prefix)}
        empty = {k: v for k, v in tree_flatten(c.state) if not any(_within(a, k) for a in arrays)}
        c.state = tree_unflatten(list((empty | arrays).items()))
        if c.is_trimmable():
            c.offset = tokens
    return fresh


def layout(cache: Sequence[Any]) -> str:
    """What tells caches apart that cannot stand in for each other, of an empty cache."""
    return "; ".join(f"{type(c).__name__} {tree_flatten(c.state)}" for c in cache)


def _arrays(layer: int, cache: Any) -> Arrays:
    return {
        f"{layer}.{name}": x for name, x in tree_flatten(cache.state) if isinstance(x, mx.array)
    }


def _within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")
