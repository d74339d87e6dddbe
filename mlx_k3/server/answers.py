"""From the chunks of an answer to what a client is told, piece by piece.

Owns stop texts, why an answer ended, and its counts. A whole answer is its pieces put together, so
that both ways of asking give the same. Knows nothing of HTTP; :mod:`mlx_k3.server.shapes` has the
JSON.
"""

from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine

from ..chat.generation import Chunk
from ..chat.tokenizer import TokenTable
from .logprobs import TokenLogprobs
from .tool_calls import ToolCallWriter


@dataclass
class Delta:
    """What is new. The last delta of an answer has its ``finish_reason``."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Counts:
    """Tokens of an answer. ``cached`` of the prompt's were not computed again."""

    prompt: int
    cached: int = 0
    generated: int = 0
    reasoning: int = 0


class Answer:
    """Takes chunks, gives deltas.

    Args:
        prompt_tokens: for the counts.
        stop: the answer proper ends before the first of these.
        logprobs: None if they are not wanted.
    """

    def __init__(self, prompt_tokens: int, stop: list[str], logprobs: TokenLogprobs | None):
        self.counts = Counts(prompt_tokens)
        self._logprobs = logprobs
        self._calls = ToolCallWriter()
        machine = TextStateMachine({"text": [(text, None) for text in stop]})
        self._stop = machine.make_state("text")
        self._written = self._shown = 0  # characters of content, and of those let through

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come: nothing more is to be generated."""
        return self._stop[0] is None

    def take(self, chunk: Chunk) -> Delta:
        """What ``chunk`` adds."""
        delta = Delta()
        self.counts.generated += 1
        self._written += len(chunk.text)
        if self._logprobs is not None:
            self._logprobs.note(chunk, self._written)
        for event in chunk.events:
            if self.stopped:
                break
            if event.kind == "reasoning":
                delta.reasoning += event.text
                self.counts.reasoning = self.counts.generated
            elif event.kind == "content":
                self._stop, parts = TextStateMachine.split(self._stop, event.text)
                delta.content += "".join(text for _, text in parts)
            else:
                delta.tool_calls += self._calls.write(event)
        self._finish(chunk, delta)
        self._shown += len(delta.content)
        if self._logprobs is not None:
            delta.logprobs = self._logprobs.shown(self._shown)
        return delta

    def _finish(self, chunk: Chunk, delta: Delta) -> None:
        if self.stopped:
            delta.finish_reason = "stop"
        elif chunk.reply is not None:
            self._stop, rest, _ = TextStateMachine.flush(self._stop)
            delta.content += rest
            called = self._calls.called and chunk.reply.finish_reason == "stop"
            delta.finish_reason = "tool_calls" if called else chunk.reply.finish_reason


def logprobs_for(
    table: TokenTable, top: int | None, stop_ids: set[int] | None
) -> TokenLogprobs | None:
    """What collects log-probabilities; None without ``top``.

    ``stop_ids`` are what a plain text has that is no text; None: the answer has a chat format, in
    which no control token is.
    """
    if top is None:
        return None
    return TokenLogprobs(table, top, table.control if stop_ids is None else stop_ids)
