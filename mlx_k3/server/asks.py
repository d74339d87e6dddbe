"""From a request's body to what the model is asked: ids, a parser, and how to sample.

Owns what OpenAI's fields mean here: efforts, tool choices, stop texts, penalties, and room in the
context. Knows nothing of HTTP and queues.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..chat.attaching import media_of
from ..chat.generation import PlainParser, Sampling
from ..chat.preparing import prepare
from ..chat.xtml import MEDIA_PARTS, encode_text
from ..chat.xtml_parser import ReplyParser
from ..errors import UnsupportedError
from ..media.medium import Medium
from .bodies import ChatRequest, CompletionRequest, Message, Request
from .errors import ApiError
from .pictures import Pictures

Processor = Callable[[mx.array, mx.array], mx.array]

# The format knows three efforts; None is no thinking at all.
EFFORTS = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
# Penalties count the whole answer, unless a request says how far back.
_WHOLE = 1 << 20


@dataclass(frozen=True)
class Defaults:
    """What holds where a request says nothing."""

    max_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass
class Ask:
    """What the model is asked. ``top_logprobs`` None means no log-probabilities are wanted."""

    ids: list[int]
    parser: ReplyParser | PlainParser
    sampling: Sampling
    stop: list[str]
    seed: int | None
    top_logprobs: int | None
    media: list[Medium] = field(default_factory=list)
    """What the prompt shows."""


class Asker:
    """Makes what one model is asked. Used by one thread at a time, as its tokenizer must be.

    ``context_tokens`` is what a prompt and its answer may have together; ``pictures`` opens what
    messages show.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        context_tokens: int,
        defaults: Defaults,
        pictures: Pictures,
    ):
        self._tokenizer, self._context, self._defaults = tokenizer, context_tokens, defaults
        self._pictures = pictures
        self._newline = encode_text("\n", tokenizer)

    def chat(self, request: ChatRequest, given: dict[str, Any]) -> Ask:
        """Of a conversation; ``given`` is the body as it came.

        Raises:
            K3Error: a message or a setting does not fit the model.
        """
        for i, message in enumerate(request.messages):
            _check_parts(message, f"messages[{i}]")
        thinking, effort = _thinking(request)
        if not self._tokenizer.speaks_xtml and effort != "max":
            raise UnsupportedError("this model's chat format has no thinking effort")
        messages = self._pictures.opened(given["messages"])
        ids, parser, processors = prepare(
            self._tokenizer,
            [_system_if_developer(message) for message in messages],
            thinking=thinking,
            thinking_effort=effort,
            # As they came: the model reads a declaration's own words.
            tools=given.get("tools"),
            tool_choice=given.get("tool_choice"),
            response_format=given.get("response_format"),
            parallel_tool_calls=request.parallel_tool_calls is not False,
        )
        if request.top_logprobs is not None and not request.logprobs:
            message = "top_logprobs needs logprobs to be true"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        top = (request.top_logprobs or 0) if request.logprobs else None
        limit = request.max_completion_tokens or request.max_tokens
        ask = self._ask(request, "messages", ids, parser, processors, limit, top)
        ask.media = media_of(messages)
        return ask

    def completion(self, request: CompletionRequest) -> Ask:
        """Of a text to continue.

        Raises:
            K3Error: there is more than one prompt, or it does not fit the model.
        """
        prompt: Any = request.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                message = "more than one prompt; send a request for each"
                raise ApiError(400, message, param="prompt", code="unsupported_value")
            prompt = prompt[0]
        ids = encode_text(prompt, self._tokenizer) if isinstance(prompt, str) else prompt
        pieces = self._tokenizer.table.pieces
        if not ids or not all(0 <= i < len(pieces) and pieces[i] is not None for i in ids):
            message = "the prompt is empty" if not ids else "an id that the tokenizer does not have"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        parser = PlainParser(self._tokenizer)
        return self._ask(request, "prompt", ids, parser, [], request.max_tokens, request.logprobs)

    def _ask(
        self,
        request: Request,
        param: str,
        ids: list[int],
        parser: ReplyParser | PlainParser,
        processors: list[Processor],
        limit: int | None,
        top: int | None,
    ) -> Ask:
        room = self._context - len(ids)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(ids):,} tokens; the server's context is {self._context:,} "
                "for a prompt and its answer (--context)",
                param=param,
                code="context_length_exceeded",
            )
        options = {
            "sampler": self._sampler(request),
            # A format is enforced last: no bias gets past it.
            "logits_processors": [*self._processors(request), *processors],
        }
        sampling = Sampling(min(limit or self._defaults.max_tokens, room), options=options)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        seed = None if request.seed is None else request.seed % (1 << 64)
        return Ask(ids, parser, sampling, stop, seed, top)

    def _sampler(self, request: Request) -> Callable[[mx.array], mx.array]:
        given, otherwise = request, self._defaults
        if given.top_k >= len(self._tokenizer.table.pieces):
            raise ApiError(400, "top_k exceeds the vocabulary", param="top_k", code="invalid_value")
        return make_sampler(
            otherwise.temperature if given.temperature is None else given.temperature,
            otherwise.top_p if given.top_p is None else given.top_p,
            given.min_p,
            top_k=given.top_k,
            xtc_probability=given.xtc_probability,
            xtc_threshold=given.xtc_threshold,
            xtc_special_tokens=[*self._newline, *self._tokenizer.eos_token_ids],
        )

    def _processors(self, request: Request) -> list[Processor]:
        bias = {}
        for key, value in (request.logit_bias or {}).items():
            if not key.isdecimal() or int(key) >= len(self._tokenizer.table.pieces):
                message = f"logit_bias: {key!r} is no token id of this model"
                raise ApiError(400, message, param="logit_bias", code="invalid_value")
            bias[int(key)] = value
        processors = make_logits_processors(
            logit_bias=bias or None,
            repetition_penalty=request.repetition_penalty,
            repetition_context_size=request.repetition_context_size or _WHOLE,
            presence_penalty=request.presence_penalty,
            presence_context_size=request.presence_context_size or _WHOLE,
            frequency_penalty=request.frequency_penalty,
            frequency_context_size=request.frequency_context_size or _WHOLE,
        )
        return [_of_the_answer(processor) for processor in processors]


def _of_the_answer(processor: Processor) -> Processor:
    """``processor`` without the prompt's tokens, which OpenAI's penalties do not count."""
    prompt_tokens: int | None = None

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = len(tokens)
        return processor(tokens[prompt_tokens:], logits)

    return process


def _thinking(request: ChatRequest) -> tuple[bool, str]:
    """Whether to think, and how much. The more particular a field, the more it counts."""
    thinking, effort = True, "max"
    if request.reasoning_effort is not None:
        mapped = EFFORTS[request.reasoning_effort]
        thinking, effort = mapped is not None, mapped or effort
    if request.thinking is not None:
        thinking = request.thinking.type == "enabled"
    if (options := request.chat_template_kwargs) is not None:
        for said in (options.enable_thinking, options.thinking):
            thinking = thinking if said is None else said
        effort = options.thinking_effort or effort
    return thinking, effort


def _check_parts(message: Message, param: str) -> None:
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            if part.type != "text" and part.type not in MEDIA_PARTS:
                raise ApiError(
                    400,
                    f"a part of type {part.type!r}; text, image_url and video_url are known",
                    param=f"{param}.content[{i}]",
                    code="unsupported_content",
                )


def _system_if_developer(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "system"} if message["role"] == "developer" else message
