"""The answers of the tasks, computed anew by other means."""

import calendar
import itertools
import json
import re
from collections import Counter
from datetime import date, datetime, timedelta
from fractions import Fraction

import pytest

from mlx_k3.tasks import (
    FAMILIES,
    Example,
    asked,
)
from mlx_k3.tasks.fact_kinds import KINDS, Kind
from mlx_k3.tasks.wording import CITIES, NAMES, WORDS

from .support.tasks import NUMBER, SIZES, answer_of, drawn, exact, numbers, text_of, training

ARITHMETIC = [family for family in FAMILIES if re.match("addi|subt|multi", family)]


def test_every_step_of_every_calculation_is_true() -> None:
    step = re.compile(rf"({NUMBER}(?: [-+*/] {NUMBER})+) = ({NUMBER})")
    checked = Counter()
    for item in training(15_000, seed=4):
        for message in item.messages:
            spoken = f"{message.get('reasoning_content', '')} {message['content']}"
            for clause in re.split(r"[.,;:]? (?=write|[a-zA-Z])|[.,;:](?: |$)", spoken):
                if equation := step.fullmatch(clause.strip()):
                    checked[item.family] += 1
                    value, shown = exact(equation[1]), Fraction(equation[2])
                    assert value == shown or abs(value - shown) < abs(value) * Fraction(1, 10**11)
    assert set(checked) >= {*ARITHMETIC, "dates", "times", "units", "tools", "conversation"}
    assert checked["addition"] > 1500


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


ONE_WORD = r"[^\s.?]+"
# What only its value tells from another kind: "I'm Tom." and "I'm 19."
SHAPES = {"self": r"[A-Z][a-z]+", "years": r"\d+", "place": r"[a-z ]+"}


def values_told(kind: Kind, about: dict[str, str], text: str) -> list[str]:
    """The values that ``text`` gives for a fact, in their order."""
    told = []
    for template in (*kind.statements, kind.update):
        pattern = re.escape(template.removesuffix(".").format(v="VALUE", **about))
        pattern = pattern.replace("VALUE", f"({SHAPES.get(kind.name, ONE_WORD)})")
        told += [(m.start(), m[1]) for m in re.finditer(rf"(?<!\w){pattern}(?!\w| years)", text)]
    asking = {"what", "who", "how", "which"}  # "What is the password of the cellar?"
    return [value for _, value in sorted(told) if value.lower() not in asking]


@pytest.mark.parametrize("family", ["recall", "recall_short", "recall_medium", "recall_long"])
def test_recall_answers_with_the_last_value(family: str) -> None:
    changed = 0
    for item in drawn(family, 150):
        text = "\n".join(message["content"] for message in asked(item))
        _, name, *words = item.key.split()
        [kind] = [kind for kind in KINDS if kind.name == name]
        about = dict(zip(kind.about, words, strict=False))
        values = values_told(kind, about, text)
        changed += len(set(values)) > 1
        expected = (kind.answer or kind.statements[0]).format(v=values[-1], **about)
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
            for message in item.messages[:-1]:
                assert not values_told(kind, about_it, message["content"])
    assert seen > 100
