"""The converted tokenizer: ids equal to tiktoken's, and text that stays text."""

import base64
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from transformers import AutoTokenizer

from mlx_k3.chat.tokenizer import load_tokenizer, only_known_ids
from mlx_k3.convert.tokenizer import CONTROL_TOKENS, PATTERN, read_ranks, write_tokenizer
from mlx_k3.errors import CheckpointError

from .support.vocabulary import CONTROL_SLOTS, sample_texts, write_ranks, write_vocabulary

# Text that is most likely to be cut or merged in a wrong place.
awkward = st.lists(
    st.one_of(
        st.text(),
        st.text("月之暗面发布了 \u3007\u2e80的模型aB1 "),
        st.text(" \t\r\n\u00a0\u3000\u2028\x85"),
        st.text("0123456789٣५Ⅷ½"),
        st.text("'sStTrReEvVmMlLdD \u017f\u2019"),
        st.text("😀👩\u200d👧é\u0301ǅﬁß"),
        st.sampled_from([*CONTROL_SLOTS.values(), "<|", "|>", "<|reserved_token_300|>"]),
        st.sampled_from(sample_texts()),
    )
).map("".join)


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    write_vocabulary(folder, sample_texts(), 1000)
    return folder


@pytest.fixture(scope="module")
def converted(release, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("converted folder")
    written = write_tokenizer(release, out)
    assert sorted(path.name for path in written) == ["tokenizer.json", "tokenizer_config.json"]
    return out


@pytest.fixture(scope="module")
def tokenizer(converted):
    return load_tokenizer(converted)


@pytest.fixture(scope="module")
def reference(release) -> tiktoken.Encoding:
    ranks = read_ranks(release / "tiktoken.model")
    return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


@settings(max_examples=500, deadline=None)
@given(text=awkward)
def test_ids_equal_tiktokens_and_decode_to_the_text(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference.encode_ordinary(text)
    assert tokenizer.decode(ids) == text
    assert not any(i in tokenizer.table.control for i in ids)


def test_every_character_is_cut_as_tiktoken_cuts_it(tokenizer, reference):
    # The two regex engines have Unicode tables of their own; a character of another class in one
    # of them would join, or part from, the letters beside it.
    characters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    for start in range(0, len(characters), 50_000):
        text = "".join(f"{c}a" for c in characters[start : start + 50_000])
        assert tokenizer.encode(text) == reference.encode_ordinary(text)


def test_runs_of_one_character_merge_as_in_tiktoken(tokenizer, reference):
    for character in " \n-=aé月😀":
        for length in range(1, 70):
            text = f"x{character * length}y"
            assert tokenizer.encode(text) == reference.encode_ordinary(text)


def test_overlapping_merges_to_one_token_are_taken_from_the_left(tmp_path):
    # a+aa and aa+a give the same token; tiktoken takes the leftmost of equal ranks.
    extra = [b"aa", b"aaa", b"ba", b"ab", b"bab", b"aab"]
    ranks = {bytes([i]): i for i in range(256)} | {t: 256 + i for i, t in enumerate(extra)}
    write_ranks(tmp_path, ranks)
    write_tokenizer(tmp_path, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    encoding = tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for number in range(2**11):
        text = bin(number)[3:].translate({48: "a", 49: "b"})
        assert tokenizer.encode(text) == encoding.encode_ordinary(text)


def test_stock_transformers_loads_it_without_code_of_the_release(converted, reference):
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert "auto_map" not in config
    stock = AutoTokenizer.from_pretrained(converted, trust_remote_code=False)
    text = "".join(sample_texts())
    assert stock.encode(text) == reference.encode_ordinary(text)
    assert len(stock) == len(reference._mergeable_ranks) + CONTROL_TOKENS
    assert (stock.bos_token, stock.eos_token, stock.pad_token) == ("[BOS]", "[EOS]", "[PAD]")


def test_control_tokens_follow_the_ranks_and_unnamed_slots_are_reserved(tokenizer, reference):
    first = reference.n_vocab
    assert sorted(tokenizer.table.control) == list(range(first, first + CONTROL_TOKENS))
    for slot in range(CONTROL_TOKENS):
        name = CONTROL_SLOTS.get(slot, f"<|reserved_token_{first + slot}|>")
        assert tokenizer.convert_tokens_to_ids(name) == first + slot
        assert tokenizer.table.control[first + slot] == name


def test_answers_stop_on_the_end_of_the_message_and_of_the_text(tokenizer):
    names = {tokenizer.table.control[i] for i in tokenizer.eos_token_ids}
    assert names == {"<|end_of_msg|>", "[EOS]"}


def test_mlx_lm_knows_the_channels_by_their_control_tokens(tokenizer):
    control = tokenizer.table.control
    assert control[tokenizer.think_start_tokens[0]] == "<|open|>"
    assert tokenizer.decode(list(tokenizer.think_start_tokens)) == "<|open|>think<|sep|>"
    assert control[tokenizer.tool_call_end_tokens[-1]] == "<|sep|>"


@given(data=st.data())
def test_the_detokenizer_shows_whole_characters_and_all_text(tokenizer, data):
    text = data.draw(awkward)
    ids = [256 + 40, *tokenizer.encode(" " + text)]
    detokenizer, shown = tokenizer.detokenizer, ""
    for i in ids:
        detokenizer.add_token(i)
        shown += detokenizer.last_segment
        assert "\ufffd" not in shown or "\ufffd" in text
    detokenizer.finalize()
    assert shown + detokenizer.last_segment == tokenizer.decode(ids)


def test_an_unfinished_character_appears_at_the_end_as_a_replacement(tokenizer):
    detokenizer = tokenizer.detokenizer
    ids = tokenizer.encode("\U00013000")  # in no sample: byte by byte
    assert len(ids) > 1
    detokenizer.add_token(ids[0])
    assert detokenizer.text == ""
    detokenizer.finalize()
    assert detokenizer.text == "\ufffd"


def test_an_id_beyond_the_tokenizer_is_never_sampled(tokenizer):
    known, rows = len(tokenizer.table.pieces), len(tokenizer.table.pieces) + 24
    logits = np.full((1, rows), -5.0, np.float32)
    logits[0, known:] = 10.0
    logits[0, 7] = 1.0
    logprobs = mx.array(logits) - mx.logsumexp(mx.array(logits))
    assert only_known_ids(make_sampler(0.0), tokenizer)(logprobs).item() == 7
    # The nucleus is that of what remains: 7 has a third of it, all before 24 rows took it away.
    sample = only_known_ids(make_sampler(1.0, top_p=0.2), tokenizer)
    assert {sample(logprobs).item() for _ in range(50)} == {7}
    sample = only_known_ids(make_sampler(1.0), tokenizer)
    assert max(sample(logprobs).item() for _ in range(200)) < known


def test_a_model_with_fewer_rows_than_the_tokenizer_samples_them_all(tokenizer):
    logprobs = mx.log(mx.array([[0.1, 0.2, 0.7]]))
    assert only_known_ids(make_sampler(0.0), tokenizer)(logprobs).item() == 2


def _line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d\n" % rank


BYTES = [_line(bytes([i]), i) for i in range(256)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*BYTES, b"YWI\n"], "line 257 is not"),
        ([*BYTES, b"YW*I= 256\n"], "line 257 is not"),
        ([*BYTES, b"YWI= x\n"], "line 257 is not"),
        ([*BYTES, b"YWI= 256 1\n"], "line 257 is not"),
        ([*BYTES, b"\xff\xfe\x00\n"], "line 257 is not"),
        ([*BYTES, _line(b"ab", 255)], "line 257 repeats rank 255 of line 256"),
        ([*BYTES, _line(b"a", 256)], "line 257 repeats a token"),
        ([*BYTES, _line(b"ab", 258)], "rank 256 is missing .line 257"),
        ([*BYTES, _line(b"ab", -1)], "rank 0 is missing .line 257"),
        (BYTES[:-1], "no token for the single byte 0xff"),
        ([], "no token for the single byte 0x00"),
    ],
)
def test_a_malformed_rank_file_is_refused_with_its_line(tmp_path, lines, message):
    write_ranks(tmp_path, {})
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    with pytest.raises(CheckpointError, match=message):
        write_tokenizer(tmp_path, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "does not hold"),
        ('{"added_tokens_decoder": []}', "not an object"),
        ('{"added_tokens_decoder": {"255": {"content": "x"}}}', "255 is no control token"),
        ('{"added_tokens_decoder": {"600": {"content": "x"}}}', "600 is no control token"),
        ('{"added_tokens_decoder": {"300": {}}}', "300 is no control token"),
        ('{"added_tokens_decoder": {"300": "x", "301": "x"}}', "repeats a name"),
        ('{"added_tokens_decoder": {"300": "a"}}', "also an ordinary token"),
        ('{"eos_token": "[END]"}', "no control token"),
    ],
)
def test_a_malformed_configuration_is_refused(tmp_path, config, message):
    (tmp_path / "tiktoken.model").write_bytes(b"".join(BYTES))
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message):
        write_tokenizer(tmp_path, tmp_path)


def test_a_rank_file_without_its_configuration_is_refused(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"".join(BYTES))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is missing"):
        write_tokenizer(tmp_path, tmp_path)
    with pytest.raises(CheckpointError, match="mlx-k3 convert"):
        load_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_gives_none(tmp_path):
    assert write_tokenizer(tmp_path, tmp_path) == []
    assert load_tokenizer(tmp_path) is None


def test_a_standard_tokenizer_is_copied_without_its_code(converted, tmp_path):
    config = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "eos_token": "[EOS]"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((converted / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    out = tmp_path / "out"
    out.mkdir()
    assert len(write_tokenizer(tmp_path, out)) == 3
    assert (out / "tokenizer.json").read_bytes() == (converted / "tokenizer.json").read_bytes()
    assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_text())
    assert load_tokenizer(out).encode("hello") == load_tokenizer(converted).encode("hello")


def test_a_damaged_tokenizer_file_is_refused(converted, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((converted / "tokenizer.json").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_tokenizer(tmp_path)
