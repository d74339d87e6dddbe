"""Answers in JSON: the values of a sentence under the names that are asked for.

Owns the records, how a sentence tells them, and the schemas.
"""

import json
import random
from typing import Any

from .example import Example, Family, Reply, assistant, user
from .wording import CITIES, COLOURS, NAMES, WORDS, name, words

_JOBS = words("baker painter teacher doctor farmer pilot nurse singer writer lawyer cook judge")
_LEAD = (
    "Extract {keys}: {text}", "{text} Give me {keys} as JSON.", "Return {keys}. {text}",
    "Read this and return {keys} as JSON.\n{text}", "JSON with {keys}, please: {text}",
    "{text}\nWhat are {keys}?", "From this text take {keys}: {text}",
)  # fmt: skip

# A subject with fields: name -> (type, clause, value); the subject's own field comes first.
_FIELDS: dict[str, tuple[str, str]] = {
    "age": ("integer", "is {} years old"),
    "city": ("string", "lives in {}"),
    "job": ("string", "works as a {}"),
    "colour": ("string", "likes the colour {}"),
    "room": ("integer", "sits in room {}"),
    "pet": ("string", "has a pet called {}"),
    "word": ("string", "uses the password {}"),
    "member": ("boolean", "{} a member"),
}


def _value(rng: random.Random, field: str) -> Any:
    if field == "age":
        return rng.randrange(5, 99)
    if field == "room":
        return rng.randrange(1, 400)
    if field == "member":
        return rng.random() < 0.5
    pools = {"city": CITIES, "job": _JOBS, "colour": COLOURS, "pet": NAMES, "word": WORDS}
    return rng.choice(pools[field])


def _sentence(record: dict[str, Any]) -> str:
    """``Mira is 34 years old, lives in Oslo and works as a baker.``"""
    clauses = []
    for field, value in record.items():
        if field != "name":
            shown = ("is" if value else "is not") if isinstance(value, bool) else value
            clauses.append(_FIELDS[field][1].format(shown))
    *first, last = clauses
    told = f"{', '.join(first)} and {last}" if first else last
    return f"{record['name']} {told}."


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _make_json(rng: random.Random) -> Example:
    fields = rng.sample(list(_FIELDS), rng.randrange(1, 5))
    record = {"name": name(rng), **{field: _value(rng, field) for field in fields}}
    wanted = list(record)
    if len(wanted) > 2 and rng.random() < 0.4:
        wanted = rng.sample(wanted, rng.randrange(1, len(wanted)))
    text = _sentence(record)
    wanted_format: dict[str, Any] = {"type": "json_object"}
    if rng.random() < 0.6:
        # The declaration shows a schema's names in alphabetical order; the answer follows it.
        wanted.sort()
        kinds = {"name": "string"} | {field: kind for field, (kind, _) in _FIELDS.items()}
        properties = {field: {"type": kinds[field]} for field in wanted}
        schema = {"type": "object", "properties": properties, "required": wanted}
        wanted_format = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
        if rng.random() < 0.5:  # The schema alone says what is wanted.
            asked = text
        else:
            asked = rng.choice(_LEAD).format(keys=_listed(wanted), text=text)
    else:
        asked = rng.choice(_LEAD).format(keys=_listed(wanted), text=text)
    answer = json.dumps({field: record[field] for field in wanted})
    messages = [user(asked), assistant(f"The fields: {', '.join(wanted)}.", answer)]
    key = f"json {text}"
    return Example("json", messages, response_format=wanted_format, key=key)


def same_json(example: Example, reply: Reply) -> bool:
    """Whether the reply is JSON, and nothing else, with the example's names and values."""
    try:
        value = json.loads(reply.content)
    except ValueError:
        return False
    return value == json.loads(example.messages[-1]["content"]) and not reply.tool_calls


FAMILIES = (Family("json", 4, _make_json, same_json),)
