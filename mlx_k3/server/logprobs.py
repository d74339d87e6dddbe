"""Log-probabilities of the tokens whose text an answer shows.

Owns which tokens count: those of the answer proper, neither tags nor thinking, and not what a stop
text cuts away. Knows a chunk by its token, events and log-probabilities.
"""

from collections import deque
from collections.abc import Container
from typing import Any

import mlx.core as mx

from ..chat import xtml
from ..chat.generation import Chunk
from ..chat.tokenizer import TokenTable

_LEAST = -9999.0  # JSON has no infinity


class TokenLogprobs:
    """Collects entries until their text is shown.

    Args:
        table: the tokenizer's.
        top: how many of the likeliest tokens are told beside each.
        unseen: ids that are no text.
    """

    def __init__(self, table: TokenTable, top: int, unseen: Container[int]):
        self._table, self._top, self._unseen = table, top, unseen
        self._in_tag = False
        self._pending: list[dict[str, Any]] = []  # of characters not complete yet
        self._ready: deque[tuple[int, dict[str, Any]]] = deque()  # where its text ends, entry

    def note(self, chunk: Chunk, content_end: int) -> None:
        """Take a chunk into account, after which the content has ``content_end`` characters."""
        control = self._table.control.get(chunk.token) if chunk.token in self._unseen else None
        if control is None and not self._in_tag:
            self._pending.append(self._entry(chunk.token, chunk.logprobs))
        if chunk.text:
            self._ready.extend((content_end, entry) for entry in self._pending)
        if chunk.events or control is not None:
            self._pending.clear()
        if control is not None:
            self._in_tag = control in (xtml.OPEN, xtml.CLOSE)

    def shown(self, content_end: int) -> list[dict[str, Any]]:
        """New entries whose text lies within the first ``content_end`` characters."""
        entries = []
        while self._ready and self._ready[0][0] <= content_end:
            entries.append(self._ready.popleft()[1])
        return entries

    def _entry(self, token: int, logprobs: mx.array) -> dict[str, Any]:
        top: list[int] = []
        if self._top:
            top = mx.argpartition(-logprobs, self._top - 1)[: self._top].tolist()
        values = logprobs[mx.array([token, *top])].tolist()
        first, *others = (self._said(i, v) for i, v in zip([token, *top], values, strict=True))
        others.sort(key=lambda entry: -entry["logprob"])
        return first | {"top_logprobs": others}

    def _said(self, token: int, logprob: float) -> dict[str, Any]:
        pieces = self._table.pieces
        piece = (pieces[token] if token < len(pieces) else None) or b""
        text = piece.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(piece)}
