"""Which tool call a tool's result answers.

Owns the matching by id and the order that follows from it. Knows nothing of the chat format.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ..errors import K3Error


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """The function of a tool call, ``{"name": ..., "arguments": ...}``, from OpenAI's nested form
    or a flat one.

    Raises:
        K3Error: there is no name.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise K3Error("a tool call has no function name")
    return function


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with each run of tool results in the order of the calls they answer.

    A result that is matched by ``tool_call_id`` gets its call's name as ``tool``. A run in which
    one result answers no call of the last assistant message stays as it is.
    """
    ordered: list[dict[str, Any]] = []
    calls: dict[str, tuple[int, str]] = {}
    for is_results, run in groupby(messages, key=_is_result):
        if is_results:
            ordered += _sorted_results(list(run), calls)
            continue
        for message in run:
            if message.get("role") == "assistant":
                calls = dict(_positions(message))
            ordered.append(message)
    return ordered


def _is_result(message: Any) -> bool:
    if not isinstance(message, dict):
        raise K3Error("a message is not an object with role and content")
    return message.get("role") == "tool"


def _positions(message: dict[str, Any]) -> Iterator[tuple[str, tuple[int, str]]]:
    """Call id -> (position, name). Backwards, so that of two equal ids the first call counts."""
    for position, call in reversed(list(enumerate(message.get("tool_calls") or ()))):
        if call.get("id") is not None:
            yield str(call["id"]), (position, function_of(call)["name"])


def _sorted_results(
    run: list[dict[str, Any]], calls: dict[str, tuple[int, str]]
) -> list[dict[str, Any]]:
    ids = [result.get("tool_call_id", result.get("id")) for result in run]
    if any(i is None or str(i) not in calls for i in ids):
        return run
    answers = [(*calls[str(i)], result) for i, result in zip(ids, run, strict=True)]
    answers.sort(key=lambda answer: answer[0])
    return [{**result, "tool": name} for _, name, result in answers]
