"""The tokenizer of a converted model, as mlx-lm's generation loop and server expect it.

Owns what an id means (bytes of text, or a control token) and which ids end an answer. Text is
text: encoding never recognises a control token, whatever the text spells. Knows the chat format
only by name; :mod:`mlx_k3.chat.xtml` owns that.
"""

import codecs
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import kimi_k3 as tool_calls
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..errors import CheckpointError, UnsupportedError
from . import xtml

# An answer of either family ends with its end-of-message token, a text continued with [EOS].
_STOP_TOKENS = ("<|end_of_msg|>", "<|im_end|>", "[EOS]")


class TokenTable(NamedTuple):
    """What each id stands for. ``pieces[i]`` is None where the tokenizer has no id ``i``."""

    pieces: list[bytes | None]
    control: dict[int, str]


class K3Tokenizer(PreTrainedTokenizerFast):
    """A byte-level BPE tokenizer that renders conversations by code where the model speaks XTML."""

    @cached_property
    def table(self) -> TokenTable:
        """Bytes of every id; a control token's are those of its name."""
        to_byte = {char: byte for byte, char in bytes_to_unicode().items()}
        control = {i: token.content for i, token in self.added_tokens_decoder.items()}
        vocabulary = self.get_vocab()
        pieces: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            if i in control:
                pieces[i] = token.encode()
            else:
                pieces[i] = bytes(to_byte[char] for char in token)
        return TokenTable(pieces, control)

    @cached_property
    def speaks_xtml(self) -> bool:
        """Whether conversations are XTML (K3) rather than a template's (Kimi Linear)."""
        return set(xtml.MARKERS) <= set(self.get_added_vocab())

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        thinking: bool = True,
        thinking_effort: str | None = "max",
        tool_choice: str | None = None,
        response_format: dict[str, Any] | str | None = None,
        return_dict: bool = False,
        **template_options: Any,
    ) -> Any:
        """The ids of ``conversation`` (its text without ``tokenize``), ready for an answer.

        The name and the keywords are those of transformers, so that mlx-lm's server can call it.

        Raises:
            K3Error: the conversation does not fit the chat format.
        """
        if not self.speaks_xtml:
            # The template's own control tokens are meant; what a message spells out stays text.
            self.split_special_tokens = False
            try:
                return super().apply_chat_template(
                    conversation,
                    tools=tools,
                    tokenize=tokenize,
                    add_generation_prompt=add_generation_prompt,
                    return_dict=return_dict,
                    sanitize_control_tokens=tokenize,
                    **template_options,
                )
            finally:
                self.split_special_tokens = True
        if template_options or return_dict:
            unknown = sorted(template_options) or ["return_dict"]
            raise UnsupportedError(f"the chat format of K3 has no option {', '.join(unknown)}")
        rendered = xtml.render(
            conversation,
            tools=tools,
            thinking=thinking,
            thinking_effort=thinking_effort,
            tool_choice=tool_choice,
            response_format=response_format,
            add_generation_prompt=add_generation_prompt,
        )
        segments = rendered.segments
        return xtml.encode(segments, self) if tokenize else "".join(s.text for s in segments)


class ByteDetokenizer(StreamingDetokenizer):
    """Text of a growing list of ids, complete characters only.

    mlx-lm's own for this decoder drops a leading space, which belongs to a text being continued.
    """

    def __init__(self, tokenizer: K3Tokenizer):
        self._pieces = tokenizer.table.pieces
        self.reset()

    def reset(self) -> None:
        self.offset = 0
        self.tokens = []
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self.text += self._decoder.decode(self._pieces[token])

    def finalize(self) -> None:
        self.text += self._decoder.decode(b"", final=True)


def load_tokenizer(folder: str | Path) -> TokenizerWrapper | None:
    """The tokenizer in ``folder``, or None if it has no tokenizer files.

    ``encode`` treats text as text. Answers end on the message's end or on ``[EOS]``.

    Raises:
        CheckpointError: the files are damaged, or still in the release's form.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tiktoken.model").exists():
            raise CheckpointError(
                f"{folder} has tiktoken.model but no tokenizer.json; run mlx-k3 convert on it"
            )
        return None
    try:
        json.loads(path.read_bytes())
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}; convert the model again") from None

    tokenizer = K3Tokenizer.from_pretrained(folder)
    known = tokenizer.get_vocab()
    tools: dict[str, Any] = {}
    if tokenizer.speaks_xtml:
        tools = {
            "tool_parser": tool_calls.parse_tool_call,
            "tool_call_start": tool_calls.tool_call_start,
            "tool_call_end": tool_calls.tool_call_end,
        }
    wrapper = TokenizerWrapper(
        tokenizer,
        ByteDetokenizer,
        eos_token_ids=[known[name] for name in _STOP_TOKENS if name in known],
        **tools,
    )
    # Only now: while it is built, mlx-lm encodes the format's markers as control tokens.
    tokenizer.split_special_tokens = True
    return wrapper


def only_known_ids(
    sampler: Callable[[mx.array], mx.array], tokenizer: TokenizerWrapper
) -> Callable[[mx.array], mx.array]:
    """``sampler`` over log-probabilities [B, rows], kept from ids the tokenizer cannot decode.

    A model may have more output rows than its tokenizer has ids.
    """
    known = mx.array([piece is not None for piece in tokenizer.table.pieces])

    def sample(logprobs: mx.array) -> mx.array:
        rows = logprobs.shape[-1]
        missing = max(rows - known.size, 0)
        allowed = mx.pad(known[:rows], (0, missing)) if missing else known[:rows]
        masked = mx.where(allowed, logprobs, -mx.inf)
        return sampler(masked - mx.logsumexp(masked, axis=-1, keepdims=True))

    return sample
