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
        sentences = sections[place].split(". ")
        sentences.insert(rng.randrange(len(sentences)), other.statement.rstrip("."))
        sections[place] = ". ".join(part for part in sentences if part)
    return sections


def _make(family: str, rng: random.Random, words: int, before: int, rivals: int) -> Example:
    """A fact, ``words`` words, and the question; ``before`` words and ``rivals`` facts around."""
    fact, *others = draw_facts(rng, 1 + rivals)
    early = rng.randrange(len(others) + 1)
    [opening] = _sections(rng, others[:early], before, 1)
    told = fact.statement
    if rng.random() < 0.2:  # An older value comes first; the later one holds.
        opening = f"{fact.changed(rng).statement} {opening}".strip()
        told = fact.update
    told = f"{opening} {told}".strip()
    late = others[early:]
    asked = rng.choice(_ASK) + polite(rng, fact.question(rng))
    # What the other facts add to the distance is taken off the filler.
    words -= sum(other.statement.count(" ") + 1 for other in late)
    parts = rng.choice((1, 1, 1, 2, 3)) if words > 12 else 1
    sections = _sections(rng, late, max(words, 0), parts)
    dice = rng.random()
    if dice < 0.4:  # One long message.
        gap = "\n" if rng.random() < 0.5 else " "
        text = gap.join(part for part in (told, *sections, asked) if part)
        messages = [user(rng.choice(_READ) + text)]
    elif dice < 0.6:  # By the system.
        messages = [{"role": SYSTEM, "content": rng.choice(_NOTES) + told}]
        messages.append(user("\n".join(part for part in (*sections, asked) if part)))
    else:  # In former turns.
        messages = [user(rng.choice(_READ) + told), noted()]
        for section in filter(None, sections):
            messages += [user(section), noted()]
        messages.append(user(asked))
    return Example(family, [*messages, recalled(fact)], key=fact.key)


def _make_500(rng: random.Random) -> Example:
    words = rng.randrange(350, 376)
    return _make("recall", rng, words, rng.randrange(60), rng.randrange(1, 7))


def _make_short(rng: random.Random) -> Example:
    return _make("recall_short", rng, rng.randrange(60), rng.randrange(30), rng.randrange(5))


def _make_medium(rng: random.Random) -> Example:
    words = rng.randrange(60, 350)
    return _make("recall_medium", rng, words, rng.randrange(60), rng.randrange(1, 7))


def _make_long(rng: random.Random) -> Example:
    words = rng.randrange(380, 1050)
    return _make("recall_long", rng, words, rng.randrange(100), rng.randrange(1, 9))


FAMILIES = (
    Family("recall", 7, _make_500, same_text),
    Family("recall_short", 9, _make_short, same_text),
    Family("recall_medium", 5, _make_medium, same_text),
    Family("recall_long", 1.5, _make_long, same_text),
)
