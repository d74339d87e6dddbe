"""How well a model foretells a text.

Owns windows and sums. Knows a tokenizer's table and a model's protocol only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

PASS_TOKENS = 512  # whose logits exist at once


@dataclass(frozen=True)
class TextScore:
    """``nats`` is the sum of what each of ``tokens`` cost, ``-ln p``; they spell ``bytes``."""

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean over tokens; it depends on the tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2) / self.bytes


def score_text(
    model: Any,
    table: Any,
    ids: Sequence[int],
    *,
    window_tokens: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> TextScore:
    """Score all of ``ids`` but the first, each from those before it in its window.

    Args:
        model: in mlx-lm's protocol.
        table: the tokenizer's :class:`~mlx_k3.chat.tokenizer.TokenTable`.
        ids: the text, at least two tokens.
        window_tokens: how many tokens are read before the model forgets and begins anew.
        progress: called with the number of tokens scored since its last call.
    """
    nats = 0.0
    for start in range(0, len(ids) - 1, window_tokens):
        # One more than is read: a window's last token foretells the next one's first.
        window = ids[start : start + window_tokens + 1]
        cache = model.make_cache()
        for first in range(0, len(window) - 1, PASS_TOKENS):
            part = mx.array(window[first : first + PASS_TOKENS + 1])
            logits = model(part[None, :-1], cache=cache)[0].astype(mx.float32)
            chosen = mx.take_along_axis(logits, part[1:, None], axis=-1)[:, 0]
            nats += (mx.logsumexp(logits, axis=-1) - chosen).sum().item()
            progress(len(part) - 1)
    return TextScore(nats, len(ids) - 1, sum(len(table.pieces[i]) for i in ids[1:]))
