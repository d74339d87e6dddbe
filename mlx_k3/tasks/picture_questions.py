"""Questions about a scene, with the one answer to each.

Owns the wordings. What a question is about is fit for it: "the circle" is the only one.
"""

import random
from collections.abc import Iterable
from typing import NamedTuple

from .scenes import COLOURS, SHAPES, Scene, Thing

FAR = 0.22  # of a side: so far apart is clearly left of, or above


class Asked(NamedTuple):
    """A question, what to think and what to answer."""

    text: str
    reasoning: str
    response: str


_COLOUR = (
    "What colour is the {x}?", "Which colour has the {x}?", "What color is the {x}?",
    "Tell me the colour of the {x}.", "What is the colour of the {x}?", "Which color is the {x}?",
    "Name the colour of the {x}.", "The {x} is of which color?",
)  # fmt: skip
_ONLY_COLOUR = (
    "What colour is it?", "What colour is the shape?", "Which colour do you see?",
    "What color is this?", "What colour is this shape?", "What colour does it have?",
)  # fmt: skip
_IS_COLOUR = ("Is the {x} {y}?", "Is the colour of the {x} {y}?", "The {x} is {y}, right?")
_BACKGROUND = (
    "What colour is the background?", "Which colour is behind it?", "What is the background?",
    "What color is the background?", "Tell me the colour of the background.",
)  # fmt: skip
_SHAPE = (
    "Which shape is {x}?", "What shape is the {x} one?", "Which shape is the {x} one?",
    "What shape does the {x} thing have?", "What is the {x} thing?", "Name the {x} shape.",
)  # fmt: skip
_ONLY_SHAPE = (
    "What shape is this?", "Which shape do you see?", "What is this?", "What shape is it?",
    "Which shape is this?", "Name the shape.", "What shape is in the picture?",
)  # fmt: skip
_IS_THERE = ("Is there a {x}?", "Do you see a {x}?", "Is there a {x} in the picture?")
_COUNT = (
    "How many {x} are there?", "How many {x} do you see?", "Count the {x}.", "How many {x}?",
    "How many {x} are in the picture?", "What is the number of {x}?",
)  # fmt: skip
_WHERE = (
    "Where is the {x}?", "Where in the picture is the {x}?", "Where do you see the {x}?",
    "In which part is the {x}?", "Tell me where the {x} is.",
)  # fmt: skip
_BESIDE = (
    "Where is the {x}, seen from the {y}?", "Where is the {x} relative to the {y}?",
    "On which side of the {y} is the {x}?",
)  # fmt: skip
_SIDEWAYS = (
    "Is the {x} left or right of the {y}?", "Is the {x} to the left or to the right of the {y}?",
    "Left or right of the {y}: where is the {x}?",
)  # fmt: skip
_UPRIGHT = (
    "Is the {x} above or below the {y}?", "Above or below the {y}: where is the {x}?",
    "Is the {x} over or under the {y}?",
)  # fmt: skip
_WHICH = ("What is {side} the {y}?", "Which shape is {side} the {y}?", "What lies {side} the {y}?")
_DIGIT = (
    "Which digit is this?", "What digit do you see?", "Read the digit.", "Which digit do you see?",
    "What digit is in the picture?", "Which digit is shown?",
)  # fmt: skip
_NUMBER = (
    "Which number is this?", "What number do you see?", "Read the number.",
    "What number is in the picture?", "Which number is shown?",
)  # fmt: skip
_WORD = (
    "Which word is this?", "What does it say?", "Read the word.", "What word do you see?",
    "What is written in the picture?", "Read the text.", "Which word is written there?",
)  # fmt: skip
_CAPTION = (
    "Describe the picture.", "What do you see?", "What is in the picture?", "Describe this image.",
    "What does the picture show?", "Tell me what you see.", "Write a caption.",
)  # fmt: skip


def colour(rng: random.Random, scene: Scene) -> Asked:
    """The colour of a thing whose shape no other has, or of the background."""
    dice = rng.random()
    if dice < 0.15:
        answer = f"The background is {scene.background}."
        return Asked(rng.choice(_BACKGROUND), answer, answer)
    thing = _lone(rng, scene, "shape")
    about, seen = {"x": thing.shape}, f"I see a {thing.shape}, and it is {thing.colour}."
    if dice < 0.3:
        said = thing.colour if rng.random() < 0.5 else _other(rng, COLOURS, thing.colour)
        yes = "Yes" if said == thing.colour else "No"
        text = rng.choice(_IS_COLOUR).format(y=said, **about)
        return Asked(text, seen, f"{yes}, the {thing.shape} is {thing.colour}.")
    only = len(scene.things) == 1 and rng.random() < 0.5
    text = rng.choice(_ONLY_COLOUR if only else _COLOUR).format(**about)
    return Asked(text, seen, f"The {thing.shape} is {thing.colour}.")


def shape(rng: random.Random, scene: Scene) -> Asked:
    """The shape of a thing whose colour no other has."""
    thing = _lone(rng, scene, "colour")
    seen = f"I see {_a(thing.name)}."
    if rng.random() < 0.15:
        shapes = [other.shape for other in scene.things]
        said = thing.shape if rng.random() < 0.5 else _other(rng, SHAPES, thing.shape)
        is_there = f"Yes, there is a {said}." if said in shapes else f"No, there is no {said}."
        return Asked(rng.choice(_IS_THERE).format(x=said), from_left(scene.things), is_there)
    if len(scene.things) == 1 and rng.random() < 0.5:
        return Asked(rng.choice(_ONLY_SHAPE), seen, f"It is a {thing.shape}.")
    return Asked(rng.choice(_SHAPE).format(x=thing.colour), seen, f"It is a {thing.shape}.")


def count(rng: random.Random, scene: Scene) -> Asked:
    """How many things, or how many of a colour or a shape."""
    kinds, counted = "shapes", list(scene.things)
    dice = rng.random()
    if dice < 0.3:
        said = rng.choice([thing.shape for thing in counted] + [rng.choice(SHAPES)])
        kinds, counted = _plural(said), [t for t in counted if t.shape == said]
    elif dice < 0.6:
        said = rng.choice([thing.colour for thing in counted] + [rng.choice(list(COLOURS))])
        kinds, counted = f"{said} shapes", [t for t in counted if t.colour == said]
    n = len(counted)
    one = {"crosses": "cross"}.get(kinds, kinds[:-1])
    answer = f"There are {n or 'no'} {kinds}." if n != 1 else f"There is 1 {one}."
    return Asked(rng.choice(_COUNT).format(x=kinds), from_left(counted), answer)


def where(rng: random.Random, scene: Scene) -> Asked:
    """In which ninth of the picture its only thing lies."""
    [thing] = scene.things
    cell = scene.cell(thing)
    name = rng.choice((thing.shape, thing.name, "shape"))
    answer = f"The {thing.shape} is {cell}."
    return Asked(rng.choice(_WHERE).format(x=name), f"I see {_a(thing.name)} {cell}.", answer)


def beside(rng: random.Random, scene: Scene) -> Asked | None:
    """Where one thing lies from another; None if none is clearly on one side."""
    first, second = rng.sample(scene.things, 2)
    across = (first.x - second.x) / scene.width
    down = (first.y - second.y) / scene.height
    dice = rng.random()
    if dice < 0.35:
        sideways, texts = True, _SIDEWAYS
    elif dice < 0.7:
        sideways, texts = False, _UPRIGHT
    else:
        # One direction only is meant where the other hardly differs.
        sideways, texts = abs(across) > abs(down), _BESIDE
        if min(abs(across), abs(down)) > max(abs(across), abs(down)) / 2:
            return None
    off = across if sideways else down
    if abs(off) < FAR:
        return None
    side = ("left of", "right of") if sideways else ("above", "below")
    relation = side[off > 0]
    answer = f"The {first.name} is {relation} the {second.name}."
    seen = from_left(scene.things) if sideways else _from_top(scene.things)
    if texts is _BESIDE and len(scene.things) == 2 and rng.random() < 0.4:
        text = rng.choice(_WHICH).format(side=relation, y=second.name)
    else:
        text = rng.choice(texts).format(x=first.name, y=second.name)
    return Asked(text, seen, answer)


def text(rng: random.Random, scene: Scene) -> Asked:
    """What is written."""
    written = scene.text.text
    spelled = f"I read {', '.join(written)}."
    if not written.isdecimal():
        return Asked(rng.choice(_WORD), spelled, f"The word is {written}.")
    if len(written) == 1 and rng.random() < 0.75:
        return Asked(rng.choice(_DIGIT), spelled, f"The digit is {written}.")
    return Asked(rng.choice(_NUMBER), spelled, f"The number is {written}.")


def caption(rng: random.Random, scene: Scene) -> Asked:
    """All that the scene shows."""
    wording = rng.choice(_CAPTION)
    if scene.text is not None:
        kind = "number" if scene.text.text.isdecimal() else "word"
        spelled = f"I read {', '.join(scene.text.text)}."
        return Asked(wording, spelled, f"I see the {kind} {scene.text.text}.")
    names = [_a(thing.name) for thing in scene.things]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    answer = f"I see {listed} on {_a(scene.background)} background."
    return Asked(wording, from_left(scene.things), answer)


def from_left(things: Iterable[Thing]) -> str:
    """The things one after the other, as they come from left to right, numbered."""
    listed = [f"{i} {thing.name}" for i, thing in enumerate(things, start=1)]
    return f"From left to right: {', '.join(listed)}." if listed else "I see none."


def _from_top(things: Iterable[Thing]) -> str:
    listed = [t.name for t in sorted(things, key=lambda thing: thing.y)]
    return f"From top to bottom: {', '.join(listed)}."


def _lone(rng: random.Random, scene: Scene, trait: str) -> Thing:
    traits = [getattr(thing, trait) for thing in scene.things]
    return rng.choice([t for t in scene.things if traits.count(getattr(t, trait)) == 1])


def _other(rng: random.Random, names: Iterable[str], name: str) -> str:
    return rng.choice([other for other in names if other != name])


def _a(name: str) -> str:
    return f"an {name}" if name.startswith("o") else f"a {name}"


def _plural(shape: str) -> str:
    return shape + ("es" if shape == "cross" else "s")
