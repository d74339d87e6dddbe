"""Answers without a chat format: plain text, or nothing but ids.

Owns what stands in for :class:`~mlx_k3.chat.xtml_parser.ReplyParser` where a text is continued or a
template's format has no channels, and for a tokenizer where a model has none.
"""

from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from .xtml_parser import Event


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
