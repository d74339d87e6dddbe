"""Sums, differences and products of small whole numbers, worked digit by digit.

Owns the steps (other tasks use them) and the keys under which operands are kept from training.
"""

import random

from .example import Example, Family, question, same_text
from .wording import NAMES, polite, words

THINGS = words("apples books coins stamps eggs cards pens shells nuts tickets")

_ADDITION = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?",
    "{a}+{b}=", "Add {a} and {b}.", "Calculate {a} + {b}.", "What do {a} and {b} make?",
    "How much is {a} plus {b}?", "How much is {a} + {b}?", "Work out {a} + {b}.",
    "What is the sum of {a} and {b}?", "Compute the sum of {a} and {b}.", "Sum: {a} and {b}",
    "{a} plus {b}", "{a} plus {b} is what?", "Add {b} to {a}.", "Can you add {a} and {b}?",
    "I have {a} {things} and get {b} more. How many do I have?",
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} in another. How many are there together?",
    "A shop sold {a} {things} yesterday and {b} today. How many in total?",
)  # fmt: skip
_SUBTRACTION = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?",
    "{a}-{b}=", "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} minus {b}?",
    "How much is {a} - {b}?", "Work out {a} - {b}.", "Take {b} away from {a}.", "{a} minus {b}",
    "What is {a} less {b}?", "What is left of {a} if you take away {b}?", "Compute {a} - {b}.",
    "{a} minus {b} is what?", "Can you subtract {b} from {a}?",
)  # fmt: skip
# A story needs something to be left.
_SUBTRACTION_STORIES = (
    "I have {a} {things} and give away {b}. How many are left?",
    "{name} had {a} {things} and lost {b}. How many {things} does {name} have now?",
    "There were {a} {things} in a box, and {b} were taken out. How many are still there?",
    "A shop had {a} {things} and sold {b}. How many remain?",
)
_MULTIPLICATION = (
    "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}",
    "{a} * {b} = ?", "Multiply {a} by {b}.", "Multiply {a} and {b}.", "Calculate {a} * {b}.",
    "How much is {a} times {b}?", "What is the product of {a} and {b}?", "{a} times {b}",
    "Work out {a} x {b}.", "What is {a} multiplied by {b}?", "How much is {a} x {b}?",
    "There are {a} boxes with {b} {things} each. How many {things} are there?",
    "One ticket costs {b} coins. What do {a} tickets cost?",
)  # fmt: skip


def key(operator: str, a: int, b: int) -> str:
    """The identity of ``a operator b``; one for both orders where the result is the same."""
    name = {"+": "addition", "-": "subtraction", "*": "multiplication", "/": "division"}[operator]
    if operator in "+*":
        a, b = sorted((a, b))
    return f"{name} {a} {b}"


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of both, the last ones first."""
    width = max(len(str(a)), len(str(b)))
    digits = zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True)
    return [(int(x), int(y)) for x, y in digits]


def addition_steps(a: int, b: int) -> str:
    """``47 + 85: 7 + 5 = 12, write 2 carry 1. 4 + 8 + 1 = 13. 132.``"""
    columns, steps, carry = _columns(a, b), [], None
    for x, y in columns:
        total = x + y + (carry or 0)
        step = f"{x} + {y}" + ("" if carry is None else f" + {carry}") + f" = {total}"
        carry = total // 10
        if len(steps) < len(columns) - 1:
            step += f", write {total % 10} carry {carry}"
        steps.append(step)
    return f"{a} + {b}: {'. '.join(steps)}. {a + b}."


def subtraction_steps(a: int, b: int) -> str:
    """``85 - 47: 15 - 7 = 8 borrow 1. 8 - 4 - 1 = 3. 38.``, turned round if ``a < b``."""
    start = f"{a} - {b}: "
    if a < b:
        start += f"{a} < {b}, turn. {b} - {a}: "
    columns, steps, borrow = _columns(max(a, b), min(a, b)), [], None
    for x, y in columns:
        taken = f" - {y}" + ("" if borrow is None else f" - {borrow}")
        rest = x - y - (borrow or 0)
        borrow = int(rest < 0)
        steps.append(f"{x + 10 * borrow}{taken} = {rest + 10 * borrow}")
        if len(steps) < len(columns):
            steps[-1] += f" borrow {borrow}"
    return f"{start}{'. '.join(steps)}. {a - b}."


def multiplication_steps(digit: int, number: int) -> str:
    """``8 * 47: 8 * 7 = 56, write 6 carry 5. 8 * 4 = 32, 32 + 5 = 37. 376.``"""
    digits, steps, carry = [int(d) for d in reversed(str(number))], [], None
    for place, d in enumerate(digits):
        product = digit * d
        step = f"{digit} * {d} = {product}"
        if carry is not None:
            step += f", {product} + {carry} = {product + carry}"
        total = product + (carry or 0)
        carry = total // 10
        if place < len(digits) - 1:
            step += f", write {total % 10} carry {carry}"
        steps.append(step)
    return f"{digit} * {number}: {'. '.join(steps)}. {digit * number}."


def _ask(rng: random.Random, templates: tuple[str, ...], a: int, b: int) -> str:
    text = rng.choice(templates).format(a=a, b=b, things=rng.choice(THINGS), name=rng.choice(NAMES))
    # A name at the beginning keeps its capital.
    return text if text.split(" ", 1)[0] in NAMES else polite(rng, text)


def _number(rng: random.Random) -> int:
    """One to three digits, each length as likely."""
    return rng.choice((rng.randrange(10), rng.randrange(10, 100), rng.randrange(100, 1000)))


def _addition(family: str, rng: random.Random, a: int, b: int) -> Example:
    text = _ask(rng, _ADDITION, a, b)
    return question(family, text, addition_steps(a, b), f"{a} + {b} = {a + b}.", key("+", a, b))


def _subtraction(family: str, rng: random.Random, a: int, b: int) -> Example:
    templates = _SUBTRACTION + _SUBTRACTION_STORIES if a > b else _SUBTRACTION
    text = _ask(rng, templates, a, b)
    steps = subtraction_steps(a, b)
    return question(family, text, steps, f"{a} - {b} = {a - b}.", key("-", a, b))


def _two_digits(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(10, 100), rng.randrange(10, 100)


def _make_addition(rng: random.Random) -> Example:
    return _addition("addition", rng, *_two_digits(rng))


def _make_addition_mixed(rng: random.Random) -> Example:
    return _addition("addition_mixed", rng, _number(rng), _number(rng))


def _make_subtraction(rng: random.Random) -> Example:
    a, b = _two_digits(rng)
    if rng.random() < 0.5:
        a, b = max(a, b), min(a, b)
    return _subtraction("subtraction", rng, a, b)


def _make_subtraction_mixed(rng: random.Random) -> Example:
    a, b = _number(rng), _number(rng)
    if rng.random() < 0.6:
        a, b = max(a, b), min(a, b)
    return _subtraction("subtraction_mixed", rng, a, b)


def _make_multiplication(rng: random.Random) -> Example:
    digit, number = rng.randrange(2, 10), rng.randrange(2, 100)
    a, b = (digit, number) if rng.random() < 0.6 else (number, digit)
    text = _ask(rng, _MULTIPLICATION, a, b)
    steps = multiplication_steps(min(a, b), max(a, b))
    return question("multiplication", text, steps, f"{a} * {b} = {a * b}.", key("*", a, b))


FAMILIES = (
    Family("addition", 8, _make_addition, same_text),
    Family("addition_mixed", 3, _make_addition_mixed, same_text),
    Family("subtraction", 8, _make_subtraction, same_text),
    Family("subtraction_mixed", 3, _make_subtraction_mixed, same_text),
    Family("multiplication", 5, _make_multiplication, same_text),
)
