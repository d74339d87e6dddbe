"""Small logic: conclusions, chains of comparisons, negations, odd and even, larger and smaller.

Owns these families. What the statements are about is made up, so only their form can help.
"""

import random
from itertools import pairwise

from .example import Example, Family, question, same_text
from .wording import NAMES, polite, words

_KINDS = words(
    "bakers dancers singers painters runners farmers swimmers teachers climbers readers drivers "
    "gardeners blips snurks wugs zorps flims grods plonks trebs vints morps"
)
_STATES = (
    ("open", "closed"), ("on", "off"), ("wet", "dry"), ("full", "empty"), ("hot", "cold"),
    ("clean", "dirty"), ("loud", "quiet"), ("old", "new"), ("free", "busy"), ("light", "dark"),
)  # fmt: skip
_OBJECTS = words("door window lamp box bottle room machine street shop bridge gate garden radio")
_ORDERS = (
    ("taller", "tallest", "shorter", "shortest"),
    ("older", "oldest", "younger", "youngest"),
    ("faster", "fastest", "slower", "slowest"),
    ("richer", "richest", "poorer", "poorest"),
    ("heavier", "heaviest", "lighter", "lightest"),
    ("louder", "loudest", "quieter", "quietest"),
)
_ODD = (
    "Is {n} odd or even?", "Is {n} even or odd?", "Is the number {n} odd or even?",
    "{n}: odd or even?", "Tell me whether {n} is odd or even.", "Odd or even: {n}?",
    "Is {n} an even number?", "Is {n} an odd number?",
)  # fmt: skip
_LARGER = (
    "Which is larger, {a} or {b}?", "Which number is larger: {a} or {b}?", "Is {a} or {b} larger?",
    "Which is bigger, {a} or {b}?", "What is more, {a} or {b}?", "Which is smaller, {a} or {b}?",
    "Compare {a} and {b}.", "Is {a} larger than {b}?", "Is {a} smaller than {b}?",
)  # fmt: skip


def _syllogism(rng: random.Random) -> Example:
    name = rng.choice(NAMES)
    first, second, third = rng.sample(_KINDS, 3)
    one, two, three = (kind[:-1] for kind in (first, second, third))
    form = rng.randrange(5)
    if form == 0:
        facts = [f"All {first} are {second}.", f"{name} is a {one}."]
        asked, steps = two, f"{name} is a {one}, so {name} is a {two}."
        answer = f"Yes, {name} is a {two}."
    elif form == 1:
        facts = [f"No {first} are {second}.", f"{name} is a {one}."]
        asked, steps = two, f"{name} is a {one}, so {name} is not a {two}."
        answer = f"No, {name} is not a {two}."
    elif form == 2:
        facts = [f"All {first} are {second}.", f"{name} is a {two}."]
        asked, steps = one, f"{name} is a {two}. Not all {second} must be {first}."
        answer = "That does not follow."
    elif form == 3:
        facts = [f"All {first} are {second}.", f"{name} is not a {two}."]
        asked, steps = one, f"{name} is not a {two}, so {name} is not a {one}."
        answer = f"No, {name} is not a {one}."
    else:
        facts = [f"All {first} are {second}.", f"All {second} are {third}.", f"{name} is a {one}."]
        asked = three
        steps = f"{name} is a {one}, so {name} is a {two}, so {name} is a {three}."
        answer = f"Yes, {name} is a {three}."
    if rng.random() < 0.4:
        rng.shuffle(facts)
    text = f"{' '.join(facts)} Is {name} a {asked}?"
    return question("logic", text, steps, answer, f"syllogism {form} {first} {second} {name}")


def _chain(rng: random.Random) -> Example:
    people = rng.sample(NAMES, rng.randrange(3, 5))  # From the most to the least.
    more, most, less, least = rng.choice(_ORDERS)
    facts = []
    for high, low in pairwise(people):
        plain = rng.random() < 0.7
        facts.append(f"{high} is {more} than {low}." if plain else f"{low} is {less} than {high}.")
    rng.shuffle(facts)
    form = rng.randrange(3)
    if form == 0:
        asked, answer = f"Who is the {most}?", f"{people[0]} is the {most}."
    elif form == 1:
        asked, answer = f"Who is the {least}?", f"{people[-1]} is the {least}."
    else:
        first, second = rng.sample(people, 2)
        asked = f"Is {first} {more} than {second}?"
        holds = people.index(first) < people.index(second)
        not_ = "" if holds else "not "
        answer = f"{'Yes' if holds else 'No'}, {first} is {not_}{more} than {second}."
    steps = f"{more}: {' > '.join(people)}."
    key = f"chain {more} {' '.join(people)}"
    return question("logic", f"{' '.join(facts)} {asked}", steps, answer, key)


def _negation(rng: random.Random) -> Example:
    thing, (state, opposite) = rng.choice(_OBJECTS), rng.choice(_STATES)
    if rng.random() < 0.5:
        state, opposite = opposite, state
    start, is_so = rng.choice(
        (
            (f"The {thing} is {state}.", True),
            (f"The {thing} is not {state}.", False),
            (f"It is true that the {thing} is {state}.", True),
            (f"It is not true that the {thing} is {state}.", False),
            (f"It is false that the {thing} is {state}.", False),
            (f"It is not true that the {thing} is not {state}.", True),
            (f"It is false that the {thing} is not {state}.", True),
            (f"The {thing} is {opposite}, so it is not {state}.", False),
        )
    )
    not_ = "" if is_so else "not "
    key = f"negation {thing} {state} {start.split(' the ')[0]}"
    answer = f"{'Yes' if is_so else 'No'}, the {thing} is {not_}{state}."
    steps = f"The {thing} is {not_}{state}."
    return question("logic", f"{start} Is the {thing} {state}?", steps, answer, key)


def _make_logic(rng: random.Random) -> Example:
    return rng.choice((_syllogism, _chain, _chain, _negation))(rng)


def _parity(rng: random.Random) -> Example:
    n = rng.randrange(10 ** rng.randrange(1, 5))
    kind = "odd" if n % 2 else "even"
    text = polite(rng, rng.choice(_ODD).format(n=n))
    steps = f"{n} ends in {n % 10}, {n % 10} is {kind}."
    return question("numbers", text, steps, f"{n} is {kind}.", f"parity {n}")


def _comparison(rng: random.Random) -> Example:
    limit = 10 ** rng.randrange(1, 4)
    a, b = rng.sample(range(limit), 2)
    text = polite(rng, rng.choice(_LARGER).format(a=a, b=b))
    steps = f"{a} {'>' if a > b else '<'} {b}."
    answer = f"{max(a, b)} is larger than {min(a, b)}."
    return question("numbers", text, steps, answer, f"larger {min(a, b)} {max(a, b)}")


def _make_numbers(rng: random.Random) -> Example:
    return (_parity if rng.random() < 0.5 else _comparison)(rng)


FAMILIES = (
    Family("logic", 5, _make_logic, same_text),
    Family("numbers", 2, _make_numbers, same_text),
)
