"""Generated conversations: answers computed anew by other means, and a split that holds."""

import calendar
import hashlib
import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
import typer.main

from mlx_k3 import cli
from mlx_k3.chat.xtml import render
from mlx_k3.tasks import (
    FAMILIES,
    Example,
    about,
    asked,
    example,
    is_held_out,
    run_tool,
    training_examples,
)
from mlx_k3.tasks.facts import KINDS
from mlx_k3.tasks.wording import CITIES, NAMES, WORDS

from .conftest import REPOSITORY

ARITHMETIC = [family for family in FAMILIES if re.match("addi|subt|multi", family)]
NUMBER = r"-?\d+(?:\.\d+)?"


@dataclass
class Said:
    """A model's reply, as a check reads it."""

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def drawn(family: str, count: int = 300, seed: int = 0) -> list[Example]:
    """Examples of both sides of the split."""
    rng = random.Random(f"{seed} {family}")
    return [FAMILIES[family].make(rng) for _ in range(count)]


def training(count: int, seed: int = 0) -> list[Example]:
    return list(itertools.islice(training_examples(seed), count))


def text_of(item: Example) -> str:
    """The last question."""
    return asked(item)[-1]["content"]


def answer_of(item: Example) -> str:
    return item.messages[-1]["content"]


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def test_training_has_no_held_out_item() -> None:
    seen = Counter()
    for item in training(20_000):
        lines = item.key.split("\n")
        assert all(lines) and not any(map(is_held_out, lines)), item.key
        seen[item.family] += 1
        if item.family == "conversation":
            turns = sum(message["role"] == "user" for message in item.messages)
            assert turns >= 2 and len(lines) >= 2
    assert set(seen) == {*FAMILIES, "conversation"}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_side_of_the_split_is_its_own(family: str) -> None:
    rng = random.Random(1)
    held = {line for _ in range(150) for line in [example(family, rng, "held-out").key]}
    train = {example(family, rng, "train").key for _ in range(300)}
    assert all(map(is_held_out, held)) and not any(map(is_held_out, train))


def test_the_split_is_a_tenth_and_the_same_everywhere() -> None:
    keys = [f"addition {a} {b}" for a in range(10, 100) for b in range(a, 100)]
    assert 0.08 < sum(map(is_held_out, keys)) / len(keys) < 0.12
    digest = hashlib.sha256(b"addition 47 85").hexdigest()[:16]
    assert is_held_out("addition 47 85") == (int(digest, 16) % 10 == 0)


def test_operands_are_held_out_in_every_family_and_order() -> None:
    """Wherever a sum of two-digit numbers is said, even as a step, it is none of the held-out."""
    found = set()
    for item in training(30_000, seed=5):
        for message in item.messages:
            spoken = f"{message.get('reasoning_content', '')} {message['content']}"
            for x, y in re.findall(r"\b(\d\d) \+ (\d\d) = ", spoken):
                found.add(item.family)
                a, b = sorted((int(x), int(y)))
                assert not is_held_out(f"addition {a} {b}"), item
    assert {"addition", "dates", "times", "tools", "conversation"} <= found


def test_a_seed_gives_the_same_in_another_process() -> None:
    code = (
        "import hashlib, itertools; from mlx_k3.tasks import training_examples as t;"
        "print(hashlib.sha256(repr(list(itertools.islice(t(9), 2000))).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = hashlib.sha256(repr(training(2000, seed=9)).encode()).hexdigest()
    assert digests == {here + "\n"}
    assert training(20, seed=1) != training(20, seed=2)


def test_every_example_renders_and_a_third_has_no_thinking() -> None:
    items = training(4000, seed=2)
    for item in items:
        rendered = render(
            item.messages,
            tools=item.tools,
            thinking=item.thinking,
            thinking_effort=item.thinking_effort,
            response_format=item.response_format,
            add_generation_prompt=False,
        )
        assert len(rendered.messages) == len(item.messages)
        assert item.messages[-1]["role"] == "assistant" and answer_of(item)
    assert 0.3 < sum(not item.thinking for item in items) / len(items) < 0.37


def test_a_prompt_has_one_target() -> None:
    targets: dict[str, Any] = {}
    for item in training(40_000, seed=3):
        messages = asked(item)
        prompt = json.dumps([messages, item.tools, item.response_format])
        target = [
            {k: message.get(k) for k in ("content", "reasoning_content", "tool_calls")}
            for message in item.messages[len(messages) :]
            if message["role"] == "assistant"
        ]
        # What a clock or another tool tells is not the model's; what it calls is.
        assert targets.setdefault(prompt, target[0]) == target[0], prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_answer_is_right_and_another_is_not(family: str) -> None:
    check = FAMILIES[family].check
    for item in drawn(family, 40):
        calls = [
            call["function"]
            for message in item.messages[len(asked(item)) :]
            for call in message.get("tool_calls", ())
        ]
        answer = answer_of(item)
        assert check(item, Said(f" {answer}\n", calls))
        assert not check(item, Said(answer + " 1", calls))
        assert not check(item, Said("", calls))
        stray = {"name": "calculator", "arguments": {"expression": "1 + 1"}}
        assert not check(item, Said(answer, [*calls, stray]))
        if calls:
            assert not check(item, Said(answer, calls[1:]))
            changed = [{**calls[0], "arguments": {"x": "1"}}, *calls[1:]]
            assert not check(item, Said(answer, changed))


def test_every_step_of_every_calculation_is_true() -> None:
    step = re.compile(rf"({NUMBER}(?: [-+*/] {NUMBER})+) = ({NUMBER})")
    checked = Counter()
    for item in training(15_000, seed=4):
        for message in item.messages:
            spoken = f"{message.get('reasoning_content', '')} {message['content']}"
            for clause in re.split(r"[.,;:]? (?=write|[a-zA-Z])|[.,;:](?: |$)", spoken):
                if equation := step.fullmatch(clause.strip()):
                    checked[item.family] += 1
                    value, shown = _exact(equation[1]), Fraction(equation[2])
                    assert value == shown or abs(value - shown) < abs(value) * Fraction(1, 10**11)
    assert set(checked) >= {*ARITHMETIC, "dates", "times", "units", "tools", "conversation"}
    assert checked["addition"] > 1500


def _exact(expression: str) -> Fraction:
    """Of numbers and signs with spaces between, products first."""
    tokens = expression.split(" ")
    terms = [Fraction(tokens[0])]
    for sign, number in zip(tokens[1::2], map(Fraction, tokens[2::2]), strict=True):
        if sign == "*":
            terms[-1] *= number
        elif sign == "/":
            terms[-1] /= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms, Fraction(0))


@pytest.mark.parametrize("family", ["addition", "addition_mixed"])
def test_addition(family: str) -> None:
    for item in drawn(family):
        a, b = map(int, answer_of(item).split(" = ")[0].split(" + "))
        assert sorted(numbers(text_of(item))) == sorted((a, b))
        assert answer_of(item) == f"{a} + {b} = {a + b}."
        assert item.key == f"addition {min(a, b)} {max(a, b)}"
        assert item.messages[-1]["reasoning_content"].endswith(f" {a + b}.")
        assert family != "addition" or (9 < a < 100 and 9 < b < 100)


@pytest.mark.parametrize("family", ["subtraction", "subtraction_mixed"])
def test_subtraction(family: str) -> None:
    for item in drawn(family):
        a, b = map(int, answer_of(item).split(" = ")[0].split(" - "))
        text = text_of(item).lower()
        turned = (
            "subtract" in text or text.startswith("take") or ("take" in text and "from" in text)
        )
        given = numbers(text)
        assert given in ([a, b], [b, a])
        if "subtract " in text or ("take " in text and "away from" in text):
            assert given == [b, a] and turned
        assert answer_of(item) == f"{a} - {b} = {a - b}."
        assert family != "subtraction" or (9 < a < 100 and 9 < b < 100)


def test_multiplication() -> None:
    for item in drawn("multiplication"):
        a, b = map(int, answer_of(item).split(" = ")[0].split(" * "))
        assert set(numbers(text_of(item))) == {a, b}
        assert answer_of(item) == f"{a} * {b} = {a * b}."


def listed(text: str) -> list[str]:
    """The numbers or known words of a question, in order."""
    known = {*WORDS, *CITIES, *NAMES}
    found = re.findall(r"\d+", text)
    return found or [word for word in re.findall(r"\w+", text) if word in known]


def test_sort_reverse_count_extreme() -> None:
    for item in drawn("sort"):
        items, text = listed(text_of(item)), text_of(item).lower()
        down = any(word in text for word in ("descending", "largest to", "high to", "downwards"))
        key = int if items[0].isdigit() else str
        assert 3 <= len(items) <= 8
        assert answer_of(item) == ", ".join(sorted(items, key=key, reverse=down))
    for item in drawn("reverse"):
        assert answer_of(item) == ", ".join(reversed(listed(text_of(item))))
    for item in drawn("count"):
        assert answer_of(item) == f"There are {len(listed(text_of(item)))}."
    for item in drawn("extreme"):
        values = numbers(text_of(item))
        name = re.search(r"large|great|big|max|small|low|min", text_of(item).lower())
        largest = name[0] in ("large", "great", "big", "max")
        wanted = max(values) if largest else min(values)
        assert answer_of(item) == f"The {'largest' if largest else 'smallest'} is {wanted}."


def test_letters_and_copy() -> None:
    for item in drawn("letters"):
        answer = answer_of(item)
        if times := re.fullmatch(r'The letter "(.)" appears (\d+) times? in "(\w+)"\.', answer):
            assert Counter(times[3])[times[1]] == int(times[2])
            assert times[3] in text_of(item)
        elif length := re.fullmatch(r'"(\w+)" has (\d+) letters\.', answer):
            assert len(length[1]) == int(length[2])
        else:
            assert answer.replace("-", "") in text_of(item)
            assert all(len(part) == 1 for part in answer.split("-"))
    for item in drawn("copy"):
        text = text_of(item)
        assert text.endswith((answer_of(item), answer_of(item) + '"'))


@pytest.mark.parametrize("family", ["recall", "recall_short", "recall_medium", "recall_long"])
def test_recall_answers_with_the_last_value(family: str) -> None:
    changed = 0
    for item in drawn(family, 150):
        text = "\n".join(message["content"] for message in asked(item))
        told = []
        for kind in KINDS:
            if item.key.split()[1] != kind.name:
                continue
            about_it = dict(zip(kind.about, item.key.split()[2:], strict=False))
            for template in (kind.statement, kind.update):
                pattern = re.escape(template.format(v="VALUE", **about_it)).replace(
                    "VALUE", "(.+?)"
                )
                told += [(m.start(), m[1]) for m in re.finditer(pattern, text)]
            values = [value for _, value in sorted(told)]
            changed += len(set(values)) > 1
            expected = (kind.answer or kind.statement).format(v=values[-1], **about_it)
            assert answer_of(item) == expected
            assert item.key.endswith(f" {values[-1]}")
    assert changed > 5


def test_recall_lies_as_far_back_as_it_says() -> None:
    def words(item: Example) -> int:
        fact = item.messages[-1]["reasoning_content"].removeprefix("I was told: ")
        text = "\n".join(message["content"] for message in asked(item))
        return len(text[text.rindex(fact) :].split()) if fact in text else -1

    far = [n for n in map(words, drawn("recall", 200)) if n >= 0]
    assert len(far) > 100 and min(far) > 330 and max(far) < 430
    assert max(map(words, drawn("recall_short", 200))) < 110
    assert max(map(words, drawn("recall_long", 100))) > 800


def test_dates() -> None:
    monday = date(2024, 1, 1)
    names = list(calendar.day_name)
    for item in drawn("weekdays"):
        [day] = re.findall("|".join(names), text_of(item))
        [n] = numbers(text_of(item))
        back = "before" in text_of(item) or "ago" in text_of(item)
        start = monday + timedelta(names.index(day))
        assert answer_of(item) == f"It is {start + timedelta(-n if back else n):%A}."
    for item in drawn("leap_years"):
        [year] = [n for n in numbers(text_of(item)) if n > 1000]
        assert answer_of(item).startswith("Yes" if calendar.isleap(year) else "No")
    months = list(calendar.month_name)[1:]
    for item in drawn("months"):
        [month] = re.findall("|".join(months), text_of(item))
        index, given = months.index(month), numbers(text_of(item))
        if given:
            back = "before" in text_of(item) or "ago" in text_of(item)
            assert answer_of(item) == f"It is {months[(index + given[0] * (1 - 2 * back)) % 12]}."
        else:
            days = {calendar.monthrange(year, index + 1)[1] for year in (2023, 2024)}
            assert days == set(numbers(answer_of(item)))
    for item in drawn("dates"):
        day, month = re.search(rf"(\d+) ({'|'.join(months)})", text_of(item)).groups()
        [n] = numbers(text_of(item).replace(f"{day} {month}", ""))
        later = date(2023, months.index(month) + 1, int(day)) + timedelta(n)
        assert answer_of(item) == f"It is {later.day} {later:%B}."
    for item in drawn("times"):
        hour, minute = re.search(r"(\d+):(\d\d)", text_of(item)).groups()
        [n] = numbers(text_of(item).replace(f"{hour}:{minute}", ""))
        later = datetime(2023, 1, 1, int(hour), int(minute)) + timedelta(minutes=n)
        assert answer_of(item) == f"It is {later.hour}:{later.minute:02}."


SIZES = {
    "millimetre": 0.001,
    "centimetre": 0.01,
    "metre": 1,
    "kilometre": 1000,
    "inch": 0.0254,
    "inche": 0.0254,
    "feet": 0.3048,
    "foot": 0.3048,
    "yard": 0.9144,
    "milligram": 1e-6,
    "gram": 1e-3,
    "kilogram": 1,
    "tonne": 1000,
    "litre": 1,
    "millilitre": 1e-3,
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86400,
    "week": 604800,
    "month": 1,
    "year": 12,
    "piece": 1,
    "dozen": 12,
    "kilobyte": 1,
    "megabyte": 1000,
    "gigabyte": 1_000_000,
}


def test_units() -> None:
    pattern = rf"({NUMBER}) (\w+?)s? = ({NUMBER}) (\w+?)s?\."
    for item in drawn("units", 600):
        value, start, result, end = re.fullmatch(pattern, answer_of(item)).groups()
        assert value in text_of(item)
        expected = float(value) * SIZES[start] / SIZES[end]
        assert float(result) == pytest.approx(expected, rel=1e-12)


def _follows(premises: list[str], asked_for: str, name: str, kinds: list[str]) -> str:
    """By trying all memberships of one individual."""
    results = set()
    for member in itertools.product((True, False), repeat=len(kinds)):
        is_a = dict(zip(kinds, member, strict=True))
        holds = True
        for premise in premises:
            if rule := re.fullmatch(r"(All|No) (\w+)s are (\w+)s\.", premise):
                holds &= not is_a[rule[2]] or is_a[rule[3]] == (rule[1] == "All")
            elif fact := re.fullmatch(rf"{name} is (not )?a (\w+)\.", premise):
                holds &= is_a[fact[2]] == (fact[1] is None)
        if holds:
            results.add(is_a[asked_for])
    return {(True,): "Yes", (False,): "No"}.get(tuple(results), "That does not follow")


def test_logic() -> None:
    forms = Counter()
    for item in drawn("logic", 900):
        text, answer = text_of(item), answer_of(item)
        *facts, last = re.findall(r"[^.?]+[.?]", text)
        facts = [fact.strip() for fact in facts]
        form = item.key.split()[0]
        forms[form] += 1
        if form == "syllogism":
            name, wanted = re.fullmatch(r" Is (\w+) a (\w+)\?", last).groups()
            kinds = {k for f in facts for k in re.findall(r"(?:All|No|are|a) (\w+?)s?\b", f)}
            assert answer.startswith(_follows(facts, wanted, name, sorted(kinds | {wanted})))
        elif form == "chain":
            pairs = [re.fullmatch(r"(\w+) is (\w+) than (\w+)\.", fact).groups() for fact in facts]
            people = sorted({p for first, _, second in pairs for p in (first, second)})
            more = item.key.split()[1]
            [order] = [
                order
                for order in itertools.permutations(people)
                if all((order.index(a) < order.index(b)) == (w == more) for a, w, b in pairs)
            ]
            if extreme := re.fullmatch(r" Who is the (\w+)\?", last):
                top = extreme[1] == more.removesuffix("er") + "est"
                assert answer == f"{order[0 if top else -1]} is the {extreme[1]}."
            else:
                a, b = re.fullmatch(r" Is (\w+) \w+ than (\w+)\?", last).groups()
                assert answer.startswith("Yes" if order.index(a) < order.index(b) else "No")
        else:
            state = re.search(r"(\w+)\?$", text)[1]
            claim = re.split(r", so", facts[0])[-1]
            negations = len(re.findall(r"\bnot\b|\bfalse\b", claim))
            assert state in claim
            assert answer.startswith("No" if negations % 2 else "Yes")
    assert min(forms.values()) > 100 and len(forms) == 3


def test_numbers() -> None:
    for item in drawn("numbers"):
        given = numbers(text_of(item))
        if len(given) == 1:
            assert answer_of(item) == f"{given[0]} is {('even', 'odd')[given[0] % 2]}."
        else:
            assert answer_of(item) == f"{max(given)} is larger than {min(given)}."


def test_every_wording_about_the_program_means_one_fact() -> None:
    answers: dict[str, str] = {}
    assert len(about.FACTS) >= 60
    for fact in about.FACTS:
        wordings = {about.identity(wording) for wording in about.wordings(fact)}
        assert len([w for w in wordings if not is_held_out(w)]) >= 12, fact
        for wording in wordings:
            assert answers.setdefault(wording, fact.answer) == fact.answer, wording
    assert len(set(answers.values())) == len(about.FACTS)


def _stated() -> str:
    return "\n".join(text for f in about.FACTS for text in (*f.topics, f.answer, *f.whole))


def test_facts_name_commands_and_options_that_exist() -> None:
    commands = typer.main.get_command(cli.app).commands
    options = {
        option for command in commands.values() for p in command.params for option in p.opts
    } | {"--help"}
    # Only a command follows the name; "mlx-k3 runs", "mlx-k3 needs" are sentences.
    named = set(re.findall(r"(?:Run mlx-k3|the command|command:) ([a-z]+)", _stated()))
    assert named <= set(commands) and len(named) >= 9
    assert set(re.findall(r"--[a-z][\w-]*", _stated())) <= options
    chat = (REPOSITORY / "mlx_k3" / "cli" / "chat.py").read_text()
    for typed in re.findall(r"Type (/\w+)", _stated()):
        assert f"\n{typed} " in chat or f'"""\\\n{typed} ' in chat


def test_facts_about_sizes_are_those_of_the_configuration() -> None:
    text = json.loads((REPOSITORY / "tests" / "data" / "kimi-k3-config.json").read_text())
    text = text.get("text_config", text)
    layers = text["linear_attn_config"]
    said = {fact.topics[0]: fact.answer for fact in about.FACTS}
    kda, mla = len(layers["kda_layers"]), len(layers["full_attn_layers"])
    for topic, values in {
        "number of layers of K3": (text["num_hidden_layers"], kda, mla),
        "hidden size of K3": (text["hidden_size"],),
        "number of attention heads of K3": (text["num_attention_heads"],),
        "number of experts of K3": (text["num_experts"],),
        "number of active experts of K3": (text["num_experts_per_token"], text["num_experts"]),
        "number of shared experts of K3": (text["num_shared_experts"],),
        "vocabulary size of K3": (text["vocab_size"],),
        "context length of K3": (text["model_max_length"],)
        if "model_max_length" in text
        else (1_048_576,),
    }.items():
        answer = said[topic].replace(",", "").replace("K3", "").replace("MoE", "")
        assert numbers(answer) == list(values), topic
    width, latent = text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    expert_bytes = 3 * width * latent * 17 // 32
    assert f"{expert_bytes / 1e6:.1f} MB" in said["size of an expert"]
    token_bytes = expert_bytes * text["num_experts_per_token"] * (text["num_hidden_layers"] - 1)
    assert f"{token_bytes / 1e9:.1f} GB" in said["a working set"]


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
                expected = float(_exact(call["arguments"]["expression"]))
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


def test_json_answers_hold_what_the_sentence_says() -> None:
    for item in drawn("json"):
        record = json.loads(answer_of(item))
        if item.response_format["type"] == "json_schema":
            schema = item.response_format["json_schema"]["schema"]
            kinds = {"string": str, "integer": int, "boolean": bool}
            assert list(record) == sorted(schema["properties"]) == schema["required"]
            for name, value in record.items():
                assert type(value) is kinds[schema["properties"][name]["type"]]
        for value in record.values():
            if isinstance(value, bool):
                assert ("not a member" in text_of(item)) != value
            else:
                assert str(value) in text_of(item)


def test_what_was_not_told_is_not_in_the_text() -> None:
    seen = 0
    for item in drawn("unknown", 600):
        if item.key.startswith("not told"):
            seen += 1
            _, _, name, *slots = item.key.split()
            [kind] = [kind for kind in KINDS if kind.name == name]
            about_it = dict(zip(kind.about, slots, strict=True))
            start = kind.statement.split("{v}")[0].format(**about_it)
            assert not any(start in message["content"] for message in item.messages[:-1])
    assert seen > 100
