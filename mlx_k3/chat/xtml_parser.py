"""Token ids back to what they say: an answer while it is generated, or a whole conversation.

Works on ids, so a tag is a tag only if the model wrote the control tokens; text that spells one
stays text. Tolerates what a model may get wrong: missing or crossed tags, unknown ones, an answer
that stops anywhere. :mod:`mlx_k3.chat.xtml` owns the layout read here.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from . import xtml

_CHANNELS = ("think", "response", "tools")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_IMAGE = re.compile(r"image (\d+)x(\d+)")


class Mark(NamedTuple):
    """One thing the ids say: a stretch of text, a tag, an image's place or a message's end."""

    kind: Literal["text", "open", "close", "image", "end"]
    text: str = ""
    attributes: dict[str, str] = {}  # noqa: RUF012 - a NamedTuple's default, never written to


@dataclass(frozen=True)
class Event:
    """News from an answer in progress.

    ``reasoning`` and ``content`` carry new text. ``tool_start`` names call ``index`` (from 1) in
    ``text``; ``tool_argument`` carries new text of its argument ``key`` (None: of a raw JSON
    block), which is JSON unless its ``value_type`` is string; ``tool_end`` carries the finished
    ``call``.
    """

    kind: Literal["reasoning", "content", "tool_start", "tool_argument", "tool_end"]
    text: str = ""
    index: int = 0
    key: str | None = None
    value_type: str = "string"
    call: dict[str, Any] | None = None


class Scanner:
    """Ids to marks. Holds back incomplete characters and unfinished tags."""

    def __init__(self, table: Any):
        self._table = table
        self._tag: str | None = None  # control token whose tag is being written
        self._tag_bytes = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def in_tag(self) -> bool:
        """Whether a tag has begun and not ended."""
        return self._tag is not None

    def feed(self, token: int) -> Iterator[Mark]:
        """The marks that ``token`` completes."""
        control = self._table.control.get(token)
        if control is None:
            piece = self._table.pieces[token] or b""
            if self._tag is not None:
                self._tag_bytes += piece
            elif text := self._decoder.decode(piece):
                yield Mark("text", text)
            return
        yield from self.flush()
        if control in (xtml.OPEN, xtml.CLOSE, xtml.MEDIA[0]):
            self._tag, self._tag_bytes = control, b""
        elif control in (xtml.SEP, xtml.MEDIA[1]) and self._tag is not None:
            tag = self._tag_bytes.decode("utf-8", "replace")
            mark = _image(tag) if self._tag == xtml.MEDIA[0] else _tag(self._tag, tag)
            self._tag = None
            yield mark
        elif control == xtml.END:
            self._tag = None
            yield Mark("end")

    def flush(self) -> Iterator[Mark]:
        """What is left of a character that will not be completed."""
        if text := self._decoder.decode(b"", final=True):
            yield Mark("text", text)


def _tag(opener: str, text: str) -> Mark:
    name, _, rest = text.partition(" ")
    unescaped = {
        key: value.replace("&quot;", '"').replace("&amp;", "&")
        for key, value in _ATTRIBUTE.findall(rest)
    }
    return Mark("open" if opener == xtml.OPEN else "close", name, unescaped)


def _image(text: str) -> Mark:
    size = _IMAGE.fullmatch(text)
    return Mark("image", attributes={"width": size[1], "height": size[2]} if size else {})


@dataclass
class _Call:
    index: int
    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)

    def as_message(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ReplyParser:
    """An assistant message, read as it comes.

    ``channel`` is the one the prompt left open (think or response), whose opening tag the answer
    therefore lacks; None reads a message's body from its beginning.
    """

    def __init__(self, table: Any, channel: Literal["think", "response"] | None = None):
        self._scanner = Scanner(table)
        self._path = ["message"] if channel is None else ["message", channel]
        self._answered = channel == "response"
        self._closed = False
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[_Call] = []
        self._open_call: _Call | None = None
        self._value: tuple[str | None, str, list[str]] | None = None  # key, type, text so far

    @property
    def ended(self) -> bool:
        """Whether the message is over."""
        return not self._path

    @property
    def message(self) -> dict[str, Any]:
        """What has been said so far. Content is empty while (or if only) thinking was seen."""
        reasoning = "".join(self._texts["reasoning"])
        message = {"role": "assistant", "content": "".join(self._texts["content"])}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [call.as_message() for call in self._calls]
        return message

    def feed(self, token: int) -> list[Event]:
        """Events that ``token`` gives rise to."""
        return [event for mark in self._scanner.feed(token) for event in self.take(mark)]

    def finish(self) -> list[Event]:
        """Events still held back when no more tokens come. A call without its end is dropped."""
        return [event for mark in self._scanner.flush() for event in self.take(mark)]

    def closing(self) -> list[xtml.Segment] | None:
        """What completes the message from here, or None inside a tag or a tool call."""
        if self._scanner.in_tag or len(self._path) > 2:
            return None
        if self.ended:
            return []
        if self._closed:
            return xtml.end_message()[-1:]
        segments = [] if len(self._path) == 1 else xtml.close_tag(self._path[-1])
        if not self._answered:
            segments += [*xtml.open_tag("response"), *xtml.close_tag("response")]
        return [*segments, *xtml.end_message()]

    def take(self, mark: Mark) -> Iterator[Event]:
        """Events of one mark (for those who scan themselves)."""
        if mark.kind == "end" or mark[:2] == ("open", "message"):
            # The second is a model that runs on into another turn: this answer is over.
            yield from self._leave(0)
        elif self._closed or self.ended:
            return
        elif mark.kind == "text":
            yield from self._text(mark.text)
        elif mark.kind == "open":
            yield from self._open(mark.text, mark.attributes)
        elif mark.kind == "close" and mark.text in self._path:
            self._closed = mark.text == "message"
            yield from self._leave(max(self._path.index(mark.text), 1))

    def _text(self, text: str) -> Iterator[Event]:
        where = self._path[-1]
        if where == "think":
            yield self._say("reasoning", text)
        elif where == "response" or (where == "message" and not self._answered):
            # A model that forgets to open its response still answers.
            yield self._say("content", text)
        elif self._value is not None and self._open_call is not None:
            key, kind, pieces = self._value
            pieces.append(text)
            yield Event("tool_argument", text, self._open_call.index, key, kind)

    def _say(self, kind: Literal["reasoning", "content"], text: str) -> Event:
        self._texts[kind].append(text)
        return Event(kind, text)

    def _open(self, name: str, attributes: dict[str, str]) -> Iterator[Event]:
        if name in _CHANNELS:
            yield from self._leave(1)
            self._path.append(name)
            self._answered = self._answered or name == "response"
        elif name == "call" and "tools" in self._path:
            yield from self._leave(2)
            self._path.append(name)
            self._open_call = _Call(len(self._calls) + 1, attributes.get("tool", ""))
            yield Event("tool_start", self._open_call.name, self._open_call.index)
        elif name in ("argument", "json") and self._open_call is not None:
            yield from self._leave(3)
            self._path.append(name)
            key = None if name == "json" else attributes.get("key", "")
            self._value = key, attributes.get("type", "string"), []

    def _leave(self, depth: int) -> Iterator[Event]:
        """Close whatever is open below the first ``depth`` levels."""
        while len(self._path) > depth:
            name = self._path.pop()
            if name in ("argument", "json") and self._value is not None and self._open_call:
                _set_argument(self._open_call, *self._value)
                self._value = None
            elif name == "call" and self._open_call is not None:
                call, self._open_call = self._open_call, None
                self._calls.append(call)
                yield Event("tool_end", index=call.index, call=call.as_message())


def _set_argument(call: _Call, key: str | None, kind: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    value: Any = text
    if key is None or kind != "string":
        try:
            value = json.loads(text)
        except ValueError:
            value = text
    if key is not None:
        if isinstance(call.arguments, dict):
            call.arguments[key] = value
    else:
        # A block that is no JSON object goes to the tool as it was written.
        call.arguments = value if isinstance(value, dict) else text


def tags(ids: Iterable[int], table: Any) -> list[Mark]:
    """Everything ``ids`` say but text: two renderings of one message have the same tags."""
    scanner = Scanner(table)
    return [mark for i in ids for mark in scanner.feed(i) if mark.kind != "text"]


def parse_conversation(ids: Iterable[int], table: Any) -> list[dict[str, Any]]:
    """The messages that ``ids`` render, in OpenAI's form; an unfinished last one is left out.

    System messages that carry a setting have its name in ``type``.
    """
    scanner = Scanner(table)
    messages: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None
    reply: ReplyParser | None = None
    parts: list[dict[str, Any]] = []
    for mark in (mark for token in ids for mark in scanner.feed(token)):
        if current is None:
            if mark.kind == "open" and mark.text == "message":
                current, parts = dict(mark.attributes), []
                reply = ReplyParser(table) if current.get("role") == "assistant" else None
        elif mark.kind == "end":
            messages.append(current | (reply.message if reply else {"content": _content(parts)}))
            current = None
        elif reply is not None:
            list(reply.take(mark))
        elif mark.kind == "text":
            parts.append({"type": "text", "text": mark.text})
        elif mark.kind == "image":
            parts.append({"type": "image", **{k: int(v) for k, v in mark.attributes.items()}})
    return messages


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Plain text where there is nothing else, else parts with neighbouring text joined."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    if all(part["type"] == "text" for part in joined):
        return "".join(part["text"] for part in joined)
    return joined
