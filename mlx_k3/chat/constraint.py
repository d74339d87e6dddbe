"""Keeps an answer within a grammar while it is sampled.

Owns the matcher, which is llguidance's, and the mask on the logits. :mod:`mlx_k3.chat.grammar`
says what is allowed; this file knows nothing of tools or JSON.
"""

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..errors import K3Error, UnsupportedError
from . import grammar, xtml


class Constraint:
    """A logits processor for mlx-lm's loop; good for one answer.

    Raises:
        UnsupportedError: the grammar, or a schema in it, asks for something unknown.
    """

    def __init__(self, tokenizer: Any, rules: str):
        self._matcher = LLMatcher(_vocabulary(tokenizer), rules, log_level=0)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise UnsupportedError(f"this format cannot be enforced: {reason}")
        self._read: int | None = None  # of the tokens, a prompt included
        self._ended = False

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """``logits`` [B, rows] with what must not follow ``tokens`` at minus infinity.

        Raises:
            K3Error: the grammar needs more than its limits allow.
        """
        new = [] if self._read is None else tokens[self._read :].tolist()
        self._read = len(tokens)
        for token in new:
            self._ended = self._matcher.is_stopped()  # then this is the token that ends it
            if not self._ended:
                self._matcher.consume_token(token)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise K3Error(f"the answer's format could not be followed: {reason}")
        if self._ended:
            return logits  # mlx-lm computes one token more, which nobody sees
        return mx.where(self._allowed(logits.shape[-1]), logits, -mx.inf)

    def _allowed(self, rows: int) -> mx.array:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=rows, bitorder="little")
        return mx.array(allowed.astype(bool))


def constrain(
    tokenizer: Any,
    *,
    thinking: bool = True,
    response_format: dict[str, Any] | str | None = None,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: dict[str, Any] | str | None = None,
    parallel_tool_calls: bool = True,
) -> Constraint | None:
    """What makes an answer keep to these settings; None if they leave it free.

    Raises:
        K3Error: a setting makes no sense, or cannot be enforced for this model.
    """
    wanted = grammar.wanted(response_format, tools, tool_choice, parallel_tool_calls)
    if wanted is None:
        return None
    if tokenizer.speaks_xtml:
        rules = grammar.reply_grammar(wanted, thinking, lambda s: xtml.encode(s, tokenizer))
    elif wanted.schema is None or wanted.calls == "must":
        raise UnsupportedError("tool calls cannot be enforced in this model's chat format")
    else:
        rules = grammar.json_grammar(wanted.schema)
    return Constraint(tokenizer, rules)


@lru_cache(maxsize=1)  # takes most of a second for a large vocabulary
def _vocabulary(tokenizer: Any) -> LLTokenizer:
    """The tokenizer in llguidance's form. Nothing but a message's end ends a grammar."""
    pieces, control = tokenizer.table
    # The release's other stop token ends a text that is continued, not a message.
    stop = [tokenizer.convert_tokens_to_ids(xtml.END)]
    if not tokenizer.speaks_xtml:
        stop = sorted(tokenizer.eos_token_ids)
    source = _Source([piece or b"" for piece in pieces], list(control), stop[0], tokenizer)
    return LLTokenizer(TokenizerWrapper(source), n_vocab=len(pieces), eos_token=stop)


class _Source:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], stop: int, tokenizer: Any):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, stop
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return xtml.encode_text(text, self._tokenizer)
