"""Kimi K3's chat format, XTML, from messages to token ids.

Owns the layout: tags, channels, and the system messages that declare tools and settings. A
conversation becomes segments, each either a control token or ordinary text, and is encoded
segment by segment: nothing a person, a tool or a model writes can become a control token.
:mod:`mlx_k3.chat.xtml_parser` reads it back. Knows no model, and of pictures only their places.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import K3Error, UnsupportedError
from .tool_results import function_of, in_call_order

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END)
MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
EFFORTS = ("low", "high", "max")
# Types of content parts that are no text, in the forms in use.
MEDIA_PARTS = ("image", "image_url", "video", "video_url")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class Segment(NamedTuple):
    """A control token by its name, or a piece of ordinary text that is encoded on its own.

    ``ids`` of a picture stand in the place of its pad.
    """

    text: str
    is_control: bool
    ids: Sequence[int] = ()


class Rendered(NamedTuple):
    """A conversation in parts, so that a caller can keep the ids of a message it already has.

    ``messages[i]`` belongs to the i-th message given (tool results to the i-th after ordering).
    """

    head: list[Segment]
    messages: list[list[Segment]]
    tail: list[Segment]

    @property
    def segments(self) -> list[Segment]:
        """All parts in order."""
        return [*self.head, *(s for part in self.messages for s in part), *self.tail]


def encode(segments: Iterable[Segment], tokenizer: Any) -> list[int]:
    """Token ids. Control segments become their one id, all other text ordinary ids only.

    A picture has an id for each of its vectors; see :attr:`mlx_k3.media.medium.Medium.ids`.
    """
    ids: list[int] = []
    for text, is_control, given in segments:
        if given:
            ids += given
        elif is_control:
            ids.append(tokenizer.convert_tokens_to_ids(text))
        elif text:
            ids += encode_text(text, tokenizer)
    return ids


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Ordinary ids of ``text``; halves of surrogate pairs are joined or replaced."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def render(
    messages: Sequence[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: dict[str, Any] | str | None = None,
    add_generation_prompt: bool = True,
) -> Rendered:
    """Lay out a conversation.

    ``messages`` are OpenAI-style dicts with ``role`` user, system, assistant or tool. ``content``
    is text or a list of parts; of a picture or film, ``part["attachment"]`` is the opened
    :class:`~mlx_k3.media.attachments.Attachment`. An assistant message may hold
    ``reasoning_content`` and ``tool_calls``. Without ``thinking`` no think channel appears
    anywhere. The prompt ends with an open think or response channel.

    Raises:
        K3Error: a message or an option has no place in the format.
    """
    layout = _Layout(thinking)
    parts = [layout.message(message) for message in in_call_order(messages)]

    head = _declare(_TOOLS, tools) if tools else []
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise K3Error(f"thinking_effort is {thinking_effort!r}; it can be {', '.join(EFFORTS)}")
    if thinking and thinking_effort is not None:
        head += _system("thinking-effort", _EFFORT.format(thinking_effort))
    tail = _choose_tools(tool_choice) + _choose_format(response_format)
    if add_generation_prompt:
        tail += reply_opening(thinking)
    return Rendered(head, parts, tail)


def reply_opening(thinking: bool) -> list[Segment]:
    """What the model's answer continues: an assistant message with its first channel open."""
    return open_tag("message", role="assistant") + open_tag("think" if thinking else "response")


def open_tag(tag: str, /, **attributes: Any) -> list[Segment]:
    """``<|open|>tag key="value"<|sep|>``."""
    segments = [_control(OPEN), _text(tag)]
    for key, value in attributes.items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        # Encoded piece by piece: the value's first and last characters merge with nothing.
        segments += [_text(f" {key}"), _text('="'), _text(escaped), _text('"')]
    return [*segments, _control(SEP)]


def close_tag(tag: str) -> list[Segment]:
    """``<|close|>tag<|sep|>``."""
    return [_control(CLOSE), _text(tag), _control(SEP)]


def end_message() -> list[Segment]:
    """The end of every message."""
    return [*close_tag("message"), _control(END)]


def _control(name: str) -> Segment:
    return Segment(name, True)


def _text(text: str) -> Segment:
    return Segment(text, False)


class _Layout:
    """Renders one message after the other; remembers the calls that tool results answer."""

    def __init__(self, thinking: bool):
        self.thinking = thinking
        self._calls: list[dict[str, Any]] = []
        self._results = 0

    def message(self, message: dict[str, Any]) -> list[Segment]:
        role = message.get("role")
        if role == "system" and message.get("tools"):
            return _declare(_MORE_TOOLS, message["tools"])
        name = {"name": message["name"]} if message.get("name") and role != "tool" else {}
        if role == "user" or role == "system":
            body = self._content(message)
        elif role == "assistant":
            body = self._assistant(message)
        elif role == "tool":
            self._results += 1
            name = {"tool": self._tool_name(message), "index": self._results}
            body = self._content(message)
        else:
            raise K3Error(f"role {role!r}; messages have role user, system, assistant or tool")
        return [*open_tag("message", role=role, **name), *body, *end_message()]

    def _content(self, message: dict[str, Any]) -> list[Segment]:
        content = message.get("content")
        if content is None:
            return []
        if isinstance(content, str):
            return [_text(content)]
        if not isinstance(content, list):
            raise K3Error(f"content is a {type(content).__name__}; it can be text or a list")
        return [segment for part in content for segment in self._part(part)]

    def _part(self, part: Any) -> list[Segment]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return [_text(part["text"])]
        if kind not in MEDIA_PARTS:
            kinds = "text, image and video"
            raise K3Error(f"a part of type {kind!r}; content has parts of type {kinds}")
        if (attachment := part.get("attachment")) is None:
            raise K3Error(f"a message has a part of type {kind}, but no picture for it was given")
        segments = []
        for text, label, medium in attachment.places:
            begin, content, _, end = map(_control, MEDIA)
            pad = Segment(MEDIA[2], True, medium.ids)
            segments += [*([_text(text)] if text else []), begin, _text(label), content, pad, end]
        return segments

    def _assistant(self, message: dict[str, Any]) -> list[Segment]:
        segments = []
        if self.thinking:
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            # The channel is there even when nothing was thought.
            segments += open_tag("think")
            segments += [_text(reasoning)] if reasoning.strip() else []
            segments += close_tag("think")
        segments += [*open_tag("response"), *self._content(message), *close_tag("response")]
        self._calls = [function_of(call) for call in message.get("tool_calls") or ()]
        self._results = 0
        if self._calls:
            segments += open_tag("tools")
            for index, call in enumerate(self._calls, start=1):
                segments += open_tag("call", tool=call["name"], index=index)
                segments += _arguments(call)
                segments += close_tag("call")
            segments += close_tag("tools")
        return segments

    def _tool_name(self, message: dict[str, Any]) -> str:
        name = message.get("tool", message.get("name"))
        if name is None and self._results <= len(self._calls):
            name = self._calls[self._results - 1]["name"]
        if name is None:
            raise K3Error("a tool message answers no call; give its tool_call_id or its name")
        return name


def _arguments(function: dict[str, Any]) -> list[Segment]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            # What a model once wrote may be broken JSON; it is passed on as it was.
            return [*open_tag("json", type="object"), _text(arguments), *close_tag("json")]
    if not isinstance(arguments, dict):
        raise K3Error(f"arguments of {function['name']!r} are not a JSON object")
    segments = []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        segments += open_tag("argument", key=key, type=_type(value))
        segments += [_text(text), *close_tag("argument")]
    return segments


def _type(value: Any) -> str:
    # bool before number: True is an int to Python.
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    kinds = {str: "string", dict: "object", type(None): "null"}
    return kinds.get(type(value), "array")


def _system(kind: str, body: str) -> list[Segment]:
    return [*open_tag("message", role="system", type=kind), _text(body), *end_message()]


def _declare(title: str, tools: Any) -> list[Segment]:
    return _system("tool-declare", f"{title}\n\n```json\n{_compact(tools)}\n```")


def _choose_tools(choice: str | None) -> list[Segment]:
    if choice is None or choice == "auto":
        return []
    if choice not in _TOOL_CHOICE:
        raise UnsupportedError(f"tool_choice {choice!r}; the format knows auto, required and none")
    invoked = f"The system is invoked with `tool_choice={choice}`."
    return _system("tool-choice", f"{invoked}\n{_TOOL_CHOICE[choice]}")


def _choose_format(wanted: dict[str, Any] | str | None) -> list[Segment]:
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind is None or kind == "text":
        return []
    body = f"The system is invoked with `response_format={kind}`.\n{_RAW_JSON}"
    if kind == "json_schema":
        schema = wanted.get("json_schema") if isinstance(wanted, dict) else None
        if not isinstance(schema, dict):
            raise K3Error("response_format json_schema has no schema")
        body += _SCHEMA.format(_compact(schema.get("schema", schema)))
    elif kind != "json_object":
        raise UnsupportedError(
            f"response_format {kind!r}; the format knows text, json_object and json_schema"
        )
    return _system("response-format", body)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
