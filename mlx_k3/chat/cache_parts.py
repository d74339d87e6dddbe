"""A model's cache taken apart and put together again: what belongs to a token, what to a text.

A cache object that can be trimmed holds something for each of ``offset`` tokens: it gives them
away as ``rows``, or every array of its ``state`` has the tokens on the last axis but one (mlx-lm's
KVCache, and quantized ones). Any other (ArraysCache, for a KDA layer) holds what all tokens before
have made together. Only caches of one text.
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
    return total_bytes(token_arrays(cache, 0, 1))


def total_bytes(arrays: Arrays) -> int:
    """Bytes of all ``arrays``."""
    return sum(x.nbytes for x in arrays.values())


def token_arrays(cache: Sequence[Any], start: int, end: int) -> Arrays:
    """What belongs to the tokens ``start`` to ``end``, in arrays of its own."""
    if start == end:
        return {}
    return {
        f"{i}.{name}": x
        for i, c in enumerate(cache)
        if c.is_trimmable()
        for name, x in _rows(c, start, end).items()
    }


def state_arrays(cache: Sequence[Any]) -> Arrays:
    """What all tokens together have made."""
    return {
        f"{i}.{name}": mx.contiguous(x)
        for i, c in enumerate(cache)
        if not c.is_trimmable()
        for name, x in _arrays(c).items()
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
        if hasattr(c, "set_rows"):
            c.set_rows(arrays["0"], arrays["1"])
            continue
        empty = {k: v for k, v in tree_flatten(c.state) if not any(_within(a, k) for a in arrays)}
        c.state = tree_unflatten(list((empty | arrays).items()))
        if c.is_trimmable():
            c.offset = tokens
    return fresh


def layout(cache: Sequence[Any]) -> str:
    """What tells caches apart that cannot stand in for each other, of an empty cache."""
    return "; ".join(f"{type(c).__name__} {tree_flatten(c.state)}" for c in cache)


def _rows(cache: Any, start: int, end: int) -> Arrays:
    if hasattr(cache, "rows"):
        latents, keys = cache.rows(start, end)
        return {"0": latents, "1": keys}
    return {name: mx.contiguous(x[..., start:end, :]) for name, x in _arrays(cache).items()}


def _arrays(cache: Any) -> Arrays:
    return {name: x for name, x in tree_flatten(cache.state) if isinstance(x, mx.array)}


def _within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")
