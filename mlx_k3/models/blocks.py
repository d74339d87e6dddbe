"""Long inputs a block of tokens at a time, so that what a layer makes on the way stays small."""

from collections.abc import Callable, Iterator

import mlx.core as mx

BLOCK_TOKENS = 512


def token_blocks(tokens: int) -> Iterator[slice]:
    """Slices of at most ``BLOCK_TOKENS`` that cover ``range(tokens)``."""
    for start in range(0, tokens, BLOCK_TOKENS):
        yield slice(start, min(start + BLOCK_TOKENS, tokens))


def in_blocks(f: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """``f(x)`` for an ``f`` that treats tokens alike, ``x [B, T, ...]``."""
    if x.shape[1] <= BLOCK_TOKENS:
        return f(x)
    return mx.concatenate([f(x[:, block]) for block in token_blocks(x.shape[1])], axis=1)
