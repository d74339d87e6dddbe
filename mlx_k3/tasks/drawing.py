"""Pixels of a scene, by Pillow; no font or file of the system is needed."""

import math
import random

import numpy as np
from PIL import Image, ImageDraw

from .font import text_dots
from .scenes import Scene, Text, Thing

FINE = 2  # times as large a smooth picture is drawn


def draw(scene: Scene) -> Image.Image:
    """The picture in RGB, the same for the same scene."""
    scale = FINE if scene.smooth else 1
    picture = Image.new("RGB", (scene.width * scale, scene.height * scale), scene.rgb)
    pen = ImageDraw.Draw(picture)
    for thing in scene.things:
        _draw_thing(pen, thing, scene.rgb, scale)
    if scene.text is not None:
        _draw_text(pen, scene.text, scale)
    if scale > 1:
        picture = picture.reduce(scale)
    return _noisy(picture, scene) if scene.noise else picture


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, behind: tuple, scale: int) -> None:
    x, y, r = ((n + 0.5) * scale - 0.5 for n in (thing.x, thing.y, thing.radius))
    if thing.shape in ("circle", "ring"):
        pen.ellipse((x - r, y - r, x + r, y + r), fill=thing.rgb)
        if thing.shape == "ring":
            hole = r * 0.55
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=behind)
        return
    turned = math.radians(thing.degrees)
    cos, sin = math.cos(turned) * r, math.sin(turned) * r
    outline = [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in OUTLINES[thing.shape]]
    pen.polygon(outline, fill=thing.rgb)


def _draw_text(pen: ImageDraw.ImageDraw, text: Text, scale: int) -> None:
    side = text.scale * scale
    for column, row in text_dots(text.text):
        x, y = text.x * scale + column * side, text.y * scale + row * side
        pen.rectangle((x, y, x + side - 1, y + side - 1), fill=text.rgb)


def _noisy(picture: Image.Image, scene: Scene) -> Image.Image:
    pixels = np.asarray(picture)
    chance = np.frombuffer(random.Random(scene.seed).randbytes(pixels.size), np.uint8)
    off = (chance.astype(np.int16) * (2 * scene.noise + 1) >> 8) - scene.noise
    return Image.fromarray((pixels + off.reshape(pixels.shape)).clip(0, 255).astype(np.uint8))


def _star() -> list[tuple[float, float]]:
    points = []
    for i in range(10):
        angle, length = math.pi * (i / 5 - 0.5), 0.45 if i % 2 else 1.0
        points.append((length * math.cos(angle), length * math.sin(angle)))
    return points


_THIN = 0.33
# Corners around the middle, within one radius of it in each direction; y points down.
OUTLINES = {
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(0, -1), (0.95, 0.8), (-0.95, 0.8)],
    "diamond": [(0, -1), (0.8, 0), (0, 1), (-0.8, 0)],
    "star": _star(),
    "cross": [
        (-_THIN, -1), (_THIN, -1), (_THIN, -_THIN), (1, -_THIN), (1, _THIN), (_THIN, _THIN),
        (_THIN, 1), (-_THIN, 1), (-_THIN, _THIN), (-1, _THIN), (-1, -_THIN), (-_THIN, -_THIN),
    ],
}  # fmt: skip
