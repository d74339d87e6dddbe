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
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import K3Error, UnsupportedError
from ..experts.usage import Usage
from ..media.medium import Medium
from ..media.placing import expand
from .attaching import Source, attach, attachments, media_of, question
from .demand import Meter, prompt_in_layers
from .plain import IdsOnly, PlainParser
from .preparing import prepare
from .prompt_cache import PromptCache
from .reading import Reading
from .seeing import with_pictures
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
    media: Sequence[Medium] = (),
) -> Iterator[Chunk]:
    """Continue ``ids`` (of which the cache in ``sampling.options`` has the first few).

    Ids below zero are places of ``media``; pictures that the cache has are not looked at again.

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
    new, options = with_pictures(model, ids[cached_tokens:], media, options)
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
    images: Sequence[Source] = (),
    videos: Sequence[Source] = (),
    prompts: PromptCache | None = None,
    **options: Any,
) -> Iterator[Chunk]:
    """Answer ``prompt``, a chunk per token.

    A text is a user's message (with ``raw`` a text to continue), a list of messages a
    conversation, a list of ids is continued as it is. A model without tokenizer (None, or
    :class:`IdsOnly` with the ids that end an answer) takes ids only.

    ``response_format`` (``"json_object"``, or OpenAI's ``json_schema``) and ``tool_choice``
    (``"required"``, ``"none"`` or a tool) are said to the model, and enforced.

    ``images`` (paths, the bytes of files, Pillow images, arrays) and ``videos`` (paths, bytes)
    stand before a text; in messages they take the places of parts ``{"type": "image"}`` and
    ``"video"``, in ids those of the model's pad, one each (a video one a clip).

    What ``prompts`` has of the prompt is not read again. ``options`` go to mlx-lm's
    ``generate_step`` (as ``sampler``).

    Raises:
        K3Error: a prompt or option that does not fit the model.
    """
    sampling = Sampling(max_tokens, temp, top_p, options)
    tokenizer = IdsOnly() if tokenizer is None else tokenizer
    if len(prompt) == 0:
        raise K3Error("the prompt is empty")
    if isinstance(prompt, str) and not raw:
        prompt = [question(prompt, attachments(model, images, videos))]
        images = videos = ()
    is_conversation = isinstance(prompt[0], dict)
    if isinstance(tokenizer, IdsOnly) and (is_conversation or isinstance(prompt, str)):
        raise UnsupportedError("this model has no tokenizer; give token ids (--ids 1,2,3)")
    if raw and (images or videos):
        raise UnsupportedError("a text to continue has no place for pictures; leave out raw")
    settings = {"tools": tools, "tool_choice": tool_choice, "response_format": response_format}
    if not is_conversation and (system is not None or any(settings.values())):
        raise UnsupportedError(
            "a text or ids to continue have no system message, no tools and no response format"
        )

    if is_conversation:
        if system is not None:
            prompt = [{"role": "system", "content": system}, *prompt]
        settings |= {"thinking": thinking, "thinking_effort": thinking_effort}
        prompt = attach(prompt, model, images=images, videos=videos)
        media = media_of(prompt)
        ids, parser, processors = prepare(tokenizer, prompt, **settings)
        if processors:
            options["logits_processors"] = [*options.get("logits_processors", ()), *processors]
    else:
        is_text = isinstance(prompt, str)
        ids = encode_text(prompt, tokenizer) if is_text else [int(i) for i in prompt]
        media = [medium for shown in attachments(model, images, videos) for medium in shown.media]
        if media:
            ids = expand(ids, media, model.config.media_placeholder_token_id)
        parser = PlainParser(tokenizer)
    if seed is not None:
        mx.random.seed(seed)
    return run(
        model,
        tokenizer,
        ids,
        parser,
        sampling,
        prompts=prompts,
        **({"media": media} if media else {}),
    )


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
