"""Long inputs a block of tokens at a time, so that what a layer makes on the way stays small."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx

BLOCK_TOKENS = 512


def token_blocks(tokens: int, cuts: Sequence[int] = ()) -> Iterator[slice]:
    """Slices of at most ``BLOCK_TOKENS`` that cover ``range(tokens)``; one ends at every cut."""
    for first, last in pairwise([0, *cuts, tokens]):
        for start in range(first, last, BLOCK_TOKENS):
            yield slice(start, min(start + BLOCK_TOKENS, last))


def in_blocks(f: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """``f(x)`` for an ``f`` that treats tokens alike, ``x [B, T, ...]``."""
    if x.shape[1] <= BLOCK_TOKENS:
        return f(x)
    return mx.concatenate([f(x[:, block]) for block in token_blocks(x.shape[1])], axis=1)
