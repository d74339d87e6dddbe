"""Questions about pictures that are drawn for them: colours, shapes, counts, places, texts.

Owns which scene fits which question, and where in a conversation the picture stands. A part
``{"type": "image", "image": scene}`` of a message holds the :class:`~.scenes.Scene`; who wants
pixels calls its ``draw()``. All pictures of an example have one size.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from . import picture_questions as questions
from .example import Example, Family, Message, assistant, same_text, user
from .picture_questions import Asked
from .scenes import Scene, cell_scene, shapes_scene, text_scene
from .wording import WORDS, made_up, polite

_HERE = ("Here is a picture.", "Look at this picture.", "I show you a picture.", "A picture.")
_SEEN = assistant("They show me a picture.", "I see it.")
_NO_PICTURE = "I see no picture."
_LETTERS = 5
_SHORT = [word.upper() for word in WORDS if len(word) <= _LETTERS]
_ORDINALS = ("first", "second")
_WHICH = (
    "Which picture shows a {x}?", "In which picture is a {x}?", "Where is a {x}: in the first or "
    "the second picture?", "Which of the two has a {x}?",
)  # fmt: skip
_OF_ONE = (
    "What colour is the shape in the {n} picture?", "Which colour do you see in the {n} picture?",
    "The colour of the shape in the {n} one?",
)  # fmt: skip
_MISSING = (
    "What is in the picture?", "What do you see in the picture?", "Describe the picture.",
    "Describe this image.", "What does the picture show?", "What is in this image?",
    "How many shapes are in the picture?", "What colour is the shape in the picture?",
    "Which digit is in the picture?", "What word is in the picture?", "Look at this picture.",
    "What shape is in the picture?", "What is in my photo?", "What can you see in this photo?",
    "Read the text in the image.", "Who is in this picture?", "Here is a picture. What is it?",
    "Where in the picture is the circle?", "How many circles are in the image?", "Is this a cat?",
    "What colour is the background of the picture?", "Write a caption for the picture.",
)  # fmt: skip

Ask = Callable[[random.Random, Scene], Asked | None]


def shown(rng: random.Random, scene: Scene, text: str) -> list[Message]:
    """The messages that show ``scene`` and then ask ``text``: mostly one."""
    picture, dice = part(scene), rng.random()
    if dice < 0.7:
        return [{"role": "user", "content": [picture, _text(text)]}]
    if dice < 0.85:
        return [{"role": "user", "content": [_text(text), picture]}]
    first = {"role": "user", "content": [picture, _text(rng.choice(_HERE))]}
    return [first, _SEEN, user(text)]


def part(image: Any) -> dict[str, Any]:
    """A picture in a message."""
    return {"type": "image", "image": image}


def scenes(example: Example) -> list[Scene]:
    """The pictures of an example, in order."""
    return [p["image"] for p in _parts(example) if p["type"] == "image"]


def with_scenes(example: Example, others: Iterable[Scene]) -> Example:
    """The example with ``others`` in the places of its own pictures, in order."""
    following = iter(others)
    return _replaced(example, lambda _: next(following))


def drawn(example: Example) -> Example:
    """The example with pixels for scenes: Pillow images."""
    return _replaced(example, lambda scene: scene.draw())


def _parts(example: Example) -> Iterator[dict[str, Any]]:
    for message in example.messages:
        if isinstance(message["content"], list):
            yield from message["content"]


def _replaced(example: Example, change: Callable[[Scene], Any]) -> Example:
    def changed(message: Message) -> Message:
        content = message["content"]
        if not isinstance(content, list):
            return message
        parts = [part(change(p["image"])) if p["type"] == "image" else p for p in content]
        return {**message, "content": parts}

    return replace(example, messages=[changed(message) for message in example.messages])


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _family(name: str, weight: float, draw: Callable[[random.Random], Scene], ask: Ask) -> Family:
    """One question about one picture."""

    def make(rng: random.Random) -> Example:
        while True:
            scene = draw(rng)
            if asked := ask(rng, scene):
                messages = shown(rng, scene, polite(rng, asked.text))
                answer = assistant(asked.reasoning, asked.response)
                return Example(name, [*messages, answer], key=scene.key)

    return Family(name, weight, make, same_text)


def _few(rng: random.Random) -> Scene:
    return shapes_scene(rng, rng.choice((1, 1, 2, 3)), apart=True)


def _several(rng: random.Random) -> Scene:
    return shapes_scene(rng, rng.randrange(1, 6))


def _two_or_three(rng: random.Random) -> Scene:
    return shapes_scene(rng, rng.choice((2, 2, 3)), apart=True)


def _digit(rng: random.Random) -> Scene:
    return text_scene(rng, str(rng.randrange(10)))


def _number(rng: random.Random) -> Scene:
    return text_scene(rng, str(rng.randrange(10, 100 if rng.random() < 0.5 else 1000)))


def _word(rng: random.Random) -> Scene:
    if rng.random() < 0.3:
        return text_scene(rng, rng.choice(_SHORT))
    return text_scene(rng, made_up(rng).upper()[: rng.randrange(2, _LETTERS + 1)])


def _anything(rng: random.Random) -> Scene:
    if rng.random() < 0.8:
        return shapes_scene(rng, rng.randrange(1, 4))
    return rng.choice((_digit, _number, _word))(rng)


def _place(rng: random.Random, scene: Scene) -> Asked | None:
    return questions.where(rng, scene) if len(scene.things) == 1 else questions.beside(rng, scene)


def _places(rng: random.Random) -> Scene:
    return cell_scene(rng) if rng.random() < 0.35 else _two_or_three(rng)


def _make_pair(rng: random.Random) -> Example:
    """Two pictures of one thing each: together, or one after the other."""
    first = shapes_scene(rng, 1)
    second = first
    while second.things[0].shape == first.things[0].shape:
        second = shapes_scene(rng, 1, size=(first.width, first.height))
    both = first, second
    key = f"{first.key}\n{second.key}"
    if rng.random() < 0.3:
        messages: list[Message] = []
        for scene in both:
            asked = rng.choice((questions.colour, questions.shape))(rng, scene)
            messages.append({"role": "user", "content": [part(scene), _text(asked.text)]})
            messages.append(assistant(asked.reasoning, asked.response))
        return Example("picture_pair", messages, key=key)
    i = rng.randrange(2)
    thing = both[i].things[0]
    seen = f"The first shows a {first.things[0].name}, the second a {second.things[0].name}."
    if rng.random() < 0.5:
        text = rng.choice(_WHICH).format(x=thing.shape)
        answer = f"The {_ORDINALS[i]} picture shows a {thing.shape}."
    else:
        text = rng.choice(_OF_ONE).format(n=_ORDINALS[i])
        answer = f"The {thing.shape} is {thing.colour}."
    content = [*map(part, both), _text(text)]
    if rng.random() < 0.2:
        content = [_text(text), *map(part, both)]
    asking = {"role": "user", "content": content}
    return Example("picture_pair", [asking, assistant(seen, answer)], key=key)


def _make_turns(rng: random.Random) -> Example:
    """Several questions about one picture, shown with the first."""
    scene = _two_or_three(rng)
    asks = [questions.colour, questions.shape, questions.count, questions.beside, questions.caption]
    messages: list[Message] = []
    for ask in rng.sample(asks, rng.randrange(2, 4)):
        if asked := ask(rng, scene):
            text = polite(rng, asked.text)
            messages += [user(text)] if messages else shown(rng, scene, text)
            messages.append(assistant(asked.reasoning, asked.response))
    return Example("picture_turns", messages, key=scene.key) if messages else _make_turns(rng)


def _make_missing(rng: random.Random) -> Example:
    plain = rng.choice(_MISSING)
    asking, answer = user(polite(rng, plain)), assistant("No picture was shown.", _NO_PICTURE)
    return Example(MISSING, [asking, answer], key=f"no picture {plain}")


MISSING = "picture_missing"
FAMILIES = (
    _family("picture_colour", 3, _few, questions.colour),
    _family("picture_shape", 3, _few, questions.shape),
    _family("picture_count", 5, _several, questions.count),
    _family("picture_place", 5, _places, _place),
    _family("picture_digit", 3, _digit, questions.text),
    _family("picture_number", 2, _number, questions.text),
    _family("picture_word", 5, _word, questions.text),
    _family("picture_caption", 3, _anything, questions.caption),
    Family("picture_pair", 2, _make_pair, same_text),
    Family("picture_turns", 2, _make_turns, same_text),
    Family(MISSING, 1.5, _make_missing, same_text),
)
