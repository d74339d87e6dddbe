"""Conversions between units, from a fixed table, worked step by step.

Owns the table, which the tool ``convert`` uses too. Every number is a whole one or a decimal of few
digits, kept as a fraction: no result is rounded.
"""

import random
from dataclasses import dataclass
from decimal import Decimal

from .arithmetic import key as sum_key
from .arithmetic import multiplication_steps
from .example import Example, Family, question, same_text
from .wording import polite


@dataclass(frozen=True)
class Unit:
    """A unit's symbol, its name for one and for several, and how many base units it holds."""

    symbol: str
    one: str
    many: str
    base: str
    factor: Decimal
    also: tuple[str, ...] = ()


def _unit(symbol: str, one: str, base: str, factor: str, *also: str, many: str = "") -> Unit:
    return Unit(symbol, one, many or f"{one}s", base, Decimal(factor), also)


UNITS = (
    _unit("mm", "millimetre", "length", "1", "millimeters"),
    _unit("cm", "centimetre", "length", "10", "centimeters"),
    _unit("m", "metre", "length", "1000", "meters"),
    _unit("km", "kilometre", "length", "1000000", "kilometers"),
    _unit("in", "inch", "length", "25.4", many="inches"),
    _unit("ft", "foot", "length", "304.8", many="feet"),
    _unit("yd", "yard", "length", "914.4"),
    _unit("mg", "milligram", "mass", "1"),
    _unit("g", "gram", "mass", "1000", "grammes"),
    _unit("kg", "kilogram", "mass", "1000000", "kilos"),
    _unit("t", "tonne", "mass", "1000000000", "tons"),
    _unit("ml", "millilitre", "volume", "1", "milliliters"),
    _unit("l", "litre", "volume", "1000", "liters"),
    _unit("s", "second", "time", "1", "sec"),
    _unit("min", "minute", "time", "60"),
    _unit("h", "hour", "time", "3600", "hrs"),
    _unit("d", "day", "time", "86400"),
    _unit("wk", "week", "time", "604800"),
    _unit("mo", "month", "months", "1"),
    _unit("yr", "year", "months", "12"),
    _unit("pc", "piece", "number", "1"),
    _unit("dz", "dozen", "number", "12", many="dozen"),
    _unit("kB", "kilobyte", "data", "1"),
    _unit("MB", "megabyte", "data", "1000"),
    _unit("GB", "gigabyte", "data", "1000000"),
)
BY_NAME = {name: u for u in UNITS for name in (u.symbol, u.one, u.many, *u.also)}

# What is asked without a tool: (from, to), one of them a small multiple of the other.
_PAIRS = (
    ("km", "m"), ("m", "cm"), ("cm", "mm"), ("kg", "g"), ("g", "mg"), ("t", "kg"), ("l", "ml"),
    ("min", "s"), ("h", "min"), ("d", "h"), ("wk", "d"), ("yr", "mo"), ("dz", "pc"), ("ft", "in"),
    ("yd", "ft"), ("GB", "MB"), ("MB", "kB"), ("in", "cm"),
)  # fmt: skip

_QUESTIONS = (
    "How many {b} are {n} {a}?", "Convert {n} {a} to {b}.", "What is {n} {a} in {b}?",
    "{n} {a} in {b}", "{n} {a} = ? {b}", "How many {b} are in {n} {a}?", "Express {n} {a} in {b}.",
    "How much is {n} {a} in {b}?", "{n} {a} to {b}", "Change {n} {a} into {b}.",
    "I have {n} {a}. How many {b} is that?", "Please convert {n} {a} into {b}.",
)  # fmt: skip


def amount(value: Decimal, unit: Unit) -> str:
    """``7 hours``, ``1 hour``, ``17.78 centimetres``."""
    return f"{plain(value)} {unit.one if value == 1 else unit.many}"


def plain(value: Decimal) -> str:
    """Without trailing zeros and without an exponent."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def converted(value: Decimal, start: Unit, end: Unit) -> Decimal:
    """``value`` of ``start`` in ``end``, rounded to 6 digits."""
    result = value * start.factor / end.factor
    return Decimal(f"{result:.6g}")


def _spoken(rng: random.Random, unit: Unit) -> str:
    dice = rng.random()
    if dice < 0.7:
        return unit.many
    return rng.choice(unit.also) if unit.also and dice < 0.85 else unit.symbol


def _small(rng: random.Random, factor: Decimal) -> int:
    """How many of the larger unit: such that the product is easy by its steps."""
    if factor in (10, 100, 1000):
        return rng.randrange(2, 100)
    return rng.randrange(2, 60) if factor in (3, 7, 60) else rng.randrange(2, 10)


def _down(n: int, factor: Decimal) -> str:
    """Steps from the larger unit to the smaller."""
    if factor == 60:
        product = multiplication_steps(6, n)
        return f"{n} * 60: {product} {n * 60}."
    if factor in (10, 100, 1000):
        return f"{n} * {factor} = {n * int(factor)}."
    if factor == Decimal("2.54"):
        return f"{n} * 2.54: {multiplication_steps(n, 254)} {plain(n * factor)}."
    a, b = sorted((n, int(factor)))
    return multiplication_steps(a, b)


def _make_units(rng: random.Random) -> Example:
    large, small = (BY_NAME[name] for name in rng.choice(_PAIRS))
    factor = large.factor / small.factor
    n = _small(rng, factor)
    many = n * factor
    each = f"1 {large.one} = {amount(factor, small)}."
    if rng.random() < 0.6:
        given, start, end, result = Decimal(n), large, small, many
        steps = f"{each} {_down(n, factor)}"
    else:
        given, start, end, result = many, small, large, Decimal(n)
        steps = f"{each} {plain(many)} / {plain(factor)} = {n}."
    key = f"units {start.symbol} {end.symbol} {plain(given)}"
    if factor == int(factor) and start is large and factor not in (10, 100, 1000, 60):
        key += "\n" + sum_key("*", n, int(factor))
    text = rng.choice(_QUESTIONS).format(n=plain(given), a=_spoken(rng, start), b=_spoken(rng, end))
    answer = f"{amount(given, start)} = {amount(result, end)}."
    return question("units", polite(rng, text), steps, answer, key)


FAMILIES = (Family("units", 5, _make_units, same_text),)
