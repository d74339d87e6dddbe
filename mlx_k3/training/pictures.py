"""Pictures in training: opened for a conversation, and gathered for a batch.

Owns which conversations share a batch, for a batch's pictures have one grid of patches: the tower
takes them all in one call. Knows neither model nor tokenizer.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from ..chat.attaching import replace_media
from ..media.attachments import picture
from ..media.medium import Medium
from ..media.processor import Processor
from ..tasks import Example, drawn

_SHAPES = 4  # numbers of pictures that a batch may have, for a picture a row on average


class Conversation(Protocol):
    """What is known here of a conversation of a batch."""

    media: tuple[Medium, ...]
    places: np.ndarray
    """Of each vector of its pictures, the position in its ids."""


class Pictures(NamedTuple):
    """P pictures of a batch, and where the M vectors of each go.

    ``pixels [P, N, 3, p, p]`` uint8; ``table [256, 3]`` float32 says what is read for them;
    ``grid`` is frames, rows and columns of patches. ``places [P * M]`` int32 count positions row
    by row of the batch, ``B * T`` being nowhere: the last pictures may be there for the shape
    alone.
    """

    pixels: np.ndarray
    table: np.ndarray
    grid: tuple[int, int, int]
    places: np.ndarray


def opened(example: Example, processor: Processor) -> Example:
    """The example with its pictures drawn and cut into patches."""
    messages = [
        replace_media(
            message, "", lambda part, _: {**part, "attachment": picture(part["image"], processor)}
        )
        for message in drawn(example).messages
    ]
    return replace(example, messages=messages)


def groups(rows: Sequence[Conversation], size: int) -> Iterator[list[Conversation]]:
    """``rows`` in groups of up to ``size``, each with pictures of one grid at most.

    Pictures of a grid are spread over as many groups as their share of all pictures is, and text
    takes the places that are left.
    """
    text = [row for row in rows if not row.media]
    by_grid = defaultdict(list)
    for row in rows:
        if row.media:
            by_grid[row.media[0].grid].append(row)
    shown = len(rows) - len(text)
    for grid in sorted(by_grid):
        own = by_grid[grid]
        count = max(-(-len(own) // size), round(len(rows) / size * len(own) / shown))
        for i in range(count):
            group = own[i::count]
            if not group:
                continue
            room = size - len(group)
            yield group + text[:room]
            text = text[room:]
    for start in range(0, len(text), size):
        yield text[start : start + size]


def gather(rows: Sequence[Conversation], length: int, size: int) -> Pictures | None:
    """The pictures of a batch of ``size`` rows of ``length`` positions; None if there are none."""
    media = [medium for row in rows for medium in row.media]
    if not media:
        return None
    first = media[0]
    pixels = [medium.pixels for medium in media]
    places = [row.places + i * length for i, row in enumerate(rows)]
    # Few shapes, so that a GPU's buffers fit again.
    step = max(size // _SHAPES, 1)
    missing = -len(media) % step
    pixels += [np.zeros_like(first.pixels)] * missing
    places.append(np.full(missing * first.tokens, size * length))
    return Pictures(
        np.stack(pixels), first.table, first.grid, np.concatenate(places).astype(np.int32)
    )
