"""How many fresh items of each family of tasks a model answers right.

Owns the items, the tools' part in a conversation, and the scores. What is asked and what is right
is :mod:`mlx_k3.tasks`'; how answers come about is :mod:`.batch`'s.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from .. import tasks
from ..chat.attaching import attach
from ..errors import K3Error, UnsupportedError
from .batch import Answer, Batch, Prompt, render_prompt

TOOL_ROUNDS = 4  # answers to one item, at most, that a call of a tool may take
SHOWN_FAILURES = 3  # of a family
Z = 1.96  # of a normal distribution, 95 % lie within so many standard deviations


@dataclass(frozen=True)
class Score:
    """``right`` of ``items`` answers."""

    right: int
    items: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.right / self.items

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share that endless items would give."""
        n, p = self.items, self.share
        middle = p + Z * Z / (2 * n)
        reach = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        low, high = ((middle + sign * reach) / (1 + Z * Z / n) for sign in (-1, 1))
        return max(low, 0.0), min(high, 1.0)


@dataclass(frozen=True)
class Failure:
    """A wrong answer, as text; calls of tools stand where they were made."""

    family: str
    prompt: str
    expected: str
    got: str
    reasoning: str
    finish_reason: str


@dataclass(frozen=True)
class Result:
    """Scores in the order of the families asked for."""

    scores: dict[str, Score]
    failures: list[Failure]
    generated_tokens: int


@dataclass
class _Reply:
    """What a model answered, over all of its rounds: what a family's check reads."""

    content: str
    tool_calls: list[dict[str, Any]]


@dataclass
class _Item:
    """An example on its way, and what has been said since its question."""

    example: tasks.Example
    messages: list[dict[str, Any]]
    said: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    finish_reason: str = ""
    generated_tokens: int = 0

    def hear(self, answer: Answer) -> bool:
        """Take an answer; run the tools it calls. Whether the model is to go on."""
        self.rounds += 1
        self.generated_tokens += len(answer.ids)
        self.finish_reason = answer.finish_reason
        self.said.append(answer.message)
        calls = answer.message.get("tool_calls", ())
        if not calls or answer.finish_reason != "stop" or self.rounds == TOOL_ROUNDS:
            return False
        for function in (call["function"] for call in calls):
            # What is no JSON object came as text: no tool takes that.
            known = isinstance(function["arguments"], dict)
            arguments = function["arguments"] if known else {}
            result = tasks.run_tool(function["name"], arguments, self.example)
            self.said.append({"role": "tool", "content": result})
        return True

    @property
    def right(self) -> bool:
        """An answer that was cut is wrong, whatever it has said by then."""
        spoken = [message for message in self.said if message["role"] == "assistant"]
        calls = [call for message in spoken for call in message.get("tool_calls", ())]
        reply = _Reply(spoken[-1]["content"], [call["function"] for call in calls])
        check = tasks.ALL_FAMILIES[self.example.family].check
        return self.finish_reason == "stop" and check(self.example, reply)


def known_families(names: Sequence[str]) -> list[str]:
    """``names``, each once; all families if there are none.

    Raises:
        K3Error: no such family.
    """
    for name in names:
        if name not in tasks.ALL_FAMILIES:
            raise K3Error(f"no task {name!r}; there are {', '.join(tasks.ALL_FAMILIES)}")
    return list(dict.fromkeys(names or tasks.ALL_FAMILIES))


def sees(model: Any) -> bool:
    """Whether ``model`` has a vision tower."""
    return getattr(model, "vision", None) is not None


def why_without_pictures(model: Any) -> str | None:
    """Why ``model`` cannot be asked about pictures here; None if it can."""
    if not sees(model):
        return "the model reads text only"
    return None if find_spec("PIL") else "Pillow is not installed (mlx-k3[vision])"


def is_about_pictures(family: str) -> bool:
    """Whether only a model that sees can be asked the items of ``family``."""
    return family in tasks.PICTURE_FAMILIES


def measure(
    model: Any,
    tokenizer: Any,
    families: Sequence[str],
    *,
    seed: int,
    items: int,
    max_tokens: int,
    thinking: bool = True,
    blind: bool = False,
    at_once: Callable[[int], int] = lambda tokens: 1,
    pass_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> Result:
    """Ask ``items`` held-out items of each family, and answer greedily.

    A family's items depend on ``seed`` alone, whatever else is asked. ``thinking`` False leaves
    the thinking out, True leaves it to the items. With ``blind``, other pictures of the family are
    shown than those that are asked about: what is right then is chance. ``at_once`` says how many
    conversations of so many tokens may be answered together, in passes of ``pass_tokens``.
    ``progress`` is called after each item.

    Raises:
        UnsupportedError: the model has another chat format, or a family needs one that sees.
    """
    if not tokenizer.speaks_xtml:
        raise UnsupportedError("the tasks are asked in K3's chat format, which is not this model's")
    asked = {
        (family, i): _item(model, example)
        for family in families
        for i, example in enumerate(_examples(family, seed, items, blind))
    }
    prompts = {name: _prompt(tokenizer, item, thinking) for name, item in asked.items()}
    by_length = sorted(prompts, key=lambda name: len(prompts[name].ids))
    # In groups whose lengths are within a factor of two: the longest decides how many fit at once.
    for _, group in groupby(by_length, key=lambda name: len(prompts[name].ids).bit_length()):
        names = list(group)
        together = at_once(len(prompts[names[-1]].ids) + max_tokens)
        how = {"max_tokens": max_tokens, "at_once": together, "pass_tokens": pass_tokens}
        batch = Batch(model, tokenizer, **how)
        for name in names:
            batch.ask(name, prompts[name])
        for name, answer in batch.answers():
            if asked[name].hear(answer):
                batch.ask(name, _prompt(tokenizer, asked[name], thinking))
            else:
                progress()
    return _result(families, list(asked.values()))


def _examples(family: str, seed: int, items: int, blind: bool) -> list[tasks.Example]:
    rng = random.Random(f"{seed} {family}")
    examples = [tasks.example(family, rng, "held-out") for _ in range(items)]
    return [_with_others(example, rng) for example in examples] if blind else examples


def _with_others(example: tasks.Example, rng: random.Random) -> tasks.Example:
    """The example with pictures of others of its family."""
    scenes: list[tasks.Scene] = []
    while len(scenes) < len(tasks.scenes(example)):
        scenes += tasks.scenes(tasks.example(example.family, rng, "held-out"))
    return tasks.with_scenes(example, scenes)


def _item(model: Any, example: tasks.Example) -> _Item:
    if sees(model):
        example = tasks.by_one_who_sees(example)
    return _Item(example, attach(tasks.asked(tasks.drawn(example)), model))


def _prompt(tokenizer: Any, item: _Item, thinking: bool) -> Prompt:
    return render_prompt(
        tokenizer,
        item.messages + item.said,
        tools=item.example.tools,
        thinking=thinking and item.example.thinking,
        thinking_effort=item.example.thinking_effort,
        response_format=item.example.response_format,
    )


def _result(families: Sequence[str], items: list[_Item]) -> Result:
    scores, failures = {}, []
    for family in families:
        own = [item for item in items if item.example.family == family]
        wrong = [item for item in own if not item.right]
        scores[family] = Score(len(own) - len(wrong), len(own))
        failures += [_failure(item) for item in wrong[:SHOWN_FAILURES]]
    return Result(scores, failures, sum(item.generated_tokens for item in items))


def _failure(item: _Item) -> Failure:
    expected = item.example.messages[len(item.messages) :]
    return Failure(
        family=item.example.family,
        prompt=_as_line(item.messages[-1]["content"]),
        expected=_as_text(expected),
        got=_as_text(item.said),
        reasoning=item.said[-1].get("reasoning_content", ""),
        finish_reason=item.finish_reason,
    )


def _as_line(content: str | list[dict[str, Any]]) -> str:
    """What was asked; pictures as a word."""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "[picture]") for part in content)


def _as_text(messages: list[dict[str, Any]]) -> str:
    """What was said and called, a line each."""
    lines = []
    for message in messages:
        if message["role"] != "assistant":
            continue
        lines += [message["content"]] if message["content"] else []
        for call in message.get("tool_calls", ()):
            lines.append(f"{call['function']['name']}({call['function']['arguments']})")
    return "\n".join(lines)
