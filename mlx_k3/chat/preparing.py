"""A conversation made ready: its ids, what reads the answer, and what keeps it to a format.

Owns which settings a model's chat format has. Knows nothing of models and answers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import UnsupportedError
from .constraint import Constraint, constrain
from .plain import PlainParser
from .xtml_parser import ReplyParser


class Prepared(NamedTuple):
    """A conversation that is ready to be answered."""

    ids: list[int]
    parser: ReplyParser | PlainParser
    processors: list[Constraint]
    """Of logits: what keeps the answer to its format. They serve one answer."""


def prepare(
    tokenizer: TokenizerWrapper,
    messages: Sequence[dict[str, Any]],
    *,
    thinking: bool = True,
    parallel_tool_calls: bool = True,
    **settings: Any,
) -> Prepared:
    """Render ``messages`` under ``settings``: ``thinking_effort``, ``tools``, ``tool_choice`` and
    ``response_format``, the last two in any of OpenAI's forms.

    Raises:
        K3Error: a message or a setting does not fit the model.
    """
    enforced = {key: settings.get(key) for key in ("tools", "tool_choice", "response_format")}
    constraint = constrain(
        tokenizer, thinking=thinking, parallel_tool_calls=parallel_tool_calls, **enforced
    )
    if isinstance(settings.get("tool_choice"), dict):
        settings["tool_choice"] = "required"  # the format has no word for a certain tool
    ids = conversation_ids(tokenizer, messages, thinking=thinking, **settings)
    return Prepared(ids, reply_parser(tokenizer, thinking), [constraint] if constraint else [])


def conversation_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[dict[str, Any]], **settings: Any
) -> list[int]:
    """The prompt of a conversation in the model's own format.

    Raises:
        UnsupportedError: the model has none, or not these settings.
    """
    if tokenizer.speaks_xtml:
        return tokenizer.apply_chat_template(messages, **settings)
    if tokenizer.chat_template is None:
        raise UnsupportedError("this model has no chat format; continue a text with --raw")
    if not settings.get("thinking", True):
        raise UnsupportedError("this model's chat format has no thinking to switch off")
    return tokenizer.apply_chat_template(messages, tools=settings.get("tools"))


def reply_parser(tokenizer: TokenizerWrapper, thinking: bool) -> ReplyParser | PlainParser:
    """What reads the answer to a conversation's prompt."""
    if tokenizer.speaks_xtml:
        return ReplyParser(tokenizer.table, "think" if thinking else "response")
    return PlainParser(tokenizer)
