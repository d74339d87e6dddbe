"""Conversations as training sees them: what is predicted, what a batch holds, and the stream."""

import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_k3.chat.tokenizer import load_tokenizer
from mlx_k3.chat.xtml_parser import ReplyParser
from mlx_k3.errors import K3Error
from mlx_k3.tasks import FAMILIES, Example, example, is_held_out, training_examples
from mlx_k3.training import data
from mlx_k3.training.data import (
    BEGINNING,
    Batch,
    BatchStream,
    Position,
    Tokens,
    batches,
    held_out_examples,
    tokenize,
)

from .support.training import threads_for_processes

LENGTHS = (128, 256, 512)
SETTINGS = [
    {"thinking": True, "thinking_effort": "max"},
    {"thinking": True, "thinking_effort": "low"},
    {"thinking": True, "thinking_effort": None},
    {"thinking": False, "thinking_effort": "max"},
]


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Path) -> Any:
    return load_tokenizer(vocabulary)


@pytest.fixture(scope="module")
def conversations(tokenizer: Any) -> list[Tokens]:
    return [tokenize(item, tokenizer) for item in islice(training_examples(seed=3), 200)]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads_for_processes(monkeypatch)


def assert_answers_are_what_is_predicted(item: Example, tokenizer: Any) -> None:
    """Each answer follows the prompt that use gives, is predicted whole, and reads as meant."""
    tokens = tokenize(item, tokenizer)
    ids = tokens.ids.tolist()
    edges = np.flatnonzero(np.diff(tokens.predicted, prepend=False, append=False))
    spans = edges.reshape(-1, 2).tolist()
    answers = [i for i, message in enumerate(item.messages) if message["role"] == "assistant"]
    assert len(spans) == len(answers) and spans[-1][1] == len(ids)
    for i, (begin, end) in zip(answers, spans, strict=True):
        prompt = tokenizer.apply_chat_template(
            item.messages[:i],
            tools=item.tools,
            thinking=item.thinking,
            thinking_effort=item.thinking_effort,
            response_format=item.response_format,
            add_generation_prompt=True,
        )
        assert ids[:begin] == prompt
        assert ids[end - 1] == tokenizer.convert_tokens_to_ids("<|end_of_msg|>")
        parser = ReplyParser(tokenizer.table, "think" if item.thinking else "response")
        for token in ids[begin:end]:
            parser.feed(token)
        said, meant = parser.message, item.messages[i]
        assert parser.ended and said["content"] == meant["content"]
        if item.thinking:
            assert said.get("reasoning_content", "") == meant.get("reasoning_content", "")
        calls = [call["function"] for call in said.get("tool_calls", ())]
        assert calls == [call["function"] for call in meant.get("tool_calls", ())]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_answers_are_what_is_predicted(family: str, tokenizer: Any) -> None:
    rng = random.Random(family)
    for settings in SETTINGS:
        for split in ("train", "held-out"):
            item = replace(example(family, rng, split), **settings)
            assert_answers_are_what_is_predicted(item, tokenizer)


def test_so_are_those_of_the_mixture(tokenizer: Any) -> None:
    """Conversations of several turns, with calls among them, and with system messages."""
    seen = Counter()
    for item in islice(training_examples(seed=5), 800):
        assert_answers_are_what_is_predicted(item, tokenizer)
        seen[item.family] += 1
        seen["system"] += item.messages[0]["role"] == "system"
        seen["several calls"] += sum(m["role"] == "tool" for m in item.messages) > 1
    wanted = ("conversation", "tools", "tools_turns", "json", "system", "several calls")
    assert all(seen[kind] for kind in wanted), seen


def test_a_word_of_the_format_in_a_message_stays_text(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": '<|open|>message role="assistant"<|sep|>'},
        {"role": "assistant", "content": "<|end_of_msg|>"},
        {"role": "user", "content": "<|open|>think<|sep|>"},
        {"role": "assistant", "reasoning_content": "<|close|>", "content": "No."},
    ]
    for settings in SETTINGS:
        assert_answers_are_what_is_predicted(Example("", messages, **settings), tokenizer)


# Batches


def own_parts(batch: Batch) -> list[tuple[bytes, bytes]]:
    """What the rows that count hold, up to the last id they predict: ids and weights."""
    parts = []
    for ids, weights in zip(batch.ids, batch.weights, strict=True):
        if weights.any():
            end = int(np.flatnonzero(weights)[-1]) + 2
            parts.append((ids[:end].tobytes(), weights[: end - 1].tobytes()))
    return parts


def as_parts(conversations: list[Tokens]) -> Counter[tuple[bytes, bytes]]:
    """What :func:`own_parts` must find."""
    return Counter(
        (c.ids.astype(np.int32).tobytes(), c.predicted[1:].astype(np.float32).tobytes())
        for c in conversations
    )


def fitting(conversations: list[Tokens], length: int) -> list[Tokens]:
    return [c for c in conversations if len(c.ids) <= length + 1]


def test_every_conversation_that_fits_is_there_once(conversations: list[Tokens]) -> None:
    made = batches(conversations, LENGTHS, 1024, seed=0)
    found = Counter(part for batch in made for part in own_parts(batch))
    assert found == as_parts(fitting(conversations, 512))
    assert 100 < found.total() < len(conversations)
    for batch in made:
        rows, length = batch.weights.shape
        assert batch.ids.shape == (rows, length + 1) and rows == 1024 // length
        assert (batch.ids.dtype, batch.weights.dtype) == (np.int32, np.float32)
        assert own_parts(batch)
        for ids, _ in own_parts(batch):  # In the shortest rows they fit into.
            assert length == next(n for n in LENGTHS if len(ids) // 4 - 1 <= n)


def test_rows_are_filled_up_with_other_conversations(conversations: list[Tokens]) -> None:
    known = [c.ids for c in conversations]
    for batch in batches(conversations, LENGTHS, 1024, seed=0):
        for ids, weights in zip(batch.ids, batch.weights, strict=True):
            end = int(np.flatnonzero(weights)[-1]) + 2 if weights.any() else 0
            while end < len(ids):
                rest = ids[end:]
                fits = [len(k) for k in known if np.array_equal(k[: len(rest)], rest[: len(k)])]
                assert fits
                end += max(fits)


def test_the_order_is_that_of_the_seed(conversations: list[Tokens]) -> None:
    def order(conversations: list[Tokens], seed: int) -> list[bytes]:
        return [batch.ids.tobytes() for batch in batches(conversations, LENGTHS, 1024, seed)]

    first = order(conversations, 1)
    assert order(conversations, 1) == first
    assert order(conversations, 2) != first
    assert sorted(order(conversations, 2)) == sorted(first)
    lengths = [len(ids) for ids in first]
    assert lengths != sorted(lengths)


def test_edges_of_the_lengths() -> None:
    """A length is how many predictions a row holds: one less than its ids."""

    def made(n: int) -> list[Batch]:
        tokens = Tokens(np.arange(n, dtype=np.int32), np.arange(n) >= n - 2)
        return batches([tokens], (4, 8), 16, seed=0)

    [batch] = made(5)
    assert batch.ids.tolist() == [[0, 1, 2, 3, 4]] * 4
    assert batch.weights.tolist() == [[0, 0, 1, 1], *[[0] * 4] * 3]
    [batch] = made(6)
    assert batch.ids[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2] and len(batch.ids) == 2
    assert len(made(9)) == 1 and made(10) == []
    [batch] = batches([Tokens(np.arange(9, dtype=np.int32), np.ones(9, bool))], (8,), 1, seed=0)
    assert batch.ids.shape == (1, 9)  # A row at least.


# The stream

OPTIONS = {
    "lengths": LENGTHS,
    "tokens_per_batch": 8192,
    "conversations_per_chunk": 512,
    "seed": 11,
}


def drawn(folder: Path, count: int, **options: Any) -> list[tuple[Position, bytes, bytes]]:
    with BatchStream(folder, **OPTIONS | options) as stream:
        return [(at, b.ids.tobytes(), b.weights.tobytes()) for at, b in islice(stream, count)]


def test_the_stream_is_the_same_from_anywhere_whoever_makes_it(
    vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_processes = drawn(vocabulary, 45, workers=3)
    threads_for_processes(monkeypatch)
    assert drawn(vocabulary, 45, workers=1) == by_processes
    positions = [BEGINNING, *(position for position, *_ in by_processes)]
    assert positions == sorted(positions) and positions[-1].chunk >= 2
    last_of_chunk = next(i for i, position in enumerate(positions) if position.chunk == 1)
    for begin in (1, 7, last_of_chunk - 1, last_of_chunk, last_of_chunk + 1):
        resumed = drawn(vocabulary, 4, start=positions[begin])
        assert resumed == by_processes[begin : begin + 4]
    assert drawn(vocabulary, 1, seed=12)[0] != by_processes[0]


def test_chunks_have_conversations_of_their_own(
    vocabulary: Path, threads: None, tokenizer: Any
) -> None:
    with BatchStream(vocabulary, **OPTIONS) as stream:
        made = [batch for position, batch in islice(stream, 45) if position.chunk < 2]
    found = Counter(part for batch in made for part in own_parts(batch))
    assert found.total() > 700
    assert len(found) > 0.8 * found.total()  # Only short ones come again, by chance.


@pytest.mark.parametrize("held_out", [False, True])
def test_the_held_out_stream_has_no_trained_item(
    vocabulary: Path, threads: None, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    made: list[Example] = []

    def spy(item: Example, tokenizer: Any) -> Tokens:
        made.append(item)
        return tokenize(item, tokenizer)

    monkeypatch.setattr(data, "tokenize", spy)
    drawn(vocabulary, 3, held_out=held_out)
    keys = {item.key for item in made}
    assert len(keys) > 300
    assert all(is_held_out(key) == held_out for key in keys)


def test_held_out_examples_come_in_the_proportions_of_training() -> None:
    seen = Counter(item.family for item in islice(held_out_examples(0), 3000))
    total = sum(family.weight for family in FAMILIES.values())
    for name, family in FAMILIES.items():
        share = family.weight / total
        assert abs(seen[name] / 3000 - share) < 5 * (share / 3000) ** 0.5, name


def test_conversations_that_all_are_too_long_are_told(vocabulary: Path, threads: None) -> None:
    with pytest.raises(K3Error, match=r"none of 1,024 .* fits into lengths of 8 tokens; short"):
        drawn(vocabulary, 1, lengths=(4, 8))


def test_a_chunk_without_any_that_fits_is_passed_over(
    vocabulary: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_PART", 4)
    options = {"lengths": (96,), "conversations_per_chunk": 4, "tokens_per_batch": 96}
    made = drawn(vocabulary, 12, **options)
    chunks = [position.chunk - (position.batch == 0) for position, *_ in made]
    assert set(chunks) < set(range(chunks[-1] + 1))
    for i in range(11):
        assert drawn(vocabulary, 1, start=made[i][0], **options) == [made[i + 1]]
