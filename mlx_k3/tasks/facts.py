"""Made-up facts: how one is stated, asked for and answered.

Owns the kinds of fact that the recall tasks hide in a text. Knows nothing of where they stand.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .wording import CITIES, COLOURS, NAMES, WORDS, made_up, name, words

_RELATIONS = words(
    "sister brother mother father aunt uncle cousin grandmother grandfather boss teacher doctor "
    "dentist plumber roommate partner dog cat horse rabbit parrot"
)
_JOBS = words(
    "baker painter teacher doctor farmer pilot nurse singer writer lawyer driver gardener cook "
    "carpenter tailor dancer plumber judge"
)
_EVENTS = words(
    "meeting lecture party workshop exam concert interview dinner rehearsal class ceremony tour"
)
_BOXES = words("box bag drawer locker case chest safe folder crate suitcase")
_DOORS = words("garden cellar office kitchen garage attic library workshop laboratory archive")
_THINGS = words("key passport ring wallet umbrella notebook camera ticket charger torch")
_SPOTS = (
    "under the carpet", "in the top drawer", "behind the mirror", "on the shelf", "in the garage",
    "next to the lamp", "in the blue jacket", "under the bed", "in the glove box", "on the piano",
    "in the kitchen", "behind the clock", "in the cellar", "on the balcony",
)  # fmt: skip
_GOODS = words("lamp chair table coat clock bicycle tent radio carpet mirror desk kettle")
_FOODS = words("pizza soup rice pasta cake salad bread curry cheese fish noodles pancakes")


@dataclass(frozen=True)
class Kind:
    """A kind of fact. Its texts have a place for each of ``about`` and for the value, ``v``."""

    name: str
    about: dict[str, Sequence[str]]
    value: Callable[[random.Random], str]
    statement: str
    update: str
    questions: tuple[str, ...]
    answer: str = ""
    """The statement, unless the person says *my* and the answer *your*."""


@dataclass(frozen=True)
class Fact:
    """What is known of one thing."""

    kind: Kind
    about: dict[str, str]
    value: str

    def _text(self, template: str) -> str:
        return template.format(v=self.value, **self.about)

    @property
    def identity(self) -> str:
        """Equal for two facts that answer the same question."""
        return " ".join((self.kind.name, *self.about.values()))

    @property
    def key(self) -> str:
        return f"recall {self.identity} {self.value}"

    @property
    def statement(self) -> str:
        return self._text(self.kind.statement)

    @property
    def update(self) -> str:
        """A statement that replaces an earlier value."""
        return self._text(self.kind.update)

    @property
    def answer(self) -> str:
        return self._text(self.kind.answer or self.kind.statement)

    def question(self, rng: random.Random) -> str:
        return self._text(rng.choice(self.kind.questions))

    def changed(self, rng: random.Random) -> "Fact":
        """The same with another value."""
        value = self.value
        while value == self.value:
            value = self.kind.value(rng)
        return replace(self, value=value)


def _one_of(values: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


def _number(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randrange(low, high))


def _time(rng: random.Random) -> str:
    return f"{rng.randrange(5, 24)}:{rng.randrange(0, 60, 5):02}"


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.8 else made_up(rng).capitalize()


def _password(rng: random.Random) -> str:
    return rng.choice(WORDS) if rng.random() < 0.6 else made_up(rng)


KINDS = (
    Kind(
        "self",
        {},
        name,
        "My name is {v}.",
        "I was wrong: my name is {v}.",
        (
            "What is my name?", "Who am I?", "Do you remember my name?", "What am I called?",
            "Do you know my name?", "Say my name.", "Tell me my name.", "What's my name?",
        ),
        answer="Your name is {v}.",
    ),
    Kind(
        "relation",
        {"who": _RELATIONS},
        name,
        "My {who}'s name is {v}.",
        "I was wrong: my {who}'s name is {v}.",
        (
            "What is my {who}'s name?", "What is the name of my {who}?", "Who is my {who}?",
            "What is my {who} called?", "Do you remember the name of my {who}?",
            "Tell me the name of my {who}.", "How is my {who} called?",
        ),
        answer="Your {who}'s name is {v}.",
    ),
    Kind(
        "code",
        {"colour": COLOURS, "box": _BOXES},
        _number(1000, 10000),
        "The code of the {colour} {box} is {v}.",
        "The code of the {colour} {box} was changed: it is {v} now.",
        (
            "What is the code of the {colour} {box}?", "Which code does the {colour} {box} have?",
            "Tell me the code of the {colour} {box}.", "What was the code of the {colour} {box}?",
            "I need the code of the {colour} {box}.", "Which code opens the {colour} {box}?",
        ),
    ),
    Kind(
        "password",
        {"door": _DOORS},
        _password,
        "The password of the {door} is {v}.",
        "The password of the {door} was changed: it is {v} now.",
        (
            "What is the password of the {door}?", "Tell me the password of the {door}.",
            "What was the password of the {door}?", "I forgot the password of the {door}.",
            "Which password does the {door} have?", "Do you know the password of the {door}?",
        ),
    ),
    Kind(
        "room",
        {"event": _EVENTS},
        _number(1, 100),
        "The {event} is in room {v}.",
        "The {event} was moved: it is in room {v} now.",
        (
            "Where is the {event}?", "In which room is the {event}?",
            "Which room is the {event} in?", "Where does the {event} take place?",
            "What is the room of the {event}?", "Tell me the room of the {event}.",
        ),
    ),
    Kind(
        "home",
        {"name": NAMES},
        _city,
        "{name} lives in {v}.",
        "{name} has moved to {v}.",
        (
            "Where does {name} live?", "In which city does {name} live?",
            "What city does {name} live in?", "Which city is {name}'s home?",
            "Do you know where {name} lives?",
        ),
    ),
    Kind(
        "job",
        {"name": NAMES},
        _one_of(_JOBS),
        "{name} works as a {v}.",
        "{name} has changed jobs and is a {v} now.",
        (
            "What is {name}'s job?", "What does {name} work as?", "Which job does {name} have?",
            "What is the job of {name}?", "Do you know what {name} works as?",
        ),
    ),
    Kind(
        "colour",
        {"name": NAMES},
        _one_of(COLOURS),
        "{name}'s favourite colour is {v}.",
        "By now {name}'s favourite colour is {v}.",
        (
            "What is {name}'s favourite colour?", "Which colour does {name} like best?",
            "Which colour is {name}'s favourite?", "Do you remember {name}'s favourite colour?",
        ),
    ),
    Kind(
        "food",
        {"name": NAMES},
        _one_of(_FOODS),
        "{name}'s favourite food is {v}.",
        "By now {name}'s favourite food is {v}.",
        (
            "What is {name}'s favourite food?", "Which food does {name} like best?",
            "What does {name} like to eat most?", "Do you remember {name}'s favourite food?",
        ),
    ),
    Kind(
        "train",
        {"city": CITIES},
        _time,
        "The train to {city} leaves at {v}.",
        "The train to {city} is late: it leaves at {v} now.",
        (
            "When does the train to {city} leave?", "At what time does the train to {city} leave?",
            "When is the train to {city}?", "What time is the train to {city}?",
        ),
    ),
    Kind(
        "age",
        {"name": NAMES},
        _number(5, 100),
        "{name} is {v} years old.",
        "I was wrong: {name} is {v} years old.",
        (
            "How old is {name}?", "What is {name}'s age?", "What is the age of {name}?",
            "Do you know how old {name} is?",
        ),
    ),
    Kind(
        "place",
        {"colour": COLOURS, "thing": _THINGS},
        _one_of(_SPOTS),
        "The {colour} {thing} is {v}.",
        "The {colour} {thing} was moved: it is {v} now.",
        (
            "Where is the {colour} {thing}?", "Where can I find the {colour} {thing}?",
            "Where did I put the {colour} {thing}?", "Do you know where the {colour} {thing} is?",
        ),
    ),
    Kind(
        "price",
        {"colour": COLOURS, "goods": _GOODS},
        _number(3, 400),
        "The {colour} {goods} costs {v} coins.",
        "The price of the {colour} {goods} has changed: it costs {v} coins now.",
        (
            "What does the {colour} {goods} cost?", "How much is the {colour} {goods}?",
            "What is the price of the {colour} {goods}?",
            "How much does the {colour} {goods} cost?",
        ),
    ),
)  # fmt: skip


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """``count`` facts that answer different questions; of few kinds, so that some are alike."""
    facts: dict[str, Fact] = {}
    kinds = rng.sample(KINDS, min(count, rng.randrange(1, 5)))
    kinds.append(rng.choice(KINDS[1:]))  # The first kind has one question only.
    while len(facts) < count:
        kind = rng.choice(kinds)
        about = {
            slot: name(rng) if pool is NAMES else rng.choice(pool)
            for slot, pool in kind.about.items()
        }
        fact = Fact(kind, about, kind.value(rng))
        facts.setdefault(fact.identity, fact)
    return list(facts.values())
