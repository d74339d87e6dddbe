"""A model that knows what comes next: it repeats transcripts, in mlx-lm's protocol.

Its cache holds the ids it has read, so a batch whose rows, padding or caches were mixed up makes it
lose its place, and it then says something else.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_k3.chat import xtml
from mlx_k3.tasks import Example, asked


class Oracle:
    """Continues any beginning of a transcript with it, and anything else with ``lost``."""

    offload = None

    def __init__(self, transcripts: Iterable[Sequence[int]], rows: int, lost: int):
        self._next = {}
        for ids in transcripts:
            for i in range(1, len(ids)):
                self._next[tuple(ids[:i])] = ids[i]
        self._rows, self._lost = rows, lost
        self.layers = [None]
        self.read_tokens = 0  # padding included

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """Logits ``[B, T, rows]``: 9 for the next token after the last one, else 0."""
        self.read_tokens += ids.size
        numbers = ids[:, None, :, None].astype(mx.float32)
        seen = np.array(cache[0].update_and_fetch(numbers, numbers)[0])[:, 0, :, 0].astype(int)
        padding = getattr(cache[0], "left_padding", None)
        starts = [0] * len(seen) if padding is None else padding.tolist()
        logits = np.zeros((*ids.shape, self._rows), np.float32)
        for row, (told, start) in enumerate(zip(seen.tolist(), starts, strict=True)):
            logits[row, -1, self._next.get(tuple(told[start:]), self._lost)] = 9
        return mx.array(logits)


def transcript(
    tokenizer: Any, before: list[dict[str, Any]], message: dict[str, Any], **settings: Any
) -> list[int]:
    """The ids of a conversation whose prompt ends after ``before`` and whose answer is ``message``.

    ``settings`` are those of :func:`mlx_k3.chat.xtml.render`.
    """
    thinking = settings.get("thinking", True)
    opening = xtml.encode(xtml.reply_opening(thinking), tokenizer)
    answer = xtml.render([*before, message], **settings).messages[-1]
    prompt = xtml.encode(xtml.render(before, **settings).segments, tokenizer)
    return prompt + xtml.encode(answer, tokenizer)[len(opening) :]


def transcripts(tokenizer: Any, example: Example, **settings: Any) -> list[list[int]]:
    """One for everything the model has to say in ``example``."""
    settings = {
        "tools": example.tools,
        "thinking": example.thinking,
        "thinking_effort": example.thinking_effort,
        "response_format": example.response_format,
        **settings,
    }
    return [
        transcript(tokenizer, example.messages[:i], example.messages[i], **settings)
        for i in range(len(asked(example)), len(example.messages))
        if example.messages[i]["role"] == "assistant"
    ]
