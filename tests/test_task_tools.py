"""Calls of tools in the tasks: declared, right, and answered when a model calls otherwise."""

from collections import Counter
from typing import Any

import pytest

from mlx_k3.tasks import (
    Example,
    asked,
    run_tool,
)

from .support.tasks import SIZES, answer_of, drawn, exact


def _calls(item: Example) -> list[tuple[dict[str, Any], str]]:
    """Calls and their results."""
    found = []
    for position, message in enumerate(item.messages):
        for offset, call in enumerate(message.get("tool_calls", ()), 1):
            found.append((call["function"], item.messages[position + offset]["content"]))
    return found


def test_calls_fit_their_declarations_and_results_are_right() -> None:
    called = Counter()
    for item in drawn("tools", 800) + drawn("tools_turns", 300):
        declared = {tool["function"]["name"]: tool["function"] for tool in item.tools}
        assert len(declared) == len(item.tools)
        descriptions = [function["description"] for function in declared.values()]
        assert len(set(descriptions)) == len(descriptions)
        for call, result in _calls(item):
            schema = declared[call["name"]]["parameters"]
            assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])
            for key, value in call["arguments"].items():
                is_number = schema["properties"][key]["type"] == "number"
                assert isinstance(value, int | float) if is_number else isinstance(value, str)
            assert run_tool(call["name"], call["arguments"], item) == result
            called[call["name"]] += 1
            if result.startswith("error"):
                continue
            if call["name"] == "calculator":
                expected = float(exact(call["arguments"]["expression"]))
                assert float(result) == pytest.approx(expected, rel=1e-11)
            elif call["name"] == "convert":
                start, end = (SIZES[call["arguments"][k].removesuffix("s")] for k in ("from", "to"))
                expected = call["arguments"]["value"] * start / end
                assert float(result) == pytest.approx(expected, rel=1e-5)
        for _, result in _calls(Example("", item.messages[len(asked(item)) :])):
            assert result in answer_of(item)
    assert min(called[name] for name in ("calculator", "clock", "convert")) > 100
    assert len(called) > 10


def test_a_call_nobody_foresaw_is_computed_or_refused() -> None:
    item = Example("tools", [])
    for expression, result in {
        "2 + 3 * 4": "14",
        "-7 / 2": "-3.5",
        "(1 + 2) * 3": "9",
        "10 / 4": "2.5",
        "1 / 0": "error: division by zero",
        "0 / 0": "error: division by zero",
        "2 ** 9": "error: not an expression",
        "__import__('os')": "error: not an expression",
        "1 +": "error: not an expression",
        "": "error: not an expression",
        "(" * 500: "error: not an expression",
        "-" * 5000 + "1": "error: not an expression",
        "1e999999 - 1e999999": "error: not an expression",
    }.items():
        assert run_tool("calculator", {"expression": expression}, item) == result, expression
    call = {"value": 2.5, "from": "km", "to": "metres"}
    assert run_tool("convert", call, item) == "2500"
    assert run_tool("convert", {**call, "to": "hours"}, item).startswith("error")
    assert run_tool("convert", {**call, "to": "parsecs"}, item).startswith("error")
    assert run_tool("convert", {**call, "to": ["m"]}, item).startswith("error")
    assert run_tool("convert", {**call, "value": "2"}, item).startswith("error")
    assert run_tool("clock", {}, item).startswith("error")
