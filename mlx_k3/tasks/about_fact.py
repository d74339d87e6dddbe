"""What a fact about mlx-k3 is, for the questions of :mod:`.about`.

A fact's topics are other words for the same thing, the first one its name; its kind says in which
patterns they stand: after "What is" (``WHAT``), "What does ... do" (``DOES``), "How do I" (``HOW``)
or "What is the" (``SIZE``). ``whole`` are questions of their own.
"""

from typing import NamedTuple

WHAT, DOES, HOW, SIZE = "what", "does", "how", "size"


class AboutFact(NamedTuple):
    """The one right answer, and what is asked for when it is given."""

    kind: str
    topics: tuple[str, ...]
    answer: str
    whole: tuple[str, ...]


def fact(kind: str, topics: str, answer: str, *whole: str) -> AboutFact:
    """A fact; ``topics`` are separated by semicolons."""
    return AboutFact(kind, tuple(topics.split("; ")), answer, whole)
