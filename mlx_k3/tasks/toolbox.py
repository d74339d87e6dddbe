"""The tools of the tool tasks: their declarations, and what they answer.

Owns the calculator, the unit table and the distractors. A clock or any other tool that tells of the
world answers what the example says it answers.
"""

import ast
import operator
import random
from decimal import Decimal, DecimalException, DivisionByZero
from typing import Any

from .example import ASSISTANT, Example
from .units import BY_NAME, converted, plain

_LONGEST = 200  # characters of an expression: nesting has an end
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def declaration(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    """A function declaration in OpenAI's form; the type of an optional parameter ends in ``?``."""
    properties = {key: {"type": kind.rstrip("?")} for key, kind in parameters.items()}
    required = [key for key, kind in parameters.items() if not kind.endswith("?")]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


CALCULATOR = declaration("calculator", "Evaluate an expression.", {"expression": "string"})
CLOCK = declaration("clock", "The time now.", {"city": "string?"})
CONVERT = declaration(
    "convert", "Convert units.", {"value": "number", "from": "string", "to": "string"}
)


def evaluate(expression: str) -> str:
    """The value of a sum, product, difference or quotient, or what is wrong with it."""
    if len(expression) > _LONGEST:
        return "error: not an expression"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except DivisionByZero:
        return "error: division by zero"
    except (SyntaxError, ValueError, DecimalException):
        return "error: not an expression"
    return plain(Decimal(f"{value:.12g}"))


def _value(node: ast.expr) -> Decimal:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Decimal(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Div) and not right:
            raise DivisionByZero
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("neither a number nor one of + - * /")


def convert_units(value: Any, start: Any, end: Any) -> str:
    """``value`` of one unit in another, or what is wrong with the question."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "error: value is not a number"
    for name in (start, end):
        if not isinstance(name, str) or name not in BY_NAME:
            return f"error: unknown unit {name}"
    first, second = BY_NAME[start], BY_NAME[end]
    if first.base != second.base:
        return f"error: {first.many} are no {second.many}"
    return plain(converted(Decimal(str(value)), first, second))


def run_tool(name: str, arguments: dict[str, Any], context: Example) -> str:
    """What the tool answers when a model that is given ``context`` calls it.

    A call that the example itself makes gets the example's result. Else the calculator and the unit
    table compute, and any other tool reports an error.
    """
    for position, message in enumerate(context.messages):
        for offset, call in enumerate(calls_of(message), 1):
            if call == {"name": name, "arguments": arguments}:
                return context.messages[position + offset]["content"]
    if name == "calculator":
        return evaluate(str(arguments.get("expression", "")))
    if name == "convert":
        return convert_units(arguments.get("value"), arguments.get("from"), arguments.get("to"))
    return "error: no answer"


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of an assistant's message: name and arguments."""
    calls = message.get("tool_calls") or () if message["role"] == ASSISTANT else ()
    return [call["function"] for call in calls]


_PLACES = ("city", "place", "location", "town", "where", "address")
_PEOPLE = ("name", "person", "who", "contact", "full_name")
_ITEMS = ("item", "product", "article", "thing", "goods")
_VERBS = ("", "get_", "find_", "fetch_", "look_up_", "check_", "query_")
_LOOKUPS = (
    (("weather", "forecast", "current_weather", "sky"), "The weather of a place.", _PLACES),
    (("population", "inhabitants", "people_count"), "How many people live there.", _PLACES),
    (("phone", "phone_number", "number_of"), "A person's phone number.", _PEOPLE),
    (("birthday", "birth_date", "date_of_birth"), "A person's birthday.", _PEOPLE),
    (("stock", "inventory", "items_left"), "How many of an item there are.", _ITEMS),
    (("price", "cost", "price_of"), "What an item costs.", _ITEMS),
)
_OTHERS = (
    (("search", "web_search", "find_pages"), "Search the web.", {"query": "string"}),
    (("send_mail", "mail", "send_message"), "Send a mail.", {"to": "string", "text": "string"}),
    (("read_file", "open_file", "load_file"), "Read a file.", {"path": "string"}),
    (
        ("play", "play_music", "start_song"),
        "Play a song.",
        {"title": "string", "volume": "number?"},
    ),
    (("translate", "translator"), "Translate a text.", {"text": "string", "language": "string"}),
    (("lamp", "set_lamp", "switch_lamp"), "Switch a lamp.", {"room": "string", "on": "boolean"}),
    (("timer", "set_timer", "start_timer"), "Start a timer.", {"minutes": "number"}),
    (("coin", "flip_coin", "random_number"), "A random value.", {}),
)


def lookup(rng: random.Random, topic: int) -> dict[str, Any]:
    """A tool that looks something up by one string, under one of several names."""
    nouns, description, parameters = _LOOKUPS[topic]
    name = rng.choice(_VERBS) + rng.choice(nouns)
    if rng.random() < 0.25:
        head, *rest = name.split("_")
        name = head + "".join(map(str.capitalize, rest))
    return declaration(name, description, {rng.choice(parameters): "string"})


def distractors(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Declarations of tools that nobody needs."""
    drawn = rng.sample(_OTHERS, count)
    return [declaration(rng.choice(names), text, kinds) for names, text, kinds in drawn]
