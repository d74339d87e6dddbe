"""Copying, reversing, sorting and counting what stands in the question.

Owns these families and their worked steps.
"""

import random
from collections.abc import Sequence

from .example import Example, Family, question, same_text
from .filler import sentence
from .wording import CITIES, NAMES, WORDS, polite

LETTERS = "abcdefghijklmnopqrstuvwxyz"

_COPY = (
    "Repeat: {}", "Copy this: {}", "Repeat exactly: {}", "Say this back to me: {}",
    "Copy the following text.\n{}", "Repeat after me: {}", "Write this again: {}",
    "Please repeat this text word for word: {}", 'Repeat the text between the quotes: "{}"',
    "Return this unchanged: {}", "Echo: {}", "Give me exactly this back:\n{}",
)  # fmt: skip
_COPY_LINE = (
    "Repeat:\n{}", "Copy this:\n{}", "Repeat this exactly.\n{}", "Say this back to me:\n{}",
    "Copy the following text.\n{}", "Write this again:\n{}", "Repeat the next line.\n{}",
    "Return this unchanged:\n{}", "Give me exactly this back:\n{}",
)  # fmt: skip
_CODE = (
    "print({a} + {b})", "{v} = {a}", "for {v} in range({a}):", "if {v} > {a}: return {w}",
    'mlx-k3 generate --prompt "{w}"', "{v} = {w}({a}, {b})", "def {v}({w}): return {w} * {a}",
    "{{{v}: {a}, {w}: {b}}}", "let {v} = [{a}, {b}];", "ls -l {v}/{w}.txt", "{v}.{w}[{a}] += {b}",
)  # fmt: skip
_REVERSE = (
    "Reverse this list: {}", "Write these in reverse order: {}", "Turn the list around: {}",
    "Give me this list backwards: {}", "Reverse: {}", "List these from last to first: {}",
    "What is {} in reverse order?", "Put these in the opposite order: {}",
)  # fmt: skip
_SORT_UP = (
    "Sort these numbers: {}", "Sort in ascending order: {}", "Sort: {}", "Order these numbers: {}",
    "Put these numbers in ascending order: {}", "Sort from smallest to largest: {}",
    "Arrange from low to high: {}", "What is {} in ascending order?", "Sort the list {}",
)  # fmt: skip
_SORT_DOWN = (
    "Sort these numbers in descending order: {}", "Sort in descending order: {}",
    "Put these numbers in descending order: {}", "Sort from largest to smallest: {}",
    "Arrange from high to low: {}", "What is {} in descending order?", "Sort downwards: {}",
)  # fmt: skip
_SORT_WORDS = (
    "Sort these words: {}", "Sort alphabetically: {}", "Put these words in alphabetical order: {}",
    "Arrange from A to Z: {}", "Order these words alphabetically: {}", "Sort the words {}",
    "What is {} in alphabetical order?",
)  # fmt: skip
_COUNT = (
    "How many items are in this list: {}?", "Count these: {}", "How many words are there: {}?",
    "How long is this list: {}?", "Count the items: {}", "How many things do I list here: {}?",
)  # fmt: skip
_LETTER = (
    'How many times does the letter "{c}" appear in "{w}"?', "How many {c} are in {w}?",
    'Count the letter {c} in "{w}".', 'How often does {c} stand in the word "{w}"?',
    "How many {c}'s are there in {w}?", "Count the {c}'s in {w}.",
)  # fmt: skip
_LENGTH = (
    "How many letters does {w} have?", 'How many letters are in "{w}"?',
    'Count the letters of "{w}".', "How long is the word {w}?", "How many letters has {w}?",
)  # fmt: skip
_SPELL = ("Spell {w}.", 'Spell "{w}".', "How do you spell {w}?", "Spell the word {w} for me.")
_LARGEST = (
    "What is the largest of these numbers: {}?", "Which number is the largest: {}?",
    "Find the maximum of {}.", "What is the maximum of {}?", "The biggest of {}?", "max: {}",
    "Which is the greatest number: {}?",
)  # fmt: skip
_SMALLEST = (
    "What is the smallest of these numbers: {}?", "Which number is the smallest: {}?",
    "Find the minimum of {}.", "What is the minimum of {}?", "The smallest of {}?", "min: {}",
    "Which is the lowest number: {}?",
)  # fmt: skip


def _numbers(rng: random.Random, count: int) -> list[int]:
    """Different numbers, mostly of one and two digits."""
    limit = 100 if rng.random() < 0.8 else 1000
    return rng.sample(range(limit), count)


def _words(rng: random.Random, count: int) -> list[str]:
    """Different words, cities or names."""
    dice = rng.random()
    return rng.sample(WORDS if dice < 0.7 else CITIES if dice < 0.85 else NAMES, count)


def _joined(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def _shown(rng: random.Random, items: Sequence[object]) -> str:
    """A list as people write it."""
    text = (" " if rng.random() < 0.2 else ", ").join(map(str, items))
    return f"[{text}]" if rng.random() < 0.1 and ", " in text else text


def _copy_text(rng: random.Random) -> str:
    dice = rng.random()
    if dice < 0.25:
        return _shown(rng, _words(rng, rng.randrange(3, 11)))
    if dice < 0.4:
        return _shown(rng, [rng.randrange(1000) for _ in range(rng.randrange(3, 9))])
    if dice < 0.6:
        return "".join(rng.choices(LETTERS, k=rng.randrange(4, 13)))
    if dice < 0.7:
        return " ".join(rng.choices(LETTERS.upper() + "0123456789", k=rng.randrange(4, 11)))
    if dice < 0.85:
        return sentence(rng)
    a, b, v, w = rng.randrange(100), rng.randrange(100), rng.choice(LETTERS), rng.choice(WORDS)
    return rng.choice(_CODE).format(a=a, b=b, v=v, w=w)


def _make_copy(rng: random.Random) -> Example:
    text = _copy_text(rng)
    # A space before a nonsense word would join its first letters into other tokens.
    line = " " not in text and rng.random() < 0.7
    asked = rng.choice(_COPY_LINE if line else _COPY).format(text)
    return question("copy", asked, "I repeat the text.", text, f"copy {text}")


def _make_reverse(rng: random.Random) -> Example:
    count = rng.randrange(3, 8)
    items = [str(n) for n in _numbers(rng, count)] if rng.random() < 0.4 else _words(rng, count)
    numbered = [f"{i} {item}" for i, item in enumerate(items, 1)]
    steps = f"{_joined(numbered)}. {_joined(numbered[::-1])}."
    text = rng.choice(_REVERSE).format(_shown(rng, items))
    return question("reverse", text, steps, _joined(items[::-1]), f"reverse {_joined(items)}")


def _insertion(items: Sequence[int | str], descending: bool) -> str:
    """``Insert 5: 5. Insert 3: 3 5. ...``: each item goes into the sorted ones before it."""
    steps = []
    for count, item in enumerate(items, 1):
        done = sorted(items[:count], reverse=descending)
        steps.append(f"{item}: {' '.join(map(str, done))}")
    return "; ".join(steps) + "."


def _make_sort(rng: random.Random) -> Example:
    return _sort("sort", rng, rng.randrange(3, 7))


def _make_sort_long(rng: random.Random) -> Example:
    return _sort("sort_long", rng, rng.randrange(7, 9))


def _sort(family: str, rng: random.Random, count: int) -> Example:
    descending = False
    items: list[int] | list[str]
    if rng.random() < 0.35:
        items, templates = _words_apart(rng, count), _SORT_WORDS
    else:
        items, descending = _numbers(rng, count), rng.random() < 0.4
        templates = _SORT_DOWN if descending else _SORT_UP
    text = rng.choice(templates).format(_shown(rng, items))
    answer = _joined(sorted(items, reverse=descending))
    key = f"sort {_joined(items)}"
    return question(family, text, _insertion(items, descending), answer, key)


def _words_apart(rng: random.Random, count: int) -> list[str]:
    """Words with different first letters."""
    by_letter = {word[0]: word for word in rng.sample(WORDS, len(WORDS) // 2)}
    return rng.sample(sorted(by_letter.values()), count)


def _make_count(rng: random.Random) -> Example:
    items = _words(rng, rng.randrange(2, 13))
    steps = _joined([f"{i} {item}" for i, item in enumerate(items, 1)])
    text = rng.choice(_COUNT).format(_joined(items))
    answer = f"There are {len(items)}."
    return question("count", text, f"{steps}.", answer, f"count {_joined(items)}")


def _make_letters(rng: random.Random) -> Example:
    word = rng.choice(WORDS)
    dice = rng.random()
    if dice < 0.3:
        text = polite(rng, rng.choice(_SPELL).format(w=word))
        answer, steps, key = "-".join(word), "I spell it.", f"spell {word}"
    elif dice < 0.55:
        text = polite(rng, rng.choice(_LENGTH).format(w=word))
        steps = " ".join(f"{c} {i}" for i, c in enumerate(word, 1)) + "."
        answer, key = f'"{word}" has {len(word)} letters.', f"length {word}"
    else:
        letter = rng.choice(word if rng.random() < 0.8 else LETTERS)
        text = polite(rng, rng.choice(_LETTER).format(w=word, c=letter))
        steps = " ".join(f"{c} {word[:i].count(letter)}" for i, c in enumerate(word, 1)) + "."
        times = word.count(letter)
        noun = "time" if times == 1 else "times"
        answer = f'The letter "{letter}" appears {times} {noun} in "{word}".'
        key = f"letters {word} {letter}"
    return question("letters", text, steps, answer, key)


def _make_extreme(rng: random.Random) -> Example:
    numbers = _numbers(rng, rng.randrange(3, 9))
    largest = rng.random() < 0.5
    pick, name = (max, "largest") if largest else (min, "smallest")
    steps = "; ".join(f"{n}: {pick(numbers[:i])}" for i, n in enumerate(numbers, 1)) + "."
    text = rng.choice(_LARGEST if largest else _SMALLEST).format(_joined(numbers))
    answer = f"The {name} is {pick(numbers)}."
    return question("extreme", text, steps, answer, f"extreme {_joined(numbers)}")


FAMILIES = (
    Family("copy", 8, _make_copy, same_text),
    Family("reverse", 2.5, _make_reverse, same_text),
    Family("sort", 8, _make_sort, same_text),
    Family("sort_long", 3, _make_sort_long, same_text),
    Family("count", 2.5, _make_count, same_text),
    Family("letters", 3.5, _make_letters, same_text),
    Family("extreme", 2.5, _make_extreme, same_text),
)
