"""Generated conversations with known answers: what the bundled model learns and is measured by.

Families of small tasks, a split into training and held-out items by what they are about, and the
tools that some of them call. Knows no model and no tokenizer.
"""

from .example import Example, Family, Reply, asked, is_held_out
from .mixture import FAMILIES, example, training_examples
from .toolbox import run_tool

__all__ = [
    "FAMILIES",
    "Example",
    "Family",
    "Reply",
    "asked",
    "example",
    "is_held_out",
    "run_tool",
    "training_examples",
]
