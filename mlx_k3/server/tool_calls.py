"""A tool call while the model writes it, as the pieces of JSON that OpenAI's clients join.

Owns how arguments that come as tags become one JSON object. Put together, the pieces are the
object that the finished call has.
"""

import json
from typing import Any
from uuid import uuid4

from ..chat.xtml_parser import Event


class ToolCallWriter:
    """Writes the calls of one answer."""

    def __init__(self) -> None:
        self.called = 0  # finished calls
        self._keys: list[str] = []  # arguments of the open call, the last one unfinished
        self._text: list[str] = []  # of an argument that is JSON
        self._in_string = self._in_block = False

    def write(self, event: Event) -> list[dict[str, Any]]:
        """``tool_calls`` of a delta: what ``event`` adds."""
        index = event.index - 1
        if event.kind == "tool_start":
            self._keys, self._text, self._in_string, self._in_block = [], [], False, False
            function = {"name": event.text, "arguments": ""}
            call_id = f"call_{uuid4().hex[:24]}"
            return [{"index": index, "id": call_id, "type": "function", "function": function}]
        text = self._argument(event) if event.kind == "tool_argument" else self._end(event)
        return [{"index": index, "function": {"arguments": text}}] if text else []

    def _argument(self, event: Event) -> str:
        if event.key is None:
            self._in_block = True
            return event.text
        written = ""
        if not self._keys or self._keys[-1] != event.key:
            written = f"{self._close()}{', ' if self._keys else '{'}{_json(event.key)}: "
            self._keys.append(event.key)
            self._in_string = event.value_type == "string"
            written += '"' if self._in_string else ""
        if self._in_string:
            return written + _json(event.text)[1:-1]
        self._text.append(event.text)
        return written

    def _end(self, event: Event) -> str:
        self.called += 1
        if self._in_block:
            return ""
        written = self._close()
        # An argument without any text has not been announced.
        arguments = event.call["function"]["arguments"] if event.call else {}
        for key in [key for key in arguments if key not in self._keys]:
            written += f"{', ' if self._keys else '{'}{_json(key)}: {_json(arguments[key])}"
            self._keys.append(key)
        return written + ("}" if self._keys else "{}")

    def _close(self) -> str:
        """The rest of the argument that is being written."""
        if self._in_string:
            self._in_string = False
            return '"'
        text, self._text = "".join(self._text), []
        return _json(_value(text)) if text else ""


def _value(text: str) -> Any:
    """What ``text`` says; the text itself where it is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except ValueError:
        return text


def _no_json(name: str) -> Any:
    raise ValueError(name)  # NaN and infinities, which Python would accept


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
