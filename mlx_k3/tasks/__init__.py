"""Generated conversations with known answers: what the bundled model learns and is measured by.

Families of small tasks, a split into training and held-out items by what they are about, and the
tools that some of them call. Knows no model and no tokenizer.
"""

from .example import Example, Family, Reply, asked, is_held_out
from .mixture import (
    ALL_FAMILIES,
    FAMILIES,
    PICTURE_FAMILIES,
    example,
    held_out_examples,
    training_examples,
)
from .pictures import drawn, scenes, with_scenes
from .scenes import Scene
from .talk import by_one_who_sees
from .toolbox import run_tool

__all__ = [
    "ALL_FAMILIES",
    "FAMILIES",
    "PICTURE_FAMILIES",
    "Example",
    "Family",
    "Reply",
    "Scene",
    "asked",
    "by_one_who_sees",
    "drawn",
    "example",
    "held_out_examples",
    "is_held_out",
    "run_tool",
    "scenes",
    "training_examples",
    "with_scenes",
]
