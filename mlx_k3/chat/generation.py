"""One answer: prompt ids in, text and events out, on mlx-lm's generation loop.

Owns what a prompt may be, sampling, and what an answer consists of and cost. Knows nothing of
earlier turns; :mod:`mlx_k3.chat.session` does.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate as mlx_lm_stream
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from ..errors import K3Error, UnsupportedError
from ..experts.usage import Usage
from .demand import Meter, prompt_in_layers
from .tokenizer import only_known_ids
from .xtml import encode_text
from .xtml_parser import Event, ReplyParser

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]


@dataclass(frozen=True)
class Reply:
    """A whole answer. ``ids`` are all that were generated, a stop token included.

    ``finish_reason`` is ``stop`` (the model ended it) or ``length`` (``max_tokens`` reached).
    ``cached_tokens`` of the prompt's tokens were not computed again. ``generation_tps`` is 0 for
    an answer of one token, which has no speed. With experts on demand, ``usage`` is what the
    answer read, ``decode_usage`` what it read after its first token.
    """

    message: dict[str, Any]
    ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    prompt_tps: float
    generation_tps: float
    peak_memory_bytes: int
    usage: Usage | None = None
    decode_usage: Usage | None = None

    @property
    def text(self) -> str:
        """The answer proper, without the thinking. Empty if only thinking was generated."""
        return self.message["content"]

    @property
    def reasoning(self) -> str:
        """The thinking before the answer."""
        return self.message.get("reasoning_content", "")


@dataclass(frozen=True)
class Chunk:
    """What one more token brought. The last chunk of an answer has the whole as ``reply``."""

    token: int
    events: list[Event]
    reply: Reply | None = None

    @property
    def text(self) -> str:
        """New text of the answer proper."""
        return "".join(event.text for event in self.events if event.kind == "content")

    @property
    def reasoning(self) -> str:
        """New text of the thinking."""
        return "".join(event.text for event in self.events if event.kind == "reasoning")


class PlainParser:
    """Reads text that has no channels: all of it is content."""

    ended = False  # only a stop token ends a text

    def __init__(self, tokenizer: TokenizerWrapper):
        self._detokenizer = tokenizer.detokenizer
        self._stop = tokenizer.eos_token_ids

    @property
    def message(self) -> dict[str, Any]:
        """What has been said so far."""
        return {"role": "assistant", "content": self._detokenizer.text}

    def feed(self, token: int) -> list[Event]:
        """The text ``token`` completes, as content."""
        if token not in self._stop:
            self._detokenizer.add_token(token)
        return self._news()

    def finish(self) -> list[Event]:
        """What is left of a character that will not be completed."""
        self._detokenizer.finalize()
        return self._news()

    def closing(self) -> None:
        """Nothing is known of how a template ends a message."""
        return None

    def _news(self) -> list[Event]:
        text = self._detokenizer.last_segment
        return [Event("content", text)] if text else []


class _NoText(StreamingDetokenizer):
    def reset(self) -> None:
        self.offset, self.tokens, self.text = 0, [], ""

    def add_token(self, token: int) -> None:
        self.tokens.append(token)

    def finalize(self) -> None:
        pass


class IdsOnly(TokenizerWrapper):
    """Stands in where a model has no tokenizer: ids stay ids, an answer ends on ``stop_ids``."""

    def __init__(self, stop_ids: Sequence[int] = ()):
        self._eos_token_ids = set(stop_ids)
        self._detokenizer = _NoText()


@dataclass
class Sampling:
    """How tokens are chosen and how many. ``max_tokens`` None is no limit; ``temp`` 0 the best."""

    max_tokens: int | None = 4096
    temp: float = 0.0
    top_p: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise K3Error(f"max_tokens is {self.max_tokens}; an answer has at least 1")
        if self.temp < 0:
            raise K3Error(f"the temperature is {self.temp}; it can be 0 or more")
        if not 0 < self.top_p <= 1:
            raise K3Error(f"top_p is {self.top_p}; it can be above 0 and up to 1")


def run(
    model: Any,
    tokenizer: TokenizerWrapper,
    ids: Sequence[int],
    parser: ReplyParser | PlainParser,
    sampling: Sampling,
    *,
    cached_tokens: int = 0,
) -> Iterator[Chunk]:
    """Continue ``ids`` (of which the cache in ``sampling.options`` has the first few).

    Whenever a chunk is yielded, the cache holds the prompt and all tokens up to that chunk's.
    """
    options = dict(sampling.options)
    sampler = options.pop("sampler", None) or make_sampler(sampling.temp, sampling.top_p)
    if not isinstance(tokenizer, IdsOnly):
        sampler = only_known_ids(sampler, tokenizer)
    limit = -1 if sampling.max_tokens is None else sampling.max_tokens
    new = mx.array(ids[cached_tokens:])
    generated: list[int] = []
    meter = Meter(model)
    with (
        prompt_in_layers(model, options) as options,
        closing(
            mlx_lm_stream(model, tokenizer, new, limit, sampler=sampler, **options)
        ) as responses,
    ):
        for response in responses:
            if not generated:
                meter.first_token()
            generated.append(response.token)
            events = parser.feed(response.token)
            finish_reason = response.finish_reason or ("stop" if parser.ended else None)
            if finish_reason is None:
                yield Chunk(response.token, events)
                continue
            events = [*events, *parser.finish()]
            usage, decode_usage = meter.usage()
            reply = Reply(
                message=parser.message,
                ids=generated,
                finish_reason=finish_reason,
                prompt_tokens=len(ids),
                cached_tokens=cached_tokens,
                prompt_tps=response.prompt_tps,
                generation_tps=meter.tokens_per_second(len(generated)),
                peak_memory_bytes=mx.get_peak_memory(),
                usage=usage,
                decode_usage=decode_usage,
            )
            yield Chunk(response.token, events, reply)
            return


def stream_generate(
    model: Any,
    tokenizer: TokenizerWrapper | None,
    prompt: Prompt,
    *,
    system: str | None = None,
    max_tokens: int | None = 4096,
    temp: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    raw: bool = False,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> Iterator[Chunk]:
    """Answer ``prompt``, a chunk per token.

    A text is a user's message (with ``raw`` a text to continue), a list of messages a
    conversation, a list of ids is continued as it is. A model without tokenizer (None, or
    :class:`IdsOnly` with the ids that end an answer) takes ids only. ``options`` go to mlx-lm's
    ``generate_step`` (``sampler``, ``prompt_cache``, ...).

    Raises:
        K3Error: a prompt or option that does not fit the model.
    """
    sampling = Sampling(max_tokens, temp, top_p, options)
    tokenizer = IdsOnly() if tokenizer is None else tokenizer
    if len(prompt) == 0:
        raise K3Error("the prompt is empty")
    if isinstance(prompt, str) and not raw:
        prompt = [{"role": "user", "content": prompt}]
    is_conversation = isinstance(prompt[0], dict)
    if isinstance(tokenizer, IdsOnly) and (is_conversation or isinstance(prompt, str)):
        raise UnsupportedError("this model has no tokenizer; give token ids (--ids 1,2,3)")
    if not is_conversation and (system is not None or tools):
        raise UnsupportedError("a text or ids to continue have no system message and no tools")

    parser: ReplyParser | PlainParser
    if is_conversation:
        if system is not None:
            prompt = [{"role": "system", "content": system}, *prompt]
        settings = {"tools": tools, "thinking": thinking, "thinking_effort": thinking_effort}
        ids = conversation_ids(tokenizer, prompt, **settings)
        parser = reply_parser(tokenizer, thinking)
    else:
        is_text = isinstance(prompt, str)
        ids = encode_text(prompt, tokenizer) if is_text else [int(i) for i in prompt]
        parser = PlainParser(tokenizer)
    if seed is not None:
        mx.random.seed(seed)
    return run(model, tokenizer, ids, parser, sampling)


def generate(
    model: Any, tokenizer: TokenizerWrapper | None, prompt: Prompt, **options: Any
) -> str | list[int]:
    """The answer to ``prompt``; see :func:`stream_generate` for the options.

    Returns:
        The text without the thinking (or of a continued text, the continuation); the generated
        ids if there is no tokenizer.
    """
    reply = None
    for chunk in stream_generate(model, tokenizer, prompt, **options):
        reply = chunk.reply
    assert reply is not None  # the loop's last chunk has it
    return reply.ids if tokenizer is None else reply.text


def conversation_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[dict[str, Any]], **settings: Any
) -> list[int]:
    """The prompt of a conversation in the model's own format.

    Raises:
        UnsupportedError: the model has none, or not these settings.
    """
    if tokenizer.speaks_xtml:
        return tokenizer.apply_chat_template(messages, **settings)
    if tokenizer.chat_template is None:
        raise UnsupportedError("this model has no chat format; continue a text with --raw")
    if not settings.get("thinking", True):
        raise UnsupportedError("this model's chat format has no thinking to switch off")
    return tokenizer.apply_chat_template(messages, tools=settings.get("tools"))


def reply_parser(tokenizer: TokenizerWrapper, thinking: bool) -> ReplyParser | PlainParser:
    """What reads the answer to a conversation's prompt."""
    if tokenizer.speaks_xtml:
        return ReplyParser(tokenizer.table, "think" if thinking else "response")
    return PlainParser(tokenizer)
