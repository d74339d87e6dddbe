"""What the body of a request may be.

Owns the fields, their types and bounds, and how a mistake is told. A field that would be ignored
is refused, but for those that only describe the request. Knows no model.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from .errors import ApiError

Text = Annotated[str, StringConstraints(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Window = Annotated[int, Field(ge=1, le=1 << 20)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Strict(BaseModel):
    # Strict: true is no 1, and "1" is no 1.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Loose(BaseModel):
    # What a client got in an answer it sends back in the next request, with all it holds.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Part(_Loose):
    """A part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(_Loose):
    """What an assistant's message called."""

    name: Text
    arguments: str | dict[str, Any] = ""


class ToolCall(_Loose):
    """One call of an assistant's message."""

    id: str | None = None
    function: CalledFunction


class Message(_Loose):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(_Loose):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Loose):
    """A declared tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(_Strict):
    """The name in a tool choice."""

    name: str


class ChosenTool(_Strict):
    """A tool choice that names a function."""

    type: Literal["function"]
    function: ChosenFunction


class Thinking(_Strict):
    """Whether to think, in another provider's form."""

    type: Literal["enabled", "disabled"]


class TemplateOptions(_Strict):
    """Settings of the chat format by their own names."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: Literal["low", "high", "max"] | None = None


class ResponseFormat(_Loose):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Request(_Strict):
    """What both kinds of completion share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Text | list[Text] | None = None
    seed: int | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Share = 0.0
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Window | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Window | None = None
    repetition_penalty: Annotated[float, Field(ge=0)] | None = None
    repetition_context_size: Window | None = None

    # These describe a request and change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(Request):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Request):
    """The body of ``/v1/completions``."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None


Body = TypeVar("Body", bound=Request)


def parse(kind: type[Body], raw: bytes) -> tuple[Body, dict[str, Any]]:
    """The body, and what it was parsed from.

    Raises:
        ApiError: it is not JSON, or not what ``kind`` may be; the first mistake is told.
    """
    try:
        # Nesting has an end here, so that nothing later can exhaust the stack.
        given = from_json(raw, allow_inf_nan=False)
    except ValueError as e:
        raise ApiError(400, f"the body is not valid JSON: {e}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        body = kind.model_validate(given)
    except ValidationError as e:
        raise _mistake(e, given) from None
    if body.stream_options is not None and not body.stream:
        message = "stream_options needs stream to be true"
        raise ApiError(400, message, param="stream_options", code="invalid_value")
    return body, given


def _mistake(error: ValidationError, given: dict[str, Any]) -> ApiError:
    # Of the members of a union the one that got furthest tells most.
    mistakes = [(_place(e["loc"], given, e["type"]), e) for e in error.errors(include_url=False)]
    param, mistake = max(mistakes, key=lambda pair: len(pair[0]))
    if mistake["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {param}", param=param, code="unknown_parameter")
    if mistake["type"] == "missing":
        message = f"{param} is required"
        return ApiError(400, message, param=param, code="missing_required_parameter")
    return ApiError(400, f"{param}: {mistake['msg']}", param=param, code="invalid_value")


def _place(location: Sequence[str | int], given: Any, mistake: str) -> str:
    """``messages[0].content``: a location in ``given`` without pydantic's names of types."""
    place, here = "", given
    for i, key in enumerate(location):
        is_missing = mistake == "missing" and i == len(location) - 1
        if isinstance(key, int) and isinstance(here, list) and key < len(here):
            place, here = f"{place}[{key}]", here[key]
        elif isinstance(here, dict) and (key in here or is_missing):
            place, here = f"{place}.{key}" if place else str(key), here.get(key)
    return place
