"""Conversations in token ids, on models that count what they read."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_k3.chat.generation import Reply, Sampling, run
from mlx_k3.chat.plain import IdsOnly, PlainParser
from mlx_k3.chat.prompt_cache import PromptCache


class Counting:
    """A model that notes how many tokens each of its calls reads."""

    def __init__(self, model: Any):
        self._model = model
        self.calls: list[int] = []

    def __call__(self, ids: mx.array, **options: Any) -> mx.array:
        self.calls.append(ids.shape[1])
        return self._model(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def read(self, generated: int) -> int:
        """Tokens of prompts read since the last time, ``generated`` having been."""
        # mlx-lm feeds every token that it generates, the last too.
        total, self.calls = sum(self.calls), []
        return total - generated


def answer(
    model: Any,
    ids: Sequence[int],
    prompts: PromptCache | None,
    tokens: int = 4,
    stop_ids: Sequence[int] = (),
    after: int | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> tuple[Reply | None, list[int]]:
    """The reply to ``ids`` and its ids; closed ``after`` so many tokens, there is no reply."""
    tokenizer = tokenizer or IdsOnly(stop_ids)
    sampling = Sampling(tokens, options=options)
    reply, generated = None, []
    chunks = run(model, tokenizer, ids, PlainParser(tokenizer), sampling, prompts=prompts)
    for chunk in chunks:
        generated.append(chunk.token)
        reply = chunk.reply
        if len(generated) == after:
            chunks.close()
            break
    return reply, generated


class FakeModel:
    """Caches of two layers, whose content follows from the ids that were read.

    A state has ``width`` numbers.
    """

    def __init__(self, width: int = 1):
        self._width = width

    def make_cache(self) -> list[Any]:
        return [ArraysCache(2), KVCache()]

    def read(self, ids: Sequence[int], cache: list[Any]) -> list[Any]:
        """Take ``ids`` up into ``cache``."""
        state = 0 if cache[0][1] is None else int(cache[0][1][0, 0].item())
        for token in ids:  # Every order of every ids gives another.
            state = (state * 31 + token + 1) % 65521
        cache[0][0] = mx.array([[ids[-1]]], mx.bfloat16)
        cache[0][1] = mx.full((1, self._width), float(state))
        rows = mx.array(ids, mx.float32)[None, None, :, None]
        cache[1].update_and_fetch(mx.repeat(rows, 8, axis=-1), rows)
        return cache


def content(cache: list[Any]) -> list[Any]:
    """What a :class:`FakeModel`'s cache holds, comparable."""
    rows = cache[1].keys_and_values() if cache[1].offset else ()
    arrays = (x.astype(mx.float32) for x in (*cache[0].cache, *rows) if x is not None)
    return [(x.shape, bytes(memoryview(x))) for x in arrays]
