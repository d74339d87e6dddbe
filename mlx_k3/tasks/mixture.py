"""All families together: one example of a family, and the endless mixture for training.

Owns the proportions, what surrounds an example (thinking or not, effort, a system message) and the
joining of several into one conversation. An answer never depends on what surrounds it.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from . import (
    about,
    arithmetic,
    dates,
    lists,
    logic,
    recall,
    structured,
    talk,
    tools,
    units,
    unknown,
)
from .example import SYSTEM, Example, Family, is_held_out

FAMILIES: dict[str, Family] = {
    family.name: family
    for part in (
        arithmetic, lists, recall, dates, units, logic, about, tools, structured, unknown, talk,
    )
    for family in part.FAMILIES
}  # fmt: skip

_NAMES = list(FAMILIES)
_BOUNDS = list(accumulate(family.weight for family in FAMILIES.values()))
_LONG = {"recall", "recall_medium", "recall_long"}
_SYSTEMS = (
    "You are a helpful assistant.", "You are K3 nano.", "Be brief.", "Answer in one sentence.",
    "You are a friendly assistant.", "Answer the questions of the user.", "Be exact.",
    "Help the user.", "You are a careful assistant.", "Answer politely.",
)  # fmt: skip


def example(family: str, rng: random.Random, split: Literal["train", "held-out"]) -> Example:
    """An example of ``family`` from one side of the split, with thinking at full effort."""
    while True:
        drawn = FAMILIES[family].make(rng)
        if is_held_out(drawn.key) == (split == "held-out"):
            return drawn


def training_examples(seed: int) -> Iterator[Example]:
    """Conversations for training, endless, the same for the same seed; none is held out.

    Families come in proportion to their weights; every sixth example joins several into one
    conversation. A third has no thinking. Every assistant message in them is worth learning.
    """
    rng = random.Random(seed)
    while True:
        drawn = example(_family(rng), rng, "train")
        if rng.random() < 1 / 6 and _joins(drawn):
            drawn = _joined(rng, drawn)
        yield _surrounded(rng, drawn)


def _family(rng: random.Random) -> str:
    return rng.choices(_NAMES, cum_weights=_BOUNDS)[0]


def _joins(drawn: Example) -> bool:
    """Whether it can stand among others: declarations and system messages hold for all of them."""
    alone = drawn.tools or drawn.response_format or drawn.messages[0]["role"] == SYSTEM
    return not alone and drawn.family not in _LONG


def _joined(rng: random.Random, first: Example) -> Example:
    parts = [first]
    wanted = rng.randrange(2, 5)
    while len(parts) < wanted:
        drawn = example(_family(rng), rng, "train")
        # Facts of two parts could contradict each other, and a refusal the facts before it.
        if _joins(drawn) and not (_tells(drawn) and any(map(_tells, parts))):
            parts.append(drawn)
    messages = [message for part in parts for message in part.messages]
    key = "\n".join(part.key for part in parts)
    return Example("conversation", messages, key=key)


def _tells(drawn: Example) -> bool:
    return drawn.family.startswith("recall") or drawn.family == "unknown"


def _surrounded(rng: random.Random, drawn: Example) -> Example:
    messages = drawn.messages
    if messages[0]["role"] != SYSTEM and rng.random() < 0.15:
        messages = [{"role": SYSTEM, "content": rng.choice(_SYSTEMS)}, *messages]
    effort = rng.choice(("max", "max", "max", "max", "max", "max", "high", "low", None))
    thinking = rng.random() < 2 / 3
    return replace(drawn, messages=messages, thinking=thinking, thinking_effort=effort)
