"""A vocabulary learned from conversations, written as a release's and read back as one."""

import base64
from itertools import islice
from pathlib import Path

import pytest
import tiktoken

from mlx_k3.chat.tokenizer import load_tokenizer
from mlx_k3.chat.xtml import MARKERS, encode, encode_text, render
from mlx_k3.convert.tokenizer import CONTROL_TOKENS, PATTERN, read_ranks, write_tokenizer
from mlx_k3.errors import K3Error
from mlx_k3.tasks import training_examples
from mlx_k3.training.vocabulary import CONTROL_SLOTS, texts, tokenizer_config, train_vocabulary

RANKS = 700
SAMPLES = (
    "What is 4785 + 85? It is 14:05.",
    "Hello, how are you?\n\n  Two spaces, a tab\t, and 3rd 2nd x2 v1.5e-7.",
    "Grüße, 你好 мир ١٢٣ ½ 🙂",
    "<|open|>message<|sep|>",
    'mlx-k3 generate --prompt "What is a delta rule?"',
)


def learned(count: int = 1500, ranks: int = RANKS) -> bytes:
    return train_vocabulary(texts(islice(training_examples(1), count)), ranks)


@pytest.fixture(scope="module")
def content() -> bytes:
    return learned()


@pytest.fixture(scope="module")
def release(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    (folder / "tiktoken.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(tokenizer_config(RANKS, 4096))
    return folder


@pytest.fixture(scope="module")
def converted(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    write_tokenizer(release, folder)
    return folder


def test_bytes_come_first_and_no_token_has_a_digit_beside_anything(release: Path) -> None:
    ranks = read_ranks(release / "tiktoken.model")
    assert len(ranks) == RANKS
    assert {token for token, rank in ranks.items() if rank < 256} == {
        bytes([b]) for b in range(256)
    }
    for token in ranks:
        assert len(token) == 1 or not any(byte in b"0123456789" for byte in token)
    # Merges were learned from these conversations, words of the format among them.
    assert {b"message", b" the", b"response"} <= set(ranks)


def test_the_same_texts_give_the_same_vocabulary(content: bytes) -> None:
    assert learned() == content


def test_ids_are_those_of_tiktoken_and_text_comes_back(release: Path, converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    ranks = read_ranks(release / "tiktoken.model")
    reference = tiktoken.Encoding(
        "learned", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    for text in (*SAMPLES, *islice(texts(training_examples(2)), 3000)):
        ids = encode_text(text, tokenizer)
        assert ids == reference.encode_ordinary(text)
        assert tokenizer.decode(ids) == text


def test_every_digit_is_a_token(converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    for number in ("7", "47", "478", "4785901"):
        ids = encode_text(number, tokenizer)
        assert [tokenizer.decode([i]) for i in ids] == list(number)


def test_control_tokens_have_the_places_of_the_release(converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    for slot, name in CONTROL_SLOTS.items():
        assert tokenizer.convert_tokens_to_ids(name) == RANKS + slot
    assert tokenizer.convert_tokens_to_ids(f"<|reserved_token_{RANKS + 6}|>") == RANKS + 6
    assert len(tokenizer) == RANKS + CONTROL_TOKENS


def test_texts_leave_out_control_tokens(converted: Path) -> None:
    examples = list(islice(training_examples(3), 50))
    pieces = list(texts(examples))
    assert not any(marker in piece for piece in pieces for marker in MARKERS)
    tokenizer = load_tokenizer(converted)
    count = 0
    for item in examples:
        rendered = render(
            item.messages,
            tools=item.tools,
            thinking=item.thinking,
            thinking_effort=item.thinking_effort,
            response_format=item.response_format,
            add_generation_prompt=False,
        )
        count += sum(i < RANKS for i in encode(rendered.segments, tokenizer))
    assert count == sum(len(encode_text(piece, tokenizer)) for piece in pieces if piece)


@pytest.mark.parametrize(
    ("ranks", "count", "problem"),
    [(255, 10, "single bytes alone take 256"), (5000, 10, "use more text")],
)
def test_a_size_that_cannot_be_had_is_refused(ranks: int, count: int, problem: str) -> None:
    with pytest.raises(K3Error, match=problem):
        learned(count, ranks)


def test_exactly_the_bytes_is_a_vocabulary() -> None:
    lines = learned(3, 256).splitlines()
    assert sorted(base64.b64decode(line.split()[0]) for line in lines) == [
        bytes([b]) for b in range(256)
    ]
