"""Pictures that are drawn for questions: what is in the pixels is what the answers say."""

import hashlib
import random
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from mlx_k3.tasks import (
    ALL_FAMILIES,
    FAMILIES,
    PICTURE_FAMILIES,
    Example,
    asked,
    by_one_who_sees,
    drawn,
    example,
    held_out_examples,
    is_held_out,
    scenes,
    training_examples,
    with_scenes,
)
from mlx_k3.tasks.font import GLYPHS, HEIGHT, WIDTH
from mlx_k3.tasks.pictures import MISSING
from mlx_k3.tasks.scenes import COLOURS, SHAPES, UNIT, Scene, Thing, shapes_scene, text_scene

from .support.tasks import Said, answer_of

pytest.importorskip("PIL")


def made(family: str, count: int = 150) -> list[Example]:
    rng = random.Random(family)
    return [PICTURE_FAMILIES[family].make(rng) for _ in range(count)]


def pixels(scene: Scene) -> np.ndarray:
    return np.asarray(scene.draw()).astype(int)


def is_of(colour: str, pixel: np.ndarray, noise: int) -> bool:
    ranges = COLOURS[colour] * (3 // len(COLOURS[colour]))
    # Rounding where a smooth picture is made smaller.
    off = noise + 1
    return all(low - off <= c <= high + off for (low, high), c in zip(ranges, pixel, strict=True))


def foreground(scene: Scene) -> np.ndarray:
    off = np.abs(pixels(scene) - np.array(scene.rgb)).max(-1)
    return off > scene.noise + 20


def components(mask: np.ndarray) -> list[np.ndarray]:
    """The connected parts of a mask, each as ``[n, 2]`` rows and columns."""
    left, found = {tuple(p) for p in np.argwhere(mask).tolist()}, []
    while left:
        edge = [left.pop()]
        part = list(edge)
        while edge:
            row, column = edge.pop()
            near = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            edge += near
            part += near
        found.append(np.array(part))
    return found


def question_of(item: Example) -> str:
    content = asked(item)[-1]["content"]
    if isinstance(content, str):
        return content
    return next(part["text"] for part in content if part["type"] == "text")


# The pixels


def test_every_thing_is_where_and_as_the_scene_says() -> None:
    seen = Counter()
    for family in ("picture_colour", "picture_count", "picture_place", "picture_caption"):
        for item in made(family, 80):
            [scene] = scenes(item)
            picture = pixels(scene)
            assert picture.shape == (scene.height, scene.width, 3)
            for thing in scene.things:
                across = round(0.78 * thing.radius) if thing.shape == "ring" else 0
                assert is_of(thing.colour, picture[thing.y, thing.x + across], scene.noise)
                if thing.shape == "ring":
                    assert is_of(scene.background, picture[thing.y, thing.x], scene.noise)
                seen[thing.name] += 1
    assert len(seen) == len(COLOURS) * len(SHAPES)


def test_things_are_apart_and_as_many_as_the_scene_says() -> None:
    rng = random.Random(1)
    for _ in range(150):
        scene = shapes_scene(rng, rng.randrange(1, 6))
        parts = components(foreground(scene))
        assert len([part for part in parts if len(part) > 3]) == len(scene.things)


def fill(scene: Scene, thing: Thing) -> float:
    """Which share of the square around a thing is coloured."""
    r = thing.radius
    around = foreground(scene)[thing.y - r : thing.y + r + 1, thing.x - r : thing.x + r + 1]
    return around.mean()


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        ("circle", 0.72, 0.85), ("square", 0.62, 0.8), ("triangle", 0.38, 0.5),
        ("star", 0.25, 0.38), ("cross", 0.48, 0.66), ("diamond", 0.34, 0.48), ("ring", 0.48, 0.62),
    ],
)  # fmt: skip
def test_shapes_fill_what_such_shapes_fill(shape: str, least: float, most: float) -> None:
    rng, seen = random.Random(2), 0
    while seen < 25:
        scene = shapes_scene(rng, 1)
        [thing] = scene.things
        if thing.shape == shape and thing.radius > 14:
            assert least < fill(scene, thing) < most
            seen += 1


def test_texts_can_be_read_off_the_dots() -> None:
    signs = {tuple(dots): sign for sign, dots in GLYPHS.items()}
    assert len(signs) == len(GLYPHS) == 36
    rng = random.Random(3)
    for _ in range(150):
        text = "".join(rng.choices(list(GLYPHS), k=rng.randrange(1, 6)))
        scene = text_scene(rng, text)
        mask, told = foreground(scene), scene.text
        middle = told.scale // 2
        read = ""
        for i in range(len(text)):
            left = told.x + i * (WIDTH + 1) * told.scale + middle
            top = told.y + middle
            dots = mask[top :: told.scale, left :: told.scale][:HEIGHT, :WIDTH]
            read += signs[tuple((x, y) for y, x in np.argwhere(dots).tolist())]
        assert read == text
        edges = np.argwhere(mask)
        assert edges.min() >= 0 and len(edges) == mask.sum()


def test_a_scene_is_the_same_picture_each_time() -> None:
    digest = hashlib.sha256()
    for item in made("picture_count", 20):
        [scene] = scenes(item)
        assert np.array_equal(pixels(scene), pixels(scene))
        digest.update(repr(scene).encode())
    assert len(digest.hexdigest()) == 64


def test_pictures_take_one_to_four_of_the_models_units_a_side() -> None:
    sizes = Counter()
    for family in PICTURE_FAMILIES:
        for item in made(family, 60):
            for scene in scenes(item):
                sizes[-(-scene.height // UNIT), -(-scene.width // UNIT)] += 1
            grids = {(-(-s.height // UNIT), -(-s.width // UNIT)) for s in scenes(item)}
            assert len(grids) <= 1
    assert all(1 <= side <= 4 for size in sizes for side in size) and 5 <= len(sizes) <= 10


# The answers


@pytest.mark.parametrize("family", ["picture_colour", "picture_shape"])
def test_colours_and_shapes(family: str) -> None:
    kinds = Counter()
    for item in made(family, 300):
        [scene] = scenes(item)
        text, answer = question_of(item).lower(), answer_of(item)
        names = {thing.name for thing in scene.things}
        if match := re.fullmatch(r"The background is (\w+)\.", answer):
            assert is_of(match[1], pixels(scene)[0, 0], scene.noise) or scene.things
            assert match[1] == scene.background and ("background" in text or "behind" in text)
        elif match := re.fullmatch(r"(Yes, the|No, the|The) (\w+) is (\w+)\.", answer):
            assert f"{match[3]} {match[2]}" in names
            if match[1] != "The":
                assert (match[3] in text) == (match[1] == "Yes, the")
            elif len(scene.things) > 1:
                assert match[2] in text
        elif match := re.fullmatch(r"It is a (\w+)\.", answer):
            of_shape = [t for t in scene.things if t.shape == match[1]]
            assert any(t.colour in text for t in of_shape) or len(scene.things) == 1
        else:
            match = re.fullmatch(r"(Yes|No), there is (?:a|no) (\w+)\.", answer)
            assert match[2] in text
            assert (match[1] == "Yes") == any(t.shape == match[2] for t in scene.things)
        kinds[answer.split(" ")[0]] += 1
    assert {"Yes,", "No,"} < set(kinds)


def test_counts() -> None:
    said = Counter()
    for item in made("picture_count", 300):
        [scene] = scenes(item)
        number, kinds = re.fullmatch(r"There (?:is|are) (no|\d) (.+)\.", answer_of(item)).groups()
        number = 0 if number == "no" else int(number)
        parts = kinds.replace("crosses", "cross").split(" ")
        wanted = re.sub("s$", "", parts[-1]) if parts[-1] != "cross" else "cross"
        things = [
            t
            for t in scene.things
            if (wanted in ("shape", t.shape)) and (len(parts) == 1 or t.colour == parts[0])
        ]
        assert len(things) == number
        if kinds in ("shapes", "shape"):
            assert len([p for p in components(foreground(scene)) if len(p) > 3]) == number
        said[number] += 1
        listed = item.messages[-1]["reasoning_content"]
        assert len(re.findall(r"\d \w+ \w+", listed)) == number
    assert set(said) == {0, 1, 2, 3, 4, 5}


def centre(scene: Scene, name: str) -> tuple[float, float]:
    """Where the pixels of the thing's colour lie, as shares of the picture: across and down."""
    [thing] = [t for t in scene.things if t.name == name]
    near = np.abs(pixels(scene) - np.array(thing.rgb)).max(-1) <= scene.noise + 2
    rows, columns = np.argwhere(near).mean(0)
    return columns / scene.width, rows / scene.height


def test_places() -> None:
    relations = Counter()
    for item in made("picture_place", 300):
        [scene] = scenes(item)
        answer = answer_of(item)
        if match := re.fullmatch(r"The (\w+ \w+) is (.+?)(?: of)? the (\w+ \w+)\.", answer):
            (x, y), (a, b) = centre(scene, match[1]), centre(scene, match[3])
            off = {"left": a - x, "right": x - a, "above": b - y, "below": y - b}[match[2]]
            assert off > 0.18
            relations[match[2]] += 1
        else:
            [thing] = scene.things
            x, y = centre(scene, thing.name)
            place = answer.removesuffix(".").split(f"{thing.shape} is ")[1]
            across = "left" if x < 1 / 3 else "right" if x > 2 / 3 else ""
            down = "top" if y < 1 / 3 else "bottom" if y > 2 / 3 else ""
            assert [w for w in ("left", "right", "top", "bottom") if w in place] == [
                w for w in ("left", "right", "top", "bottom") if w in (across, down)
            ]
            relations[place] += 1
    assert len(relations) == 4 + 9


@pytest.mark.parametrize("family", ["picture_digit", "picture_number", "picture_word"])
def test_texts(family: str) -> None:
    for item in made(family):
        [scene] = scenes(item)
        said = re.fullmatch(r"The (?:digit|number|word) is (\w+)\.", answer_of(item))[1]
        assert said == scene.text.text
        assert (len(said) > 1) == (family != "picture_digit")
        assert item.messages[-1]["reasoning_content"] == f"I read {', '.join(said)}."


def test_pairs_are_told_apart() -> None:
    for item in made("picture_pair", 200):
        first, second = scenes(item)
        answer = answer_of(item)
        if match := re.fullmatch(r"The (first|second) picture shows a (\w+)\.", answer):
            scene = first if match[1] == "first" else second
            other = second if match[1] == "first" else first
            assert scene.things[0].shape == match[2] != other.things[0].shape
        elif "first" in question_of(item) or "second" in question_of(item):
            scene = first if "first" in question_of(item) else second
            assert answer == f"The {scene.things[0].shape} is {scene.things[0].colour}."


def test_without_a_picture_it_says_so() -> None:
    for item in made(MISSING, 50):
        assert scenes(item) == [] and answer_of(item) == "I see no picture."


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_its_own_answer_is_right_and_another_is_not(family: str) -> None:
    check = PICTURE_FAMILIES[family].check
    for item in made(family, 30):
        assert check(item, Said(answer_of(item)))
        assert not check(item, Said(answer_of(item) + " 1")) and not check(item, Said(""))


# The split and the mixture


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_each_side_of_the_split_is_its_own(family: str) -> None:
    rng = random.Random(1)
    held = [example(family, rng, "held-out") for _ in range(40)]
    train = [example(family, rng, "train") for _ in range(80)]
    assert all(any(map(is_held_out, item.key.split("\n"))) for item in held)
    assert not any(is_held_out(line) for item in train for line in item.key.split("\n"))
    for item in (*held, *train):  # Whatever can be seen is part of the identity.
        assert item.key == "\n".join(s.key for s in scenes(item)) or family == MISSING


def test_no_combination_that_is_held_out_is_in_a_training_picture() -> None:
    seen = set()
    for item in islice(training_examples(4, pictures=0.7), 3000):
        for scene in scenes(item):
            for thing in scene.things:
                key = f"picture {thing.colour} {thing.shape} {scene.cell(thing)}"
                assert not is_held_out(key)
                seen.add(key)
            if scene.text is not None and len(scene.text.text) > 1:
                assert not is_held_out(f"picture text {scene.text.text}")
    possible = len(COLOURS) * len(SHAPES) * 9
    assert 0.8 * possible < len(seen) < 0.93 * possible


def test_the_mixture_has_its_share_of_pictures() -> None:
    items = list(islice(training_examples(1, pictures=0.5), 3000))
    counts = Counter(item.family for item in items)
    alone = sum(counts[family] for family in PICTURE_FAMILIES)
    text = sum(counts[family] for family in FAMILIES)
    assert 0.8 < alone / text < 1.25
    assert set(counts) == {*ALL_FAMILIES, "conversation"}
    joined = [item for item in items if item.family == "conversation"]
    assert sum(bool(scenes(item)) for item in joined) > len(joined) / 2
    for item in joined:
        grids = {(-(-s.height // UNIT), -(-s.width // UNIT)) for s in scenes(item)}
        assert len(grids) <= 1
        assert not scenes(item) or "I see no picture." not in [m["content"] for m in item.messages]
    held = list(islice(held_out_examples(1, pictures=0.5), 300))
    assert 0.35 < sum(item.family in PICTURE_FAMILIES for item in held) / 300 < 0.65
    assert all(any(map(is_held_out, item.key.split("\n"))) for item in held)


def test_pictures_stand_in_every_place() -> None:
    places = Counter()
    for item in made("picture_shape", 300):
        shown = [m for m in item.messages if isinstance(m["content"], list)]
        kinds = tuple(part["type"] for part in shown[0]["content"])
        places[kinds, asked(item)[-1] is shown[0]] += 1
    assert set(places) == {
        (("image", "text"), True),
        (("text", "image"), True),
        (("image", "text"), False),
    }


def test_who_sees_says_so_and_nothing_else_changes() -> None:
    changed = Counter()
    for item in islice(training_examples(2), 3000):
        other = by_one_who_sees(item)
        for before, after in zip(item.messages, other.messages, strict=True):
            if before != after:
                assert before["role"] == "assistant"
                changed[after["content"]] += 1
    assert any("I see small pictures" in text for text in changed) and len(changed) == 3
    said = [m["content"] for e in islice(training_examples(2, 0.3), 3000) for m in e.messages]
    assert "No, I only read and write text." not in said


def test_other_pictures_can_take_their_places() -> None:
    first, second = made("picture_pair", 2)
    swapped = with_scenes(first, scenes(second))
    assert scenes(swapped) == scenes(second) and question_of(swapped) == question_of(first)
    shown = [part["image"].size for part in drawn(first).messages[0]["content"] if "image" in part]
    assert shown == [(s.width, s.height) for s in scenes(first)][: len(shown)]
