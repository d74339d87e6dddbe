"""The JSON of OpenAI's answers.

Owns names and nesting. What is in an answer, :mod:`mlx_k3.server.answers` knows.
"""

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from .answers import Counts, Delta


class _Shape:
    """An answer's fixed fields."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str):
        self._fixed = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def usage_chunk(self, counts: Counts) -> dict[str, Any]:
        """The chunk of a stream that has no choices, only what it cost."""
        return {**self._fixed, "object": self.chunk_kind, "choices": [], "usage": usage(counts)}

    def _chunk(self, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **choice, "finish_reason": finish_reason}
        return {**self._fixed, "object": self.chunk_kind, "choices": [choice]}

    def _whole(self, choice: dict[str, Any], reason: str | None, counts: Counts) -> dict[str, Any]:
        choice = {"index": 0, **choice, "finish_reason": reason}
        return {**self._fixed, "object": self.kind, "choices": [choice], "usage": usage(counts)}


class ChatShape(_Shape):
    """Of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def begin(self) -> Iterator[dict[str, Any]]:
        """What a stream begins with."""
        yield self._chunk({"delta": {"role": "assistant", "content": ""}, "logprobs": None}, None)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One chunk of a stream."""
        said: dict[str, Any] = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        if delta.tool_calls:
            said["tool_calls"] = delta.tool_calls
        logprobs = {"content": delta.logprobs, "refusal": None} if delta.logprobs else None
        return self._chunk({"delta": said, "logprobs": logprobs}, delta.finish_reason)

    def whole(self, deltas: list[Delta], counts: Counts, logprobs: bool) -> dict[str, Any]:
        """All of an answer."""
        calls = _joined([call for delta in deltas for call in delta.tool_calls])
        content = "".join(delta.content for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            message["content"] = content or None
        entries = [entry for delta in deltas for entry in delta.logprobs]
        told = {"content": entries, "refusal": None} if logprobs else None
        choice = {"message": message, "logprobs": told}
        return self._whole(choice, deltas[-1].finish_reason, counts)


class CompletionShape(_Shape):
    """Of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str):
        super().__init__(model)
        self._offset = 0  # of the next token's text

    def begin(self) -> Iterator[dict[str, Any]]:
        """A text begins with its first piece."""
        yield from ()

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One chunk of a stream."""
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        return self._chunk({"text": delta.content, "logprobs": logprobs}, delta.finish_reason)

    def whole(self, deltas: list[Delta], counts: Counts, logprobs: bool) -> dict[str, Any]:
        """All of an answer."""
        text = "".join(delta.content for delta in deltas)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        told = self._logprobs(entries) if logprobs else None
        choice = {"text": text, "logprobs": told}
        return self._whole(choice, deltas[-1].finish_reason, counts)

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
            "text_offset": offsets,
        }


def usage(counts: Counts) -> dict[str, Any]:
    """What an answer cost."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }


def _joined(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole tool calls from the pieces of a stream."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if "id" in piece:
            function = dict(piece["function"])
            calls[piece["index"]] = {"id": piece["id"], "type": "function", "function": function}
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return list(calls.values())
