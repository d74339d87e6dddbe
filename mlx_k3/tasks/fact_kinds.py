"""The kinds of made-up facts: how one of each is told, asked for and answered.

Owns the words. Knows nothing of what is drawn, nor where it stands.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
_MINE = words("animal thing word song place game toy plant tool present")
_QUALITIES = words("name colour number code owner secret title price")
_FOODS = words("pizza soup rice pasta cake salad bread curry cheese fish noodles pancakes")


@dataclass(frozen=True)
class Kind:
    """A kind of fact. Its texts have a place for each of ``about`` and for the value, ``v``."""

    name: str
    about: dict[str, Sequence[str]]
    value: Callable[[random.Random], str]
    statements: tuple[str, ...]
    """How it may be told; the answer is the first, unless ``answer`` says otherwise."""
    update: str
    questions: tuple[str, ...]
    answer: str = ""
    """For what the person calls *my* and the answer *your*."""


def _one_of(values: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


def _number(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randrange(low, high))


def _time(rng: random.Random) -> str:
    return f"{rng.randrange(5, 24)}:{rng.randrange(0, 60, 5):02}"


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.8 else made_up(rng).capitalize()


def _property(rng: random.Random) -> str:
    """A value that says nothing of the quality it belongs to: it can only be copied."""
    dice = rng.random()
    return str(rng.randrange(1000)) if dice < 0.3 else name(rng) if dice < 0.5 else _password(rng)


def _password(rng: random.Random) -> str:
    return rng.choice(WORDS) if rng.random() < 0.6 else made_up(rng)


KINDS = (
    Kind(
        "self",
        {},
        name,
        (
            "My name is {v}.",
            "I am {v}.",
            "I'm {v}.",
            "You can call me {v}.",
            "Hi, I am called {v}.",
        ),
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
        (
            "My {who}'s name is {v}.",
            "{v} is my {who}.",
            "My {who} is called {v}.",
            "I have a {who} called {v}.",
            "The name of my {who} is {v}.",
            "I have a {who} named {v}.",
        ),
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
        (
            "The code of the {colour} {box} is {v}.",
            "{v} is the code of the {colour} {box}.",
            "The {colour} {box} has the code {v}.",
            "The {colour} {box} opens with {v}.",
            "Remember that the code of the {colour} {box} is {v}.",
        ),
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
        (
            "The password of the {door} is {v}.",
            "{v} is the password of the {door}.",
            "The {door} has the password {v}.",
            "For the {door}, the password is {v}.",
            "Remember: the password of the {door} is {v}.",
        ),
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
        (
            "The {event} is in room {v}.",
            "The {event} takes place in room {v}.",
            "Room {v} is where the {event} is.",
            "We have the {event} in room {v}.",
        ),
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
        (
            "{name} lives in {v}.",
            "{name} has a flat in {v}.",
            "{v} is where {name} lives.",
            "{name} is from {v} and lives there.",
            "{name}'s home is in {v}.",
        ),
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
        (
            "{name} works as a {v}.",
            "{name} is a {v}.",
            "{name}'s job is {v}.",
            "{name} earns money as a {v}.",
        ),
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
        (
            "{name}'s favourite colour is {v}.",
            "{name} likes {v} best.",
            "{name} loves the colour {v}.",
            "The favourite colour of {name} is {v}.",
        ),
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
        (
            "{name}'s favourite food is {v}.",
            "{name} likes to eat {v} best.",
            "{name} loves {v}.",
            "The favourite food of {name} is {v}.",
        ),
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
        (
            "The train to {city} leaves at {v}.",
            "At {v} the train to {city} leaves.",
            "There is a train to {city} at {v}.",
            "The {v} train goes to {city}.",
        ),
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
        (
            "{name} is {v} years old.",
            "{name} turned {v} this year.",
            "{name}'s age is {v}.",
            "At {v}, {name} feels young.",
        ),
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
        (
            "The {colour} {thing} is {v}.",
            "I put the {colour} {thing} {v}.",
            "You find the {colour} {thing} {v}.",
            "The {colour} {thing} lies {v}.",
        ),
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
        (
            "The {colour} {goods} costs {v} coins.",
            "The price of the {colour} {goods} is {v} coins.",
            "They sell the {colour} {goods} for {v} coins.",
            "For {v} coins you get the {colour} {goods}.",
        ),
        "The price of the {colour} {goods} has changed: it costs {v} coins now.",
        (
            "What does the {colour} {goods} cost?", "How much is the {colour} {goods}?",
            "What is the price of the {colour} {goods}?",
            "How much does the {colour} {goods} cost?",
        ),
    ),
    Kind(
        "mine",
        {"what": _MINE},
        _one_of(WORDS),
        ("My favourite {what} is the {v}.", "I like the {v} best of all {what}s."),
        "I changed my mind: my favourite {what} is the {v}.",
        (
            "What is my favourite {what}?", "Which {what} do I like best?",
            "Do you remember my favourite {what}?", "Tell me my favourite {what}.",
        ),
        answer="Your favourite {what} is the {v}.",
    ),
    Kind(
        "living",
        {},
        _city,
        ("I live in {v}.", "My home is in {v}.", "I am from {v}.", "I have a flat in {v}."),
        "I have moved to {v}.",
        (
            "Where do I live?", "In which city do I live?", "Which city is my home?",
            "Where am I from?",
        ),
        answer="You live in {v}.",
    ),
    Kind(
        "working",
        {},
        _one_of(_JOBS),
        ("I work as a {v}.", "I am a {v}.", "My job is {v}.", "I'm a {v}."),
        "I have changed jobs and am a {v} now.",
        (
            "What is my job?", "What do I work as?", "Which job do I have?",
            "What do I do for a living?",
        ),
        answer="You work as a {v}.",
    ),
    Kind(
        "years",
        {},
        _number(5, 100),
        ("I am {v} years old.", "I'm {v}.", "My age is {v}.", "I turned {v} this year."),
        "I was wrong: I am {v} years old.",
        ("How old am I?", "What is my age?", "Do you remember how old I am?", "Say how old I am."),
        answer="You are {v} years old.",
    ),
    Kind(
        "owned",
        {"noun": WORDS, "quality": _QUALITIES},
        _property,
        (
            "The {quality} of the {noun} is {v}.", "{v} is the {quality} of the {noun}.",
            "The {noun} has the {quality} {v}.",
            "Remember that the {quality} of the {noun} is {v}.",
        ),
        "The {quality} of the {noun} is {v} now.",
        (
            "What is the {quality} of the {noun}?", "Which {quality} does the {noun} have?",
            "Tell me the {quality} of the {noun}.", "What was the {quality} of the {noun}?",
            "I forgot the {quality} of the {noun}.",
        ),
    ),
    Kind(
        "meaning",
        {"noun": WORDS},
        _password,
        ("{noun} means {v}.", "{noun} = {v}.", "The word {noun} stands for {v}.", "{noun}: {v}."),
        "From now on {noun} means {v}.",
        (
            "What does {noun} mean?", "What does {noun} stand for?", "{noun} = ?",
            "What is the meaning of {noun}?",
        ),
    ),
    Kind(
        "amount",
        {"name": NAMES, "noun": WORDS},
        _number(2, 100),
        ("{name} has {v} {noun}s.", "{name} owns {v} {noun}s.", "{name} bought {v} {noun}s."),
        "By now {name} has {v} {noun}s.",
        (
            "How many {noun}s does {name} have?", "How many {noun}s does {name} own?",
            "What is the number of {name}'s {noun}s?",
        ),
    ),
)  # fmt: skip
