"""What the generation loop does for a model that was loaded into a budget of memory.

Owns the size of a prompt's steps, and for experts that come from the disk on demand, progress
inside a step and what an answer has read.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..experts.usage import Usage

Progress = Callable[[int, int], None]
"""Called with tokens of the prompt done, and all there are; what it raises ends the answer."""


@contextmanager
def prompt_in_layers(model: Any, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Options for mlx-lm's loop: as much of a prompt goes through each layer as was planned for.

    Experts on demand are then read once for all of these tokens, and a
    ``prompt_progress_callback`` is called after every layer: a step can take minutes.
    """
    offload = getattr(model, "offload", None)
    step = options.get("prefill_step_size") or getattr(model, "prompt_tokens", 2048)
    options = {**options, "prefill_step_size": step}
    if offload is None:
        yield options
        return
    callback = options.get("prompt_progress_callback")
    if callback is not None:
        progress = _LayerProgress(callback, len(offload.store.experts.layers), step)
        options["prompt_progress_callback"] = progress.between_steps
        offload.store.on_layer = progress.in_a_step
    try:
        yield options
    finally:
        offload.store.on_layer = None


class _LayerProgress:
    """Counts layers between the calls that mlx-lm makes."""

    def __init__(self, callback: Progress, layers: int, step: int):
        self._callback, self._layers, self._step = callback, layers, step
        self._done = self._total = self._layer = 0

    def between_steps(self, done: int, total: int) -> None:
        self._done, self._total, self._layer = done, total, 0
        self._callback(done, total)

    def in_a_step(self, _: int) -> None:
        left = self._total - self._done
        if left == 0:
            return  # The answer has begun.
        # mlx-lm takes the prompt's last token by itself.
        tokens = min(self._step, max(left - 1, 1))
        part = min(self._layer, self._layers) / self._layers
        self._layer += 1
        # The whole is mlx-lm's to report, once the answer's first token is known.
        self._callback(min(self._done + int(tokens * part), self._total - 1), self._total)


class Meter:
    """Time and reads of an answer, in all and from its first token on."""

    def __init__(self, model: Any):
        self._offload = getattr(model, "offload", None)
        self._begin = self._usage()
        self._first: Usage | None = None
        self._first_time = 0.0

    def first_token(self) -> None:
        """The prompt is read. (mlx-lm has computed the second token by now as well.)"""
        self._first, self._first_time = self._usage(), time.perf_counter()

    def tokens_per_second(self, tokens: int) -> float:
        """Speed of an answer of ``tokens``, from its first on; 0 where there is only that."""
        return (tokens - 1) / (time.perf_counter() - self._first_time)

    def usage(self) -> tuple[Usage | None, Usage | None]:
        """Of the whole answer, and of it without the prompt. None without experts on demand."""
        now = self._usage()
        return (None, None) if now is None else (now - self._begin, now - self._first)

    def _usage(self) -> Usage | None:
        return None if self._offload is None else self._offload.usage()
