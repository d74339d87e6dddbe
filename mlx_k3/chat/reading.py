"""Which states of a prompt are worth keeping, and keeping them while it is read.

People go on from the end of an answer, ask again, edit their last message, or begin a new
conversation with the same instructions: states are kept at the ends of prompts and answers, where
the first and the last message of the user begin, and, in long prompts, at distances from the end
that grow eightfold, so that a change near the end costs little. Knows the loop of mlx-lm, which
reads all but a prompt's last token in steps.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache

from ..models.state import RecordedState
from . import xtml
from .cache_parts import state_arrays
from .prefix_tree import BLOCK_TOKENS
from .prompt_cache import Found, PromptCache

Progress = Callable[[int, int], None]

KEEP_SECONDS = 60.0  # Of reading a prompt, that at most are lost when it is interrupted.
_GROWTH = 8


def user_turns(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Where in a conversation's ``ids`` the user's messages begin.

    With a template for a chat format: where any message but the first does.
    """
    if not getattr(tokenizer, "speaks_xtml", False):
        return [i + 1 for i, token in enumerate(ids) if token in tokenizer.eos_token_ids]
    opening = xtml.encode(xtml.open_tag("message", role="user")[:-1], tokenizer)
    n = len(opening)
    return [i for i, t in enumerate(ids) if t == opening[0] and list(ids[i : i + n]) == opening]


def stops(ids: Sequence[int], start: int, tokenizer: Any) -> list[int]:
    """Where states are worth keeping when ``ids`` are read from ``start`` on, the best first."""
    end = len(ids) - 1  # The last token is read together with the answer.
    turns = user_turns(ids, tokenizer)
    wanted = [end, *turns[-1:], *turns[:1]]
    distance = BLOCK_TOKENS
    while distance < end - start:
        place = (end - distance) // BLOCK_TOKENS * BLOCK_TOKENS
        if all(abs(place - other) >= BLOCK_TOKENS for other in wanted):
            wanted.append(place)
        distance *= _GROWTH
    return [place for place in dict.fromkeys(wanted) if start < place <= end]


class Reading:
    """A prompt on its way through mlx-lm's loop, and its answer: ``prompts`` keeps what is useful.

    >>> with Reading(prompts, tokenizer, ids, generated, options, cached_tokens) as reading:
    ...     loop = stream_generate(..., ids[cached_tokens:], **reading.watch(options))
    ...     for response in reading.answer(loop):
    ...         generated.append(response.token)

    Args:
        prompts: where to keep it; None keeps nothing, and nothing here does anything.
        tokenizer: tells where messages begin.
        ids: the prompt.
        generated: the answer's ids, which the caller puts in as they come.
        options: of the loop; their ``prompt_cache`` holds the first ``cached_tokens`` of ``ids``.
    """

    def __init__(
        self,
        prompts: PromptCache | None,
        tokenizer: Any,
        ids: Sequence[int],
        generated: list[int],
        options: dict[str, Any],
        cached_tokens: int,
    ):
        self._prompts, self._ids, self._generated = prompts, ids, generated
        self._start = cached_tokens
        self._cache: list[Any] = [] if prompts is None else options["prompt_cache"]
        self._stops: list[int] = []
        if prompts is not None:
            wanted = stops(ids, cached_tokens, tokenizer)
            self._stops = sorted(wanted[: prompts.make_room(len(wanted))])
        self._found: list[Found] = []  # Not kept yet.
        self._passing: str | None = None  # Key of a state that the next one makes superfluous.
        self._kept_at = time.monotonic()
        self._at_a_token = False  # Whether the cache holds exactly the prompt and `generated`.

    def __enter__(self) -> "Reading":
        for i, cache in enumerate(self._cache):
            if isinstance(cache, ArraysCache):
                self._cache[i] = RecordedState(cache, self._start, self._stops)
        return self

    def __exit__(self, *_: object) -> None:
        if self._prompts is None:
            return
        self._stop_recording()
        self._keep()
        if self._at_a_token:
            self._prompts.store([*self._ids, *self._generated], self._cache)

    def watch(self, options: dict[str, Any]) -> dict[str, Any]:
        """``options`` for mlx-lm's loop, with a progress callback that collects states."""
        if self._prompts is None:
            return options
        callback = options.get("prompt_progress_callback", lambda *_: None)

        def progress(done: int, total: int) -> None:
            self._read(done, total)
            try:
                callback(done, total)
            except BaseException:  # Someone does not want to wait any longer.
                self._find_here(done, total)
                raise

        return {**options, "prompt_progress_callback": progress}

    def answer(self, responses: Iterable[Any]) -> Iterator[Any]:
        """The loop's ``responses``. What the prompt left is kept once the first is out."""
        for n, response in enumerate(responses):
            if n == 1:
                self._keep()
            self._at_a_token = True
            yield response
            self._at_a_token = False

    def _keep(self) -> str | None:
        """Keep what was found; the last one's key."""
        if self._prompts is None or not self._found:
            return None
        keys = [self._prompts.keep(found) for found in self._found]
        self._found.clear()
        self._kept_at = time.monotonic()
        if self._passing is not None:
            self._prompts.forget(self._passing)
            self._passing = None
        return keys[-1]

    def _read(self, done: int, total: int) -> None:
        """``done`` of ``total`` new tokens are in the cache."""
        if done == total:
            return  # The answer has begun, and the cache is a token ahead.
        position, stop = self._start + done, 0
        while self._stops and self._stops[0] <= position:
            stop = self._stops.pop(0)
            self._find(stop, [_at(c, stop) for c in self._cache])
        if done == total - 1:
            self._stop_recording()
            if not all(map(self._prompts.fits_memory, self._found)):
                self._keep()
            return
        is_passing = stop != position and time.monotonic() - self._kept_at > KEEP_SECONDS
        if is_passing:
            self._find_here(done, total)
        key = self._keep()
        self._passing = key if is_passing else self._passing

    def _find_here(self, done: int, total: int) -> None:
        """Where the text has been read to; nothing where it had been before, or if it is over."""
        if 0 < done < total:
            self._find(self._start + done, [_now(c) for c in self._cache])

    def _find(self, end: int, cache: list[Any]) -> None:
        self._found.append(Found(list(self._ids[:end]), list(self._cache), state_arrays(cache)))

    def _stop_recording(self) -> None:
        self._cache[:] = [_now(c) for c in self._cache]


def _at(cache: Any, stop: int) -> Any:
    return cache.at(stop) if isinstance(cache, RecordedState) else cache


def _now(cache: Any) -> Any:
    return cache.now() if isinstance(cache, RecordedState) else cache
