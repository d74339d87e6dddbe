"""A small real vocabulary in the release's form: ``tiktoken.model`` + ``tokenizer_config.json``.

Trains a byte-level BPE on given text, so that merges, ranks and ids relate as in the release.
"""

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_k3.convert.tokenizer import CONTROL_TOKENS, PATTERN

# Slot after the last rank -> name, as in the release; the other slots have none.
CONTROL_SLOTS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}


def write_vocabulary(
    folder: Path, texts: Iterable[str], size: int, slots: dict[int, str] = CONTROL_SLOTS
) -> int:
    """Train on ``texts`` and write the two files into ``folder``.

    ``size`` counts everything, as ``vocab_size`` in a config does: the ranks and the 256 control
    tokens. Text that gives fewer merges gives fewer ranks.

    Returns:
        The number of ids: ranks + 256.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = bytes_to_unicode()
    trainer = trainers.BpeTrainer(
        vocab_size=size - CONTROL_TOKENS,
        initial_alphabet=list(alphabet.values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    to_byte = {char: byte for byte, char in alphabet.items()}
    ranks = {
        bytes(to_byte[char] for char in token): rank
        for token, rank in tokenizer.get_vocab().items()
    }
    write_ranks(folder, ranks, slots)
    return len(ranks) + CONTROL_TOKENS


def write_ranks(
    folder: Path, ranks: dict[bytes, int], slots: dict[int, str] = CONTROL_SLOTS
) -> None:
    """Write given ``{token: rank}`` as the two files of the release."""
    lines = (
        b"%s %d\n" % (base64.b64encode(token), rank)
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    named = {
        str(len(ranks) + slot): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": not name.startswith("<|media"),
        }
        for slot, name in slots.items()
    }
    config = {
        "added_tokens_decoder": named,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1048576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def sample_texts(repeat: int = 1) -> list[str]:
    """A little text of many kinds: prose, code, Han, other scripts, digits, emoji, spaces."""
    lines = [
        "The delta rule writes what the memory got wrong, and nothing else.",
        "don't won't I'll we've they're she'd it's I'm DON'T IT'S camelCase HTTPServer",
        "def step(q, k, v):\n    return (q * k).sum(-1) * v\n\n\n\tif x >= 10:\n\t\tpass\n",
        "月之暗面发布了新的模型，今天天气很好。我们一起去公园散步吧！你好世界",  # noqa: RUF001
        "日本語のテキストも少しだけ。한국어 문장도 조금. Привет, мир! Γειά σου Κόσμε",  # noqa: RUF001
        "1 12 123 1234 12345 3.14159 2,718,281 1e-6 0x7f ---- ==== ....  ....   !!! ???",
        "emoji 😀😀😀 🎉 👩‍👩‍👧 naïve café Zürich ǅ ﬁ \u00a0 \u3000 \u2028 end",
        '{"name": "get_weather", "arguments": {"city": "Tokyo", "days": 3}}',
        "message role user assistant system tool think response tools call argument index key type",
        "        eight spaces   three  two\r\n\r\nwindows lines\r\n",
    ]
    return lines * repeat
