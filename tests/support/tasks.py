"""Examples of the tasks, and the few things that tests read off them."""

import itertools
import random
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mlx_k3.tasks import (
    FAMILIES,
    Example,
    asked,
    training_examples,
)

NUMBER = r"-?\d+(?:\.\d+)?"


@dataclass
class Said:
    """A model's reply, as a check reads it."""

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def drawn(family: str, count: int = 300, seed: int = 0) -> list[Example]:
    """Examples of both sides of the split."""
    rng = random.Random(f"{seed} {family}")
    return [FAMILIES[family].make(rng) for _ in range(count)]


def training(count: int, seed: int = 0) -> list[Example]:
    return list(itertools.islice(training_examples(seed), count))


def text_of(item: Example) -> str:
    """The last question."""
    return asked(item)[-1]["content"]


def answer_of(item: Example) -> str:
    return item.messages[-1]["content"]


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def exact(expression: str) -> Fraction:
    """Of numbers and signs with spaces between, products first."""
    tokens = expression.split(" ")
    terms = [Fraction(tokens[0])]
    for sign, number in zip(tokens[1::2], map(Fraction, tokens[2::2]), strict=True):
        if sign == "*":
            terms[-1] *= number
        elif sign == "/":
            terms[-1] /= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms, Fraction(0))


SIZES = {
    "millimetre": 0.001,
    "centimetre": 0.01,
    "metre": 1,
    "kilometre": 1000,
    "inch": 0.0254,
    "inche": 0.0254,
    "feet": 0.3048,
    "foot": 0.3048,
    "yard": 0.9144,
    "milligram": 1e-6,
    "gram": 1e-3,
    "kilogram": 1,
    "tonne": 1000,
    "litre": 1,
    "millilitre": 1e-3,
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86400,
    "week": 604800,
    "month": 1,
    "year": 12,
    "piece": 1,
    "dozen": 12,
    "kilobyte": 1,
    "megabyte": 1000,
    "gigabyte": 1_000_000,
}
