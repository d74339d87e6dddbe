"""Recalling a fact that was given earlier: in the same message, in a former turn, by the system.

Owns how far back it lies and what stands in between. The distance is counted in words of the text
after the fact; in a small vocabulary a word takes about 1.4 tokens.
"""

import random

from .example import SYSTEM, Example, Family, Message, assistant, same_text, user
from .facts import Fact, draw_facts
from .filler import passage
from .wording import polite

_READ = ("Read this: ", "Here is a text. ", "Remember this. ", "Some notes: ", "", "", "")
_ASK = ("", "", "Question: ", "Now my question: ", "And now: ", "From the text: ")
_NOTES = ("Notes of the user: ", "What the user has said before: ", "The user wrote: ")
NOTED = "Noted."


def noted() -> Message:
    """The answer to a message that only tells something."""
    return assistant("I remember this.", NOTED)


def recalled(fact: Fact) -> Message:
    """The answer to the question about ``fact``."""
    return assistant(f"I was told: {fact.statement}", fact.answer)


def _sections(rng: random.Random, others: list[Fact], words: int, parts: int) -> list[str]:
    """``parts`` texts of ``words`` words together, with the statements of ``others`` among them."""
    sections = [passage(rng, words // parts) for _ in range(parts)]
    for other in others:
        place = rng.randrange(parts)
        sentences = [part for part in sections[place].rstrip(".").split(". ") if part]
        sentences.insert(rng.randrange(len(sentences) + 1), other.statement.rstrip("."))
        sections[place] = ". ".join(sentences) + "."
    return sections


def told_and_asked(
    rng: random.Random, told: str, asked: str, early: list[Fact], late: list[Fact], words: int
) -> list[Message]:
    """A person tells something, ``words`` words follow, and a question is asked.

    ``early`` facts stand before it and ``late`` ones among the words, which they count to.
    """
    before = 0 if rng.random() < 0.5 else rng.randrange(60)
    [opening] = _sections(rng, early, before, 1)
    told = f"{opening} {told}".strip()
    asked = rng.choice(_ASK) + asked
    words -= sum(other.statement.count(" ") + 1 for other in late)
    parts = rng.choice((1, 1, 1, 2, 3)) if words > 12 else 1
    sections = _sections(rng, late, max(words, 0), parts)
    dice = rng.random()
    if dice < 0.4:  # One long message.
        gap = "\n" if rng.random() < 0.5 else " "
        text = gap.join(part for part in (told, *sections, asked) if part)
        return [user(rng.choice(_READ) + text)]
    if dice < 0.6:  # By the system.
        notes = {"role": SYSTEM, "content": (rng.choice(_NOTES) + told).strip()}
        return [notes, user("\n".join(part for part in (*sections, asked) if part))]
    messages = [user(rng.choice(_READ) + told), noted()] if told else []  # In former turns.
    for section in filter(None, sections):
        messages += [user(section), noted()]
    return [*messages, user(asked)]


def _make(family: str, rng: random.Random, words: int, rivals: int) -> Example:
    """A fact among ``rivals`` others, ``words`` words, and the question."""
    fact, *others = draw_facts(rng, 1 + rivals)
    place = rng.randrange(len(others) + 1)
    told = fact.statement
    if rng.random() < 0.2:  # An older value comes first; the later one holds.
        told = f"{fact.changed(rng).statement} {fact.update}"
    asked = polite(rng, fact.question(rng))
    messages = told_and_asked(rng, told, asked, others[:place], others[place:], words)
    return Example(family, [*messages, recalled(fact)], key=fact.key)


def _make_500(rng: random.Random) -> Example:
    return _make("recall", rng, rng.randrange(350, 376), rng.randrange(1, 7))


def _make_short(rng: random.Random) -> Example:
    words = 0 if rng.random() < 0.4 else rng.randrange(60)
    return _make("recall_short", rng, words, rng.randrange(5))


def _make_medium(rng: random.Random) -> Example:
    return _make("recall_medium", rng, rng.randrange(60, 350), rng.randrange(1, 7))


def _make_long(rng: random.Random) -> Example:
    return _make("recall_long", rng, rng.randrange(380, 1050), rng.randrange(1, 9))


FAMILIES = (
    Family("recall", 7, _make_500, same_text),
    Family("recall_short", 9, _make_short, same_text),
    Family("recall_medium", 5, _make_medium, same_text),
    Family("recall_long", 1.5, _make_long, same_text),
)
