"""What is in a picture: coloured shapes or a piece of text on a plain background.

A scene says everything; :mod:`.drawing` makes pixels of it, :mod:`.picture_questions` asks about
it. Owns the names of colours, shapes and places, and how scenes come about by chance.
"""

import random
from dataclasses import dataclass, replace
from math import dist
from typing import TYPE_CHECKING

from ..errors import UnsupportedError
from .font import HEIGHT, text_width
from .wording import words

if TYPE_CHECKING:
    from PIL.Image import Image

Colour = tuple[int, int, int]

# What is called by a name: ranges of red, green and blue.
COLOURS = {
    "red": ((195, 255), (0, 45), (0, 45)),
    "green": ((0, 60), (115, 255), (0, 70)),
    "blue": ((0, 60), (0, 100), (165, 255)),
    "yellow": ((230, 255), (215, 255), (0, 80)),
    "orange": ((240, 255), (120, 165), (0, 40)),
    "purple": ((100, 155), (0, 55), (115, 200)),
    "pink": ((240, 255), (105, 192), (160, 205)),
    "brown": ((105, 150), (55, 82), (10, 45)),
    "black": ((0, 30),),
    "white": ((235, 255),),
    "grey": ((110, 150),),
}
SHAPES = words("circle square triangle star cross diamond ring")
CELLS = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip

UNIT = 28  # pixels a side that one of the model's vectors covers
# Rows and columns of vectors, and how often; batches want few kinds.
_GRIDS = {(1, 1): 1, (2, 2): 4, (2, 3): 1, (3, 2): 1, (2, 4): 1, (3, 3): 4, (3, 4): 4, (4, 3): 2}
_GRIDS |= {(1, 4): 1, (4, 4): 8}
_BACKGROUNDS = {name: {"white": 8, "black": 5, "grey": 2}.get(name, 1) for name in COLOURS}
_LEAST_CONTRAST = 120  # between what lies on each other: distance of two colours
_LEAST_RADIUS = 5
# How large things may be, for their number: a share of the shorter side.
_RADII = {1: (0.2, 0.42), 2: (0.13, 0.23), 3: (0.11, 0.19), 4: (0.1, 0.16), 5: (0.09, 0.14)}
_TRIES = 200


@dataclass(frozen=True)
class Thing:
    """A shape around ``(x, y)``, ``radius`` pixels in each direction, turned by ``degrees``."""

    shape: str
    colour: str
    rgb: Colour
    x: int
    y: int
    radius: int
    degrees: int = 0

    @property
    def name(self) -> str:
        """As ``red circle``."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Text:
    """Signs of the bitmap font, each dot ``scale`` pixels, from the corner ``(x, y)``."""

    text: str
    colour: str
    rgb: Colour
    x: int
    y: int
    scale: int


@dataclass(frozen=True)
class Scene:
    """A picture of ``width`` x ``height`` pixels.

    ``things`` are listed from left to right. ``noise`` is how far a pixel may be off, drawn from
    ``seed``; ``smooth`` says that edges are.
    """

    width: int
    height: int
    background: str
    rgb: Colour
    things: tuple[Thing, ...] = ()
    text: Text | None = None
    noise: int = 0
    smooth: bool = False
    seed: int = 0

    def cell(self, thing: Thing) -> str:
        """In which ninth of the picture the thing lies."""
        column, row = 3 * thing.x // self.width, 3 * thing.y // self.height
        return CELLS[3 * row + column]

    @property
    def key(self) -> str:
        """What the scene shows, an identity a line: combinations of shape, colour and place."""
        lines = [f"picture {thing.name} {self.cell(thing)}" for thing in self.things]
        if self.text is not None:
            text = self.text.text
            # Ten digits are all to be learned; longer texts are many.
            on = f" {self.text.colour} on {self.background}" if len(text) == 1 else ""
            lines.append(f"picture text {text}{on}")
        return "\n".join(lines)

    def draw(self) -> "Image":
        """Its pixels, the same each time.

        Raises:
            UnsupportedError: Pillow is not installed.
        """
        try:
            from .drawing import draw
        except ImportError:
            raise UnsupportedError("drawing needs Pillow; install mlx-k3[vision]") from None
        return draw(self)


def shapes_scene(
    rng: random.Random, count: int, *, apart: bool = False, size: tuple[int, int] | None = None
) -> Scene:
    """``count`` things, 1 to 5, that do not touch.

    ``apart`` makes all of them different in colour and in shape. ``size`` is width and height.
    """
    while True:
        scene = _empty(rng, least=_least_units(count))
        if size is not None:
            scene = replace(scene, width=size[0], height=size[1])
        places = _places(rng, scene, count)
        if places is None:
            continue
        palette = _palette(rng, scene.rgb)
        names = list(palette)
        colours = rng.sample(names, count) if apart else rng.choices(names, k=count)
        shapes = rng.sample(SHAPES, count) if apart else rng.choices(SHAPES, k=count)
        if not apart and rng.random() < 0.5:  # Alike in one thing at least.
            shapes = [shapes[0]] * count
        things = [
            Thing(shape, colour, palette[colour], *place, rng.randrange(-8, 9))
            for shape, colour, place in zip(shapes, colours, places, strict=True)
        ]
        return replace(scene, things=tuple(sorted(things, key=lambda thing: thing.x)))


def cell_scene(rng: random.Random) -> Scene:
    """One thing that is clearly in one of nine places."""
    scene = _empty(rng, least=2)
    side = min(scene.width, scene.height)
    radius = rng.randrange(_LEAST_RADIUS, max(side // 8, _LEAST_RADIUS) + 1)
    place = rng.randrange(9)
    x, y = (
        round(length * (part + 0.5 + rng.uniform(-0.1, 0.1)) / 3)
        for length, part in ((scene.width, place % 3), (scene.height, place // 3))
    )
    colour, rgb = rng.choice(list(_palette(rng, scene.rgb).items()))
    thing = Thing(rng.choice(SHAPES), colour, rgb, x, y, radius, rng.randrange(-8, 9))
    return replace(scene, things=(thing,))


def text_scene(rng: random.Random, text: str) -> Scene:
    """``text``, in capitals and digits, as large as there is room or smaller."""
    while True:
        scene = _empty(rng, least=1)
        most = min((scene.width - 2) // text_width(text), (scene.height - 2) // HEIGHT)
        if most < 1 or (most < 2 and len(text) < 3):
            continue
        scale = rng.randrange(min(2, most), min(most, 8) + 1)
        x = rng.randrange(scene.width - scale * text_width(text) + 1)
        y = rng.randrange(scene.height - scale * HEIGHT + 1)
        colour, rgb = rng.choice(list(_palette(rng, scene.rgb).items()))
        return replace(scene, text=Text(text, colour, rgb, x, y, scale))


def _empty(rng: random.Random, least: int) -> Scene:
    """A background with at least so many units a side."""
    grids = {grid: weight for grid, weight in _GRIDS.items() if min(grid) >= least}
    [(rows, columns)] = rng.choices(list(grids), list(grids.values()))
    # What is missing to whole units is padding for the model.
    width, height = (
        UNIT * units - (rng.randrange(UNIT // 2) if rng.random() < 0.4 else 0)
        for units in (columns, rows)
    )
    [name] = rng.choices(list(_BACKGROUNDS), list(_BACKGROUNDS.values()))
    return Scene(
        width,
        height,
        name,
        _shade(rng, name),
        noise=rng.choice((0, 0, 4, 8, 12)),
        smooth=rng.random() < 0.5,
        seed=rng.getrandbits(32),
    )


def _least_units(count: int) -> int:
    return 1 if count == 1 else 2 if count < 4 else 3


def _places(rng: random.Random, scene: Scene, count: int) -> list[tuple[int, int, int]] | None:
    """Centres and radii that keep clear of each other, one right of the other; None in vain."""
    side = min(scene.width, scene.height)
    low, high = (max(round(share * side), _LEAST_RADIUS) for share in _RADII[count])
    placed: list[tuple[int, int, int]] = []
    for _ in range(_TRIES):
        radius = rng.randrange(low, high + 1)
        x = rng.randrange(radius, scene.width - radius)
        y = rng.randrange(radius, scene.height - radius)
        if all(
            abs(x - a) >= scene.width // 14 and max(abs(x - a), abs(y - b)) >= radius + other + 2
            for a, b, other in placed
        ):
            placed.append((x, y, radius))
        if len(placed) == count:
            return placed
    return None


def _palette(rng: random.Random, background: Colour) -> dict[str, Colour]:
    """A shade of every colour that stands out from ``background``."""
    shades = {name: _shade(rng, name) for name in COLOURS}
    return {name: rgb for name, rgb in shades.items() if dist(rgb, background) >= _LEAST_CONTRAST}


def _shade(rng: random.Random, name: str) -> Colour:
    ranges = COLOURS[name]
    if len(ranges) == 1:
        return (rng.randint(*ranges[0]),) * 3
    red, green, blue = (rng.randint(low, high) for low, high in ranges)
    return red, green, blue
