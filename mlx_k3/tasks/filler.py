"""Plain sentences that say nothing anyone asks about.

Owns the little grammar of the text between a fact and the question about it.
"""

import random

from .wording import words

_ADJECTIVES = words(
    "new small large quiet bright heavy light narrow wide late simple strange calm busy "
    "warm cold dark young local distant common rare gentle rough smooth famous modern plain"
)
_NOUNS = words(
    "road bridge hill lake market school library station park square field forest shop boat ship "
    "bird wind rain cloud story song letter picture map wall window roof floor stone machine "
    "wheel clock paper book lesson game morning summer winter village town street crowd "
    "teacher farmer driver painter neighbour visitor guest child friend team"
)
_VERBS = words(
    "crossed followed watched reached left passed found noticed remembered described painted "
    "visited repaired cleaned moved opened closed carried missed liked"
)
_ALONE = words(
    "slept waited laughed rested changed disappeared returned arrived stopped continued turned "
    "grew faded settled"
)
_ADVERBS = words("slowly quickly often rarely again together early quietly suddenly later")
_PLACES = (
    "near the river", "behind the station", "at the market", "on the hill", "in the valley",
    "by the lake", "under the bridge", "along the road", "at the edge of the forest",
    "in the old town", "on the other side", "not far from the coast", "in front of the school",
)  # fmt: skip
_TIMES = (
    "In the morning", "After the rain", "Before the winter", "At noon", "Later", "That evening",
    "Some days", "In those years", "At first", "Once more", "Every summer", "As usual",
)  # fmt: skip


def sentence(rng: random.Random) -> str:
    """One sentence of 5 to 14 words."""
    choice = rng.choice
    adjective, noun, other = choice(_ADJECTIVES), choice(_NOUNS), choice(_NOUNS)
    form = rng.randrange(8)
    if form == 0:
        return f"The {adjective} {noun} {choice(_VERBS)} the {other}."
    if form == 1:
        return f"{choice(_TIMES)} the {noun} {choice(_ALONE)} {choice(_PLACES)}."
    if form == 2:
        return f"The {noun} {choice(_ALONE)} {choice(_ADVERBS)}, and the {other} {choice(_ALONE)}."
    if form == 3:
        return f"{choice(_TIMES)} a {noun} {choice(_VERBS)} the {adjective} {other}."
    if form == 4:
        return f"It was a {adjective} {noun} {choice(_PLACES)}."
    if form == 5:
        return f"Nobody {choice(_VERBS)} the {noun}, because the {other} {choice(_ALONE)}."
    if form == 6:
        return f"They {choice(_ADVERBS)} {choice(_VERBS)} a {noun} and a {adjective} {other}."
    return f"When the {noun} {choice(_ALONE)}, the {adjective} {other} {choice(_ALONE)}."


def passage(rng: random.Random, words: int) -> str:
    """Sentences of about ``words`` words together; none for 0."""
    parts: list[str] = []
    while words > 0:
        parts.append(sentence(rng))
        words -= parts[-1].count(" ") + 1
    return " ".join(parts)
