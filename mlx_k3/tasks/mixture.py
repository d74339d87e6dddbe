"""All families together: one example of a family, and the endless mixture for training.

Owns the proportions, what surrounds an example (thinking or not, effort, a system message) and the
joining of several into one conversation. An answer never depends on what surrounds it.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from . import (
    about,
    arithmetic,
    dates,
    lists,
    logic,
    pictures,
    recall,
    structured,
    talk,
    tools,
    units,
    unknown,
)
from .example import SYSTEM, Example, Family, is_held_out
from .talk import by_one_who_sees

FAMILIES: dict[str, Family] = {
    family.name: family
    for part in (
        arithmetic, lists, recall, dates, units, logic, about, tools, structured, unknown, talk,
    )
    for family in part.FAMILIES
}  # fmt: skip

PICTURE_FAMILIES: dict[str, Family] = {family.name: family for family in pictures.FAMILIES}
ALL_FAMILIES = FAMILIES | PICTURE_FAMILIES

# Long ones, and those that are right only where no other is.
_ALONE = {"recall", "recall_medium", "recall_long", pictures.MISSING}
_SYSTEMS = (
    "You are a helpful assistant.", "You are K3 nano.", "Be brief.", "Answer in one sentence.",
    "You are a friendly assistant.", "Answer the questions of the user.", "Be exact.",
    "Help the user.", "You are a careful assistant.", "Answer politely.",
)  # fmt: skip


def example(family: str, rng: random.Random, split: Literal["train", "held-out"]) -> Example:
    """An example of ``family`` from one side of the split, with thinking at full effort."""
    while True:
        drawn = ALL_FAMILIES[family].make(rng)
        if is_held_out(drawn.key) == (split == "held-out"):
            return drawn


def training_examples(seed: int, pictures: float = 0.0) -> Iterator[Example]:
    """Conversations for training, endless, the same for the same seed; none is held out.

    Families come in proportion to their weights; every sixth example joins several into one
    conversation. A third has no thinking. Every assistant message in them is worth learning.
    ``pictures`` is the share of examples that are about pictures; what a model says of itself is
    then said by one that sees.
    """
    rng = random.Random(seed)
    while True:
        drawn = example(_family(rng, pictures), rng, "train")
        if rng.random() < 1 / 6 and _joins(drawn):
            drawn = _joined(rng, drawn, pictures)
        drawn = _surrounded(rng, drawn)
        yield by_one_who_sees(drawn) if pictures else drawn


def held_out_examples(seed: int, pictures: float = 0.0) -> Iterator[Example]:
    """Examples of items that training never sees, families in training's proportions."""
    rng = random.Random(seed)
    while True:
        drawn = example(_family(rng, pictures), rng, "held-out")
        yield by_one_who_sees(drawn) if pictures else drawn


def _family(rng: random.Random, pictures: float) -> str:
    families = FAMILIES
    if pictures and rng.random() < pictures:
        families = PICTURE_FAMILIES
    return rng.choices(list(families), [family.weight for family in families.values()])[0]


def _joins(drawn: Example) -> bool:
    """Whether it can stand among others: declarations and system messages hold for all of them."""
    alone = drawn.tools or drawn.response_format or drawn.messages[0]["role"] == SYSTEM
    return not alone and drawn.family not in _ALONE


def _joined(rng: random.Random, first: Example, pictures: float) -> Example:
    parts = [first]
    wanted = rng.randrange(2, 5)
    while len(parts) < wanted:
        # Pictures of two parts could differ in size: one part at most has any.
        share = 0.0 if any(part.family in PICTURE_FAMILIES for part in parts) else pictures
        drawn = example(_family(rng, share), rng, "train")
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
