"""Tool calls: the right call, read from the declarations, and the answer made of its result.

Owns what is asked, called and answered. The tools themselves are in :mod:`.toolbox`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from . import about, lists, talk, units
from .arithmetic import key as sum_key
from .example import TOOL, Example, Family, Message, Reply, assistant, user
from .toolbox import (
    CALCULATOR,
    CLOCK,
    CONVERT,
    calls_of,
    convert_units,
    distractors,
    evaluate,
    lookup,
)
from .wording import CITIES, name, polite, words

_CALCULATE = (
    "What is {e}?", "Calculate {e}.", "{e}", "How much is {e}?", "Work out {e}.", "Compute {e}.",
    "Use the calculator: {e}", "{e} = ?", "I need the result of {e}.", "What does {e} give?",
)  # fmt: skip
_SIGNS = {
    "+": ("+", "+", "plus"),
    "-": ("-", "-", "minus"),
    "*": ("*", "x", "times", "multiplied by"),
    "/": ("/", "/", "divided by", "over"),
}
_TIME = (
    "What time is it?", "Tell me the time.", "How late is it?", "What is the time now?",
    "Do you know the time?", "What does the clock say?", "The time?", "Can you tell me the time?",
)  # fmt: skip
_TIME_IN = (
    "What time is it in {c}?", "Tell me the time in {c}.", "What is the time in {c} now?",
    "How late is it in {c}?", "Do you know the time in {c}?", "The time in {c}?",
)  # fmt: skip
_CONVERT = (
    "Convert {n} {a} to {b}.", "How many {b} are {n} {a}?", "What is {n} {a} in {b}?",
    "{n} {a} in {b}", "How much is {n} {a} in {b}?", "Change {n} {a} into {b}.",
)  # fmt: skip
_LOOK_UP = (
    (
        ("How is the weather in {x}?", "What is the weather in {x}?", "Weather in {x}?",
         "Is the weather good in {x}?", "Tell me the weather in {x}."),
        "The weather in {x}: {r}.",
    ),
    (
        ("How many people live in {x}?", "What is the population of {x}?", "Population of {x}?",
         "How many inhabitants does {x} have?"),
        "The population of {x}: {r}.",
    ),
    (
        ("What is the phone number of {x}?", "How can I call {x}?", "I need {x}'s phone number.",
         "Find the number of {x}."),
        "The phone number of {x}: {r}.",
    ),
    (
        ("When is {x}'s birthday?", "When was {x} born?", "What is the birthday of {x}?",
         "On which day is {x}'s birthday?"),
        "The birthday of {x}: {r}.",
    ),
    (
        ("How many {x} are in stock?", "Do we have {x}?", "Check the stock of {x}.",
         "How many {x} are left?"),
        "The stock of {x}: {r}.",
    ),
    (
        ("What is the price of {x}?", "What do {x} cost?", "How much are {x}?",
         "Find the price of {x}."),
        "The price of {x}: {r}.",
    ),
)  # fmt: skip
_ITEMS = words("lamps chairs tables coats clocks tents mirrors desks kettles ropes gloves boots")
_SKIES = words("sunny cloudy rainy windy foggy snowy stormy clear")
_MONTHS = words("January March April May June July August October November December")


class _Task(NamedTuple):
    """One need for a tool: the question, the call, its result, and the answer."""

    text: str
    tool: dict[str, Any]
    arguments: dict[str, Any]
    result: str
    answer: str
    key: str

    @property
    def call(self) -> dict[str, Any]:
        function = {"name": self.tool["function"]["name"], "arguments": self.arguments}
        return {"type": "function", "function": function}

    @property
    def reason(self) -> str:
        values = ", ".join(str(value) for value in self.arguments.values())
        tool = self.tool["function"]["name"]
        return f"I call {tool} with {values}." if values else f"I call {tool}."


def _calculation(rng: random.Random) -> _Task:
    sign = rng.choice("++--**/")
    a, b = rng.randrange(10 ** rng.randrange(1, 6)), rng.randrange(10 ** rng.randrange(1, 5))
    if sign == "/":
        b = rng.randrange(2, 50) if rng.random() < 0.9 else 0
        a = b * rng.randrange(1, 500) if b else a
    expression = f"{a} {sign} {b}"
    result = evaluate(expression)
    shown = f"{a} {rng.choice(_SIGNS[sign])} {b}"
    if rng.random() < 0.2:
        shown = f"{a}{sign}{b}"
    text = polite(rng, rng.choice(_CALCULATE).format(e=shown))
    answer = f"{expression} = {result}."
    if result.startswith("error"):
        answer = f"The tool reports an {result}."
    key = sum_key(sign, a, b)
    return _Task(text, CALCULATOR, {"expression": expression}, result, answer, key)


def _clock(rng: random.Random) -> _Task:
    time = f"{rng.randrange(24)}:{rng.randrange(60):02}"
    if rng.random() < 0.4:
        text, arguments, answer = rng.choice(_TIME), {}, f"It is {time}."
        key = f"clock {text} {time}"
    else:
        city = rng.choice(CITIES)
        text, arguments = rng.choice(_TIME_IN).format(c=city), {"city": city}
        answer, key = f"It is {time} in {city}.", f"clock {city} {time}"
    return _Task(polite(rng, text), CLOCK, arguments, time, answer, key)


def _conversion(rng: random.Random) -> _Task:
    start = rng.choice(units.UNITS)
    end = rng.choice([u for u in units.UNITS if u.base == start.base and u is not start] or [start])
    if rng.random() < 0.05:  # Nonsense: the tool says so.
        end = rng.choice([u for u in units.UNITS if u.base != start.base])
    n = rng.randrange(2, 1000)
    value: int | float = n / 10 if rng.random() < 0.3 and n % 10 else n
    result = convert_units(value, start.many, end.many)
    text = rng.choice(_CONVERT).format(n=value, a=start.many, b=end.many)
    answer = f"{value} {start.many} = {result} {end.many}."
    if result.startswith("error"):
        answer = f"The tool reports an {result}."
    arguments = {"value": value, "from": start.many, "to": end.many}
    key = f"convert {value} {start.symbol} {end.symbol}"
    return _Task(polite(rng, text), CONVERT, arguments, result, answer, key)


def _look_up(rng: random.Random) -> _Task:
    topic = rng.randrange(len(_LOOK_UP))
    subject = name(rng) if topic in (2, 3) else rng.choice(_ITEMS if topic > 3 else CITIES)
    results = (
        f"{rng.choice(_SKIES)}, {rng.randrange(-9, 36)} degrees",
        str(rng.randrange(1000, 3_000_000)),
        f"0{rng.randrange(10, 99)} {rng.randrange(10_000, 999_999)}",
        f"{rng.randrange(1, 31)} {rng.choice(_MONTHS)}",
        str(rng.randrange(500)),
        f"{rng.randrange(1, 900)} coins",
    )
    result = results[topic]
    texts, answer = _LOOK_UP[topic]
    answer = answer.format(x=subject, r=result)
    if rng.random() < 0.05:
        result = rng.choice(("error: not found", "error: no connection", "error: timeout"))
        answer = f"The tool reports an {result}."
    tool = lookup(rng, topic)
    [parameter] = tool["function"]["parameters"]["properties"]
    text = rng.choice(texts).format(x=subject)
    key = f"look up {topic} {subject} {result}"
    return _Task(text, tool, {parameter: subject}, result, answer, key)


_TASKS = (_calculation, _calculation, _calculation, _clock, _conversion, _conversion, _look_up)


def _draw(rng: random.Random, others: Sequence[_Task] = ()) -> _Task:
    """A need that is none of ``others`` and leaves no choice between two tools."""
    while True:
        task = rng.choice(_TASKS)(rng)
        if not any(_clash(task, other) for other in others):
            return task


def _clash(one: _Task, other: _Task) -> bool:
    first, second = one.tool["function"], other.tool["function"]
    if first == second:
        return one.arguments == other.arguments
    return first["name"] == second["name"] or first["description"] == second["description"]


def _steps(tasks: list[_Task]) -> list[Message]:
    """The calls, their results, and the answer."""
    call = assistant(" ".join(task.reason for task in tasks), "")
    call["tool_calls"] = [task.call for task in tasks]
    results = [{"role": TOOL, "content": task.result} for task in tasks]
    came = "; ".join(task.result for task in tasks)
    answer = " ".join(task.answer for task in tasks)
    return [call, *results, assistant(f"The result: {came}.", answer)]


def _declared(rng: random.Random, tasks: list[_Task], most: int = 3) -> list[dict[str, Any]]:
    """The tools of ``tasks`` among others, in any order, each name once."""
    tools = {task.tool["function"]["name"]: task.tool for task in tasks}
    others = distractors(rng, rng.randrange(most))
    others += [tool for tool in (CALCULATOR, CLOCK, CONVERT) if rng.random() < 0.25]
    for tool in others:
        tools.setdefault(tool["function"]["name"], tool)
    declared = list(tools.values())
    rng.shuffle(declared)
    return declared


def _parallel(rng: random.Random) -> tuple[str, list[_Task]]:
    """Two needs in one message, in the order of the calls."""
    first = _draw(rng)
    second = _draw(rng, [first])
    joint = rng.choice((" And: ", " Also: ", "\n", " Then: "))
    return first.text + joint + second.text, [first, second]


def _make_one(rng: random.Random) -> Example:
    if rng.random() < 0.2:
        text, tasks = _parallel(rng)
    else:
        tasks = [_draw(rng)]
        text = tasks[0].text
    key = "\n".join(task.key for task in tasks)
    return Example("tools", [user(text), *_steps(tasks)], _declared(rng, tasks), key=key)


_WITHOUT: tuple[Callable[[random.Random], Example], ...] = (
    *(family.make for family in talk.FAMILIES),
    *(family.make for family in about.FAMILIES),
    *(family.make for family in lists.FAMILIES),
)


def _make_none(rng: random.Random) -> Example:
    """Tools are there, and nothing needs them."""
    plain = rng.choice(_WITHOUT)(rng)
    return replace(plain, family="tools", tools=_declared(rng, [], 4) or [CALCULATOR])


def _make_tools(rng: random.Random) -> Example:
    return _make_none(rng) if rng.random() < 0.15 else _make_one(rng)


def _make_turns(rng: random.Random) -> Example:
    """Two or three questions, one after the other, most of which need a tool."""
    messages: list[Message] = []
    tasks: list[_Task] = []
    keys = []
    for _ in range(rng.randrange(1, 3)):
        if rng.random() < 0.25:
            plain = rng.choice(_WITHOUT)(rng)
            messages += plain.messages
            keys.append(plain.key)
        else:
            tasks.append(_draw(rng, tasks))
            messages += [user(tasks[-1].text), *_steps(tasks[-1:])]
    tasks.append(_draw(rng, tasks))
    messages += [user(tasks[-1].text), *_steps(tasks[-1:])]
    keys += [task.key for task in tasks]
    return Example("tools_turns", messages, _declared(rng, tasks, 2), key="\n".join(keys))


def right_calls(example: Example, reply: Reply) -> bool:
    """Whether the calls since the last question, in order, and the final text are the example's."""
    last = max(i for i, message in enumerate(example.messages) if message["role"] == "user")
    expected = [call for message in example.messages[last:] for call in calls_of(message)]
    text = example.messages[-1]["content"]
    return reply.content.strip() == text and list(reply.tool_calls) == expected


FAMILIES = (
    Family("tools", 12, _make_tools, right_calls),
    Family("tools_turns", 3, _make_turns, right_calls),
)
