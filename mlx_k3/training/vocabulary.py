"""A vocabulary learned from text, in the release's own form.

Owns ``tiktoken.model`` (byte-level BPE) and ``tokenizer_config.json``, the names of the 256 control
tokens behind it. Text is cut as K3 cuts it, except that each digit is a piece of its own: a small
model computes digit by digit.
"""

import base64
import json
from collections.abc import Iterable, Iterator

from ..chat.xtml import render
from ..convert.tokenizer import PATTERN
from ..errors import K3Error
from ..tasks import Example

# Places after the last rank, as in the release; those without a name are reserved.
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

# Merges join the bytes of one piece only, so no token learned this way has two digits. K3's own
# pattern may give a piece of three at use, which such a vocabulary cuts into its digits.
_PATTERN = PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def texts(examples: Iterable[Example]) -> Iterator[str]:
    """All that is ordinary text in conversations, the format's own words included."""
    for example in examples:
        rendered = render(
            example.messages,
            tools=example.tools,
            thinking=example.thinking,
            thinking_effort=example.thinking_effort,
            response_format=example.response_format,
            add_generation_prompt=False,
        )
        yield from (s.text for s in rendered.segments if not s.is_control)


def train_vocabulary(texts: Iterable[str], ranks: int) -> bytes:
    """The content of a ``tiktoken.model``: the 256 bytes, then ``ranks - 256`` merges, the
    commonest first.

    Raises:
        K3Error: fewer ranks than bytes, or than the texts have merges for.
    """
    # Imported here: transformers takes a second.
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    if ranks < len(byte_of):
        raise K3Error(f"a vocabulary of {ranks} ranks; the single bytes alone take {len(byte_of)}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=ranks, initial_alphabet=list(byte_of), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    learned = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if len(learned) < ranks:
        raise K3Error(f"the texts give {len(learned):,} ranks, not {ranks:,}; use more text")
    lines = []
    for symbols, rank in learned:
        token = bytes(byte_of[symbol] for symbol in symbols)
        lines.append(b"%s %d\n" % (base64.b64encode(token), rank))
    return b"".join(lines)


def tokenizer_config(ranks: int, model_max_length: int) -> str:
    """The content of ``tokenizer_config.json`` for a vocabulary of ``ranks``."""
    traits = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    named = {
        str(ranks + slot): {"content": name, **traits, "special": True}
        for slot, name in CONTROL_SLOTS.items()
    }
    config = {
        "added_tokens_decoder": named,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": model_max_length,
        "tokenizer_class": "TikTokenTokenizer",
    }
    return json.dumps(config, indent=1) + "\n"
