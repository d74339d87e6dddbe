"""Greedy answers to many conversations at once, on mlx-lm's batched generation.

Owns who waits, who is being answered, and what has been read already: the settings that begin
many prompts are read once for all of them, and a conversation that goes on continues its own
cache. Knows nothing of what is asked or which answer is right.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..chat import xtml
from ..chat.attaching import media_of
from ..chat.seeing import with_pictures
from ..chat.tokenizer import only_known_ids
from ..chat.xtml_parser import ReplyParser
from ..media.medium import Medium

PROMPTS_AT_ONCE = 16  # prompts that are read together
PASS_TOKENS = 2048  # of all of them together, in one pass through the model


class Prompt(NamedTuple):
    """A conversation as ids, those of its ``media`` among them. ``settings`` of them, at the
    beginning, many prompts share."""

    ids: list[int]
    settings: int
    thinking: bool
    media: Sequence[Medium] = ()


@dataclass(frozen=True)
class Answer:
    """What the model said. ``finish_reason`` is ``stop``, or ``length`` at ``max_tokens``."""

    message: dict[str, Any]
    ids: list[int]
    finish_reason: str


class _Read(NamedTuple):
    """A cache and the ids in it."""

    ids: list[int]
    cache: list[Any] | None


_NOTHING = _Read([], None)


@dataclass
class _Open:
    """A conversation that is being answered."""

    name: Hashable
    parser: ReplyParser
    ids: list[int]


def render_prompt(
    tokenizer: TokenizerWrapper, messages: list[dict[str, Any]], **settings: Any
) -> Prompt:
    """The prompt of a conversation whose pictures are open; ``settings`` are those of
    :func:`mlx_k3.chat.xtml.render`.

    Raises:
        K3Error: the conversation does not fit the chat format.
    """
    rendered = xtml.render(messages, **settings)
    head = xtml.encode(rendered.head, tokenizer)
    rest = [segment for part in (*rendered.messages, rendered.tail) for segment in part]
    ids = head + xtml.encode(rest, tokenizer)
    return Prompt(ids, len(head), settings.get("thinking", True), media_of(messages))


class Batch:
    """Answers up to ``at_once`` conversations together.

    >>> batch = Batch(model, tokenizer, max_tokens=256)
    >>> batch.ask("first", render_prompt(tokenizer, messages))
    >>> for name, answer in batch.answers():
    ...     print(name, answer.message["content"])

    More may be asked while answers come. Asking under a name again goes on with its conversation.
    An answer is what the model would say alone, as far as sums in another order round alike.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TokenizerWrapper,
        *,
        max_tokens: int,
        at_once: int = 1,
        pass_tokens: int = PASS_TOKENS,
    ):
        prompts = min(at_once, PROMPTS_AT_ONCE)
        self._model, self._table, self._at_once = model, tokenizer.table, at_once
        self._generator = BatchGenerator(
            model,
            max_tokens=max_tokens,
            stop_tokens=[[i] for i in tokenizer.eos_token_ids],
            sampler=only_known_ids(lambda logprobs: mx.argmax(logprobs, axis=-1), tokenizer),
            completion_batch_size=at_once,
            prefill_batch_size=prompts,
            prefill_step_size=max(pass_tokens // prompts, 1),
        )
        self._waiting: list[tuple[Hashable, Prompt]] = []
        self._open: dict[int, _Open] = {}
        self._settings: dict[tuple[int, ...], _Read] = {}
        self._conversations: dict[Hashable, _Read] = {}

    def ask(self, name: Hashable, prompt: Prompt) -> None:
        """Put ``prompt`` in the queue."""
        self._waiting.append((name, prompt))

    def answers(self) -> Iterator[tuple[Hashable, Answer]]:
        """Answers in the order in which they end, until nothing is left to answer."""
        with closing(self._generator):
            while self._waiting or self._open:
                self._insert()
                for response in self._generator.next_generated():
                    if answer := self._take(response):
                        yield self._open.pop(response.uid).name, answer

    def _insert(self) -> None:
        """Hand over who waits, similar lengths beside each other: the longest pads the others."""
        due = self._due()
        if not due:
            return
        self._read_settings(due)
        waiting = [(name, p, self._already_read(name, p)) for name, p in due]
        waiting.sort(key=lambda entry: len(entry[1].ids) - len(entry[2].ids))
        uids = self._generator.insert(
            [p.ids[len(read.ids) :] for _, p, read in waiting],
            caches=[read.cache for _, _, read in waiting],
        )
        for uid, (name, p, _) in zip(uids, waiting, strict=True):
            parser = ReplyParser(self._table, "think" if p.thinking else "response")
            self._open[uid] = _Open(name, parser, [])

    def _due(self) -> list[tuple[Hashable, Prompt]]:
        """Who need not wait any longer. What a prompt with pictures is read into lies in memory
        from then on, so those wait until they can be answered."""
        due: list[tuple[Hashable, Prompt]] = []
        later = []
        for entry in self._waiting:
            is_full = len(self._open) + len(due) >= self._at_once
            (later if entry[1].media and is_full else due).append(entry)
        self._waiting = later
        return due

    def _read_settings(self, waiting: list[tuple[Hashable, Prompt]]) -> None:
        """Read what several of those who wait begin with."""
        beginnings = Counter(tuple(p.ids[: p.settings]) for _, p in waiting if p.settings)
        for ids, count in beginnings.items():
            if count > 1 and ids not in self._settings:
                cache = self._model.make_cache()
                self._model(mx.array(ids)[None], cache=cache)
                mx.eval([layer.state for layer in cache])
                self._settings[ids] = _Read(list(ids), cache)

    def _already_read(self, name: Hashable, prompt: Prompt) -> _Read:
        """The most that is in a cache of how ``prompt`` begins. Its last token never is."""
        if prompt.media:
            return self._look(prompt)
        before = self._conversations.pop(name, _NOTHING)
        if before.cache is not None and prompt.ids[: len(before.ids)] == before.ids:
            return before
        return self._settings.get(tuple(prompt.ids[: prompt.settings]), _NOTHING)

    def _look(self, prompt: Prompt) -> _Read:
        """Read a prompt with pictures, for mlx-lm's batches take ids only."""
        ids, options = with_pictures(self._model, prompt.ids, prompt.media, {})
        before = options["input_embeddings"][:-1]
        cache = self._model.make_cache()
        self._model(ids[None, :-1], cache=cache, input_embeddings=before[None])
        mx.eval([layer.state for layer in cache])
        return _Read(prompt.ids[:-1], cache)

    def _take(self, response: GenerationBatch.Response) -> Answer | None:
        """One more token; the answer if it was the last."""
        conversation = self._open[response.uid]
        conversation.ids.append(response.token)
        conversation.parser.feed(response.token)
        reason = response.finish_reason
        if reason is None and conversation.parser.ended:
            self._generator.remove([response.uid])
            reason = "stop"
        if reason is None:
            return None
        conversation.parser.finish()
        message = conversation.parser.message
        if response.prompt_cache is not None and message.get("tool_calls"):
            cache = _own(response.prompt_cache)
            self._conversations[conversation.name] = _Read(response.all_tokens, cache)
        return Answer(message, conversation.ids, reason)


def _own(cache: list[Any]) -> list[Any]:
    """``cache``, of one row of a batch, in its own memory: a view would keep the whole batch."""

    def copied(part: Any) -> Any:
        return mx.contiguous(part) if isinstance(part, mx.array) else part

    for layer in cache:
        layer.state = tree_map(copied, layer.state)
    mx.eval([layer.state for layer in cache])
    return cache
