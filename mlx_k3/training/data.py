"""Conversations as batches of token ids, the same for a seed whatever makes them.

Conversations are made in chunks by other processes. Within a chunk they are sorted by length into
few shapes, each conversation alone in its row: a row's state begins empty, as in use. What
follows it in its row is another conversation's beginning, which counts for nothing; routers see
ordinary text there instead of padding. Of a picture the ids have as many pads as it has vectors.
"""

import multiprocessing
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..chat import xtml
from ..chat.attaching import media_of
from ..chat.tokenizer import load_tokenizer
from ..errors import K3Error
from ..media.medium import Medium
from ..media.placing import plain_ids
from ..media.processor import Processor
from ..tasks import Example, held_out_examples, scenes, training_examples
from .pictures import Pictures, gather, groups, opened

_AHEAD = 2  # chunks' worth of conversations that may be made before they are used
_PART = 256  # conversations a process makes at a time
_IN_VAIN = 1000  # conversations of which one has to fit
_SEEDS = 1 << 32  # parts of a stream; another stream's seed begins after them
_NOWHERE = np.zeros(0, np.int64)


class Batch(NamedTuple):
    """``ids [B, T + 1]`` int32, and ``weights [B, T]`` float32 of predicting the next id."""

    ids: np.ndarray
    weights: np.ndarray
    pictures: Pictures | None = None


class Tokens(NamedTuple):
    """A conversation: ids ``[n]`` and which of them the model has to predict ``[n]``.

    ``places`` of its pictures' vectors in the ids are those of the pads.
    """

    ids: np.ndarray
    predicted: np.ndarray
    media: tuple[Medium, ...] = ()
    places: np.ndarray = _NOWHERE


class Position(NamedTuple):
    """Where in the stream a batch lies."""

    chunk: int
    batch: int


BEGINNING = Position(0, 0)


def tokenize(example: Example, tokenizer: Any) -> Tokens:
    """A conversation's ids; its pictures are open. Answers are to be predicted, from where a
    prompt ends."""
    rendered = xtml.render(
        example.messages,
        tools=example.tools,
        thinking=example.thinking,
        thinking_effort=example.thinking_effort,
        response_format=example.response_format,
        add_generation_prompt=False,
    )
    given = len(xtml.reply_opening(example.thinking))
    ids: list[int] = []
    predicted: list[bool] = []

    def add(segments: list[xtml.Segment], predict: bool) -> None:
        new = xtml.encode(segments, tokenizer)
        ids.extend(new)
        predicted.extend([predict] * len(new))

    add(rendered.head, False)
    last = len(rendered.messages) - 1
    # Results of tools may have changed places, so who speaks is read off the layout.
    for i, segments in enumerate(rendered.messages):
        if i == last:
            add(rendered.tail, False)
        answer = segments[:given] == xtml.reply_opening(example.thinking)
        add(segments[: given if answer else None], False)
        if answer:
            add(segments[given:], True)
    media = tuple(media_of(example.messages))
    if not media:
        return Tokens(np.array(ids, np.int32), np.array(predicted))
    # A picture's vectors have ids of their own, below zero: see Medium.ids.
    places = np.flatnonzero(np.array(ids, np.int64) < 0)
    pad = tokenizer.convert_tokens_to_ids(xtml.MEDIA[2])
    plain = np.array(plain_ids(ids, pad), np.int32)
    return Tokens(plain, np.array(predicted), media, places)


def batches(
    conversations: list[Tokens], lengths: tuple[int, ...], tokens_per_batch: int, seed: int
) -> list[Batch]:
    """Batches of about ``tokens_per_batch`` in a random order; conversations too long are left out.

    Rows that fill up the last batch of a length count for nothing.
    """
    made = []
    shorter = 0
    for length in lengths:
        rows = [c for c in conversations if shorter < len(c.ids) - 1 <= length]
        shorter = length
        size = max(tokens_per_batch // length, 1)
        made += [_batch(group, length, size) for group in groups(rows, size)]
    random.Random(seed).shuffle(made)
    return made


def _batch(rows: Sequence[Tokens], length: int, size: int) -> Batch:
    ids = np.zeros((size, length + 1), np.int32)
    weights = np.zeros((size, length), np.float32)
    for i in range(size):
        own = rows[i % len(rows)]
        text, j = own.ids, i
        while len(text) <= length:
            j += 1
            text = np.concatenate([text, rows[j % len(rows)].ids])
        ids[i] = text[: length + 1]
        if i < len(rows):
            weights[i, : len(own.ids) - 1] = own.predicted[1:]
    return Batch(ids, weights, gather(rows, length, size))


class BatchStream:
    """An endless stream of batches that can begin at any position.

    >>> with BatchStream(folder, lengths=(256, 512), tokens_per_batch=16384, ...) as stream:
    ...     for position, batch in stream: ...

    ``folder`` holds a converted tokenizer, and the settings for pictures, which a share
    ``pictures`` of the examples is about; a batch's ``position`` is that of the one after it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lengths: tuple[int, ...],
        tokens_per_batch: int,
        conversations_per_chunk: int,
        seed: int,
        workers: int = 1,
        start: Position = BEGINNING,
        held_out: bool = False,
        pictures: float = 0.0,
    ):
        self._lengths, self._tokens = lengths, tokens_per_batch
        self._parts = -(-conversations_per_chunk // _PART)
        self._seed, self._start, self._kind = seed, start, (held_out, pictures)
        # Spawned: a forked process would share MLX's threads and locks.
        context = multiprocessing.get_context("spawn")
        with _deaf_to_ctrl_c():
            self._pool = context.Pool(workers, _load, (str(folder),))

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def __iter__(self) -> Iterator[tuple[Position, Batch]]:
        chunk, skip = self._start
        pending = [self._make(chunk + i) for i in range(_AHEAD)]
        in_vain = 0
        while True:
            pending.append(self._make(chunk + _AHEAD))
            conversations = [c for part in pending.pop(0) for c in part.get()]
            made = batches(conversations, self._lengths, self._tokens, self._seed + chunk)
            in_vain = 0 if made else in_vain + len(conversations)
            if in_vain >= _IN_VAIN:
                shortest = min(len(c.ids) for c in conversations) - 1
                raise K3Error(
                    f"none of {in_vain:,} conversations fits into lengths of {self._lengths[-1]} "
                    f"tokens; short ones take {shortest}"
                )
            for i, batch in enumerate(made[skip:], start=skip + 1):
                yield (Position(chunk, i) if i < len(made) else Position(chunk + 1, 0)), batch
            chunk, skip = chunk + 1, 0

    def _make(self, chunk: int) -> list[Any]:
        """Begin to make a chunk's conversations."""
        first = self._seed * _SEEDS + chunk * self._parts
        seeds = range(first, first + self._parts)
        return [self._pool.apply_async(_make, (seed, *self._kind)) for seed in seeds]


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C, which reaches the whole group; who started
    them ends them."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class CachedTokenizer:
    """A tokenizer that remembers: the format's own words come again in every conversation."""

    def __init__(self, tokenizer: Any):
        self.encode = lru_cache(1 << 16)(tokenizer.encode)
        self.convert_tokens_to_ids = lru_cache(512)(tokenizer.convert_tokens_to_ids)


_tokenizer: CachedTokenizer
_processor: Processor


def _load(folder: str) -> None:
    global _tokenizer, _processor
    _tokenizer = CachedTokenizer(load_tokenizer(Path(folder)))
    _processor = Processor.from_folder(folder)


def _make(seed: int, held_out: bool, pictures: float) -> list[Tokens]:
    examples = held_out_examples if held_out else training_examples
    made = []
    for example in islice(examples(seed, pictures), _PART):
        if scenes(example):
            example = opened(example, _processor)
        made.append(tokenize(example, _tokenizer))
    return made
