"""One answer: prompt ids in, text and events out, on mlx-lm's generation loop.

Owns what a prompt may be, sampling, and what an answer consists of and cost. Knows nothing of
earlier turns; :mod:`mlx_k3.chat.session` does.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import stream_generate as mlx_lm_stream
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import K3Error, UnsupportedError
from ..experts.usage import Usage
from .constraint import Constraint, constrain
from .demand import Meter, prompt_in_layers
from .plain import IdsOnly, PlainParser
from .prompt_cache import PromptCache
from .reading import Reading
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
    """What one more token brought. The last chunk of an answer has the whole as ``reply``.

    ``logprobs`` [rows] are those the token was chosen by, before the temperature.
    """

    token: int
    events: list[Event]
    reply: Reply | None = None
    logprobs: mx.array | None = None

    @property
    def text(self) -> str:
        """New text of the answer proper."""
        return "".join(event.text for event in self.events if event.kind == "content")

    @property
    def reasoning(self) -> str:
        """New text of the thinking."""
        return "".join(event.text for event in self.events if event.kind == "reasoning")


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
    prompts: PromptCache | None = None,
) -> Iterator[Chunk]:
    """Continue ``ids`` (of which the cache in ``sampling.options`` has the first few).

    Whenever a chunk is yielded, the cache holds the prompt and all tokens up to that chunk's.
    With ``prompts``, the cache is taken from there if none is given, and what may be of use later
    is kept there, also when the answer is not waited for.
    """
    options = dict(sampling.options)
    if prompts is not None and "prompt_cache" not in options:
        options["prompt_cache"], rest = prompts.fetch(ids)
        cached_tokens = len(ids) - len(rest)
    sampler = options.pop("sampler", None) or make_sampler(sampling.temp, sampling.top_p)
    if not isinstance(tokenizer, IdsOnly):
        sampler = only_known_ids(sampler, tokenizer)
    limit = -1 if sampling.max_tokens is None else sampling.max_tokens
    new = mx.array(ids[cached_tokens:])
    generated: list[int] = []
    meter = Meter(model)
    with (
        Reading(prompts, tokenizer, ids, generated, options, cached_tokens) as reading,
        prompt_in_layers(model, options) as options,
        closing(
            mlx_lm_stream(model, tokenizer, new, limit, sampler=sampler, **reading.watch(options))
        ) as responses,
    ):
        for response in reading.answer(responses):
            if not generated:
                meter.first_token()
            generated.append(response.token)
            events = parser.feed(response.token)
            finish_reason = response.finish_reason or ("stop" if parser.ended else None)
            if finish_reason is None:
                yield Chunk(response.token, events, logprobs=response.logprobs)
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
            yield Chunk(response.token, events, reply, response.logprobs)
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
    tool_choice: dict[str, Any] | str | None = None,
    response_format: dict[str, Any] | str | None = None,
    prompts: PromptCache | None = None,
    **options: Any,
) -> Iterator[Chunk]:
    """Answer ``prompt``, a chunk per token.

    A text is a user's message (with ``raw`` a text to continue), a list of messages a
    conversation, a list of ids is continued as it is. A model without tokenizer (None, or
    :class:`IdsOnly` with the ids that end an answer) takes ids only.

    ``response_format`` (``"json_object"``, or OpenAI's ``json_schema``) and ``tool_choice``
    (``"required"``, ``"none"`` or a tool) are said to the model, and enforced. What ``prompts`` has
    of the prompt is not read again. ``options`` go to mlx-lm's ``generate_step`` (as ``sampler``).

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
    settings = {"tools": tools, "tool_choice": tool_choice, "response_format": response_format}
    if not is_conversation and (system is not None or any(settings.values())):
        raise UnsupportedError(
            "a text or ids to continue have no system message, no tools and no response format"
        )

    if is_conversation:
        if system is not None:
            prompt = [{"role": "system", "content": system}, *prompt]
        settings |= {"thinking": thinking, "thinking_effort": thinking_effort}
        ids, parser, processors = prepare(tokenizer, prompt, **settings)
        if processors:
            options["logits_processors"] = [*options.get("logits_processors", ()), *processors]
    else:
        is_text = isinstance(prompt, str)
        ids = encode_text(prompt, tokenizer) if is_text else [int(i) for i in prompt]
        parser = PlainParser(tokenizer)
    if seed is not None:
        mx.random.seed(seed)
    return run(model, tokenizer, ids, parser, sampling, prompts=prompts)


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


class Prepared(NamedTuple):
    """A conversation that is ready to be answered."""

    ids: list[int]
    parser: ReplyParser | PlainParser
    processors: list[Constraint]
    """Of logits: what keeps the answer to its format. They serve one answer."""


def prepare(
    tokenizer: TokenizerWrapper,
    messages: Sequence[dict[str, Any]],
    *,
    thinking: bool = True,
    parallel_tool_calls: bool = True,
    **settings: Any,
) -> Prepared:
    """Render ``messages`` under ``settings``: ``thinking_effort``, ``tools``, ``tool_choice`` and
    ``response_format``, the last two in any of OpenAI's forms.

    Raises:
        K3Error: a message or a setting does not fit the model.
    """
    enforced = {key: settings.get(key) for key in ("tools", "tool_choice", "response_format")}
    constraint = constrain(
        tokenizer, thinking=thinking, parallel_tool_calls=parallel_tool_calls, **enforced
    )
    if isinstance(settings.get("tool_choice"), dict):
        settings["tool_choice"] = "required"  # the format has no word for a certain tool
    ids = conversation_ids(tokenizer, messages, thinking=thinking, **settings)
    return Prepared(ids, reply_parser(tokenizer, thinking), [constraint] if constraint else [])


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
