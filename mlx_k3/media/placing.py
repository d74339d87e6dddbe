"""Where in a prompt the vectors of pictures go: every one has a place, and an id, of its own.

A rendered conversation has one pad for a picture, the model one position for each of its vectors.
Lengths, windows and caches all count positions, so the pad is expanded before anything counts.
"""

from collections.abc import Sequence

from ..errors import K3Error
from .medium import Medium


def expand(ids: Sequence[int], media: Sequence[Medium], pad_id: int) -> list[int]:
    """``ids`` with each pad replaced by the ids of its medium, in order.

    Raises:
        K3Error: there are more pads than media, or fewer.
    """
    pads = sum(token == pad_id for token in ids)
    if pads != len(media):
        raise K3Error(
            f"the prompt has places for {pads} pictures and {len(media)} are given; "
            "each place takes one"
        )
    expanded: list[int] = []
    following = iter(media)
    for token in ids:
        expanded += next(following).ids if token == pad_id else (token,)
    return expanded


def plain_ids(ids: Sequence[int], pad_id: int | None) -> list[int]:
    """``ids`` with the pad in place of every vector of a picture: what a vocabulary knows.

    Raises:
        K3Error: there are pictures, and the model has no pad.
    """
    if pad_id is None and any(token < 0 for token in ids):
        raise K3Error("the prompt has pictures, and this model knows no place for any")
    return [pad_id if token < 0 else token for token in ids]
