"""What a generated conversation is, and which of them are kept from training.

Owns the example, the family and the split. Knows no task.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


@dataclass(frozen=True)
class Example:
    """A conversation whose assistant messages are all right: each is the one target for its place.

    ``messages`` are OpenAI-style, the last one from the assistant. ``key`` says what the example is
    about whatever its wording, one identity a line; it decides the split.
    """

    family: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    thinking_effort: str | None = "max"
    response_format: dict[str, Any] | None = None
    key: str = ""


class Reply(Protocol):
    """What a model answered: its text and, over all of its steps, the tools it called."""

    content: str
    tool_calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A kind of task: how to draw an example, how often in training, and when a reply is right."""

    name: str
    weight: float
    make: Callable[[random.Random], Example]
    check: Callable[[Example, Reply], bool]


def is_held_out(key: str) -> bool:
    """Whether a tenth of all identities, the same on every machine, includes one of ``key``."""
    return any(_digest(line) % 10 == 0 for line in key.split("\n"))


def _digest(line: str) -> int:
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:8], "big")


def user(text: str) -> Message:
    """A message of the person."""
    return {"role": USER, "content": text}


def assistant(reasoning: str, response: str) -> Message:
    """A message of the model."""
    return {"role": ASSISTANT, "reasoning_content": reasoning, "content": response}


def question(
    family: str,
    text: str,
    reasoning: str,
    response: str,
    key: str,
    before: Sequence[Message] = (),
) -> Example:
    """An example of one question and its answer, after the messages ``before``."""
    messages = [*before, user(text), assistant(reasoning, response)]
    return Example(family, messages, key=key)


def same_text(example: Example, reply: Reply) -> bool:
    """Whether the reply is the target to the letter, and calls nothing."""
    return reply.content.strip() == example.messages[-1]["content"] and not reply.tool_calls


def asked(example: Example) -> list[Message]:
    """The messages up to the last one of the person: what a model is given to answer."""
    last = max(i for i, message in enumerate(example.messages) if message["role"] == USER)
    return example.messages[: last + 1]
