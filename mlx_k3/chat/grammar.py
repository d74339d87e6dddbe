"""What a reply may be, as a grammar for llguidance (its dialect of Lark).

Owns the rules: a reply's channels in order, JSON in the response, calls of declared tools with the
arguments of their schemas. Tags are spelled as the very ids that a rendered conversation has; the
thinking and plain text stay free. Knows no model and no sampling.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import K3Error, UnsupportedError
from . import xtml

Encode = Callable[[Iterable[xtml.Segment]], list[int]]

# One way to set blanks, as Python writes JSON: else a model that is sampled may go on with them.
_JSON_OPTIONS = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
}
_INDEX = "/[1-9][0-9]{0,2}/"
_TEXT = r"/(.|\n)*/"

_NOTHING = '""'

# JSON's types, but strings: a pattern is one of JSON text, and here a string stands as it is.
_KINDS = {
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "object": "object",
    "array": "array",
    "null": "null",
}
# What a schema of a tool's parameters may have for its arguments to be written one by one.
_PLAIN_KEYS = {"type", "properties", "required", "additionalProperties"}
_NOTES = {"title", "description", "default", "examples", "$schema", "$comment", "x-guidance"}
# Beside these, ``properties`` is not the whole of what an object may have.
_OPEN_KEYS = {"additionalProperties", "patternProperties", "unevaluatedProperties"} | {
    "allOf", "anyOf", "oneOf", "$ref"
}  # fmt: skip
_STRING_KEYS = {"type", "enum", "const"}


@dataclass(frozen=True)
class Wanted:
    """What a reply has to be.

    ``schema`` is that of the response, None for any text. ``calls`` says whether ``tools``
    (functions: name and parameters) may or must be called, once only if not ``parallel``.
    """

    schema: dict[str, Any] | None
    calls: Literal["never", "may", "must"]
    tools: list[dict[str, Any]]
    parallel: bool = True


def wanted(
    response_format: dict[str, Any] | str | None,
    tools: list[dict[str, Any]] | None,
    tool_choice: dict[str, Any] | str | None,
    parallel: bool = True,
) -> Wanted | None:
    """What these settings, in OpenAI's form, ask for; None if nothing has to be enforced.

    Raises:
        K3Error: a tool is chosen that is not declared, or a format that does not exist.
    """
    functions = [tool.get("function", tool) for tool in tools or ()]
    schema = response_schema(response_format)
    calls: Literal["never", "may", "must"] = "may" if functions else "never"
    if isinstance(tool_choice, dict):
        name = tool_choice.get("function", tool_choice).get("name")
        functions = [function for function in functions if function.get("name") == name]
        if not functions:
            raise K3Error(f"tool_choice names {name!r}, which is not among the tools")
        calls = "must"
    elif tool_choice == "required":
        if not functions:
            raise K3Error("tool_choice is required, but there are no tools")
        calls = "must"
    elif tool_choice == "none":
        calls = "never"
    strict = any(function.get("strict") for function in functions)
    as_it_likes = calls == "may" and parallel and not strict
    if schema is None and (as_it_likes or not functions):
        return None
    return Wanted(schema, calls, functions, parallel)


def response_schema(response_format: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The JSON schema that a response format stands for; None where any text will do.

    Raises:
        K3Error: there is no such format, or it has no schema.
    """
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise UnsupportedError(
            f"response_format {kind!r}; there are text, json_object and json_schema"
        )
    described = response_format.get("json_schema") if isinstance(response_format, dict) else None
    schema = described.get("schema", described) if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise K3Error("response_format json_schema has no schema")
    return schema


def reply_grammar(wanted: Wanted, thinking: bool, encode: Encode) -> str:
    """The grammar of a reply in XTML, up to its end-of-message token.

    ``thinking`` tells whether the prompt left the think channel open, or else the response.

    Raises:
        K3Error: a tool's parameters are no schema of an object.
    """
    tags = _Tags(encode)
    ending = tags.spell(xtml.close_tag("message"))
    responded = tags.spell(xtml.close_tag("response"))
    rules = ["answer: content", f"text: {_TEXT}", f"content: {_content(wanted.schema)}"]
    answers = []
    if wanted.calls != "must":
        answers.append(f"content {responded} {ending}")
    if wanted.calls != "never":
        # A model that calls a tool need not say anything.
        answers.append(f"content? {responded} calls {ending}")
        rules += _calls(wanted, tags)
    rules[0] = f"answer: {' | '.join(answers)}"
    thought = [*xtml.close_tag("think"), *xtml.open_tag("response")]
    start = f"start: text {tags.spell(thought)} answer" if thinking else "start: answer"
    return "\n".join([start, *rules])


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a text that is JSON of ``schema`` and nothing else."""
    return f"start: {_json(schema)}"


class _Tags:
    """Markup as the ids it is encoded to, in the grammar's notation."""

    def __init__(self, encode: Encode):
        self._encode = encode

    def spell(self, segments: Iterable[xtml.Segment]) -> str:
        return " ".join(f"<[{i}]>" for i in self._encode(segments))

    def around(self, opening: list[xtml.Segment], name: str, inner: str) -> str:
        return f"{self.spell(opening)} {inner} {self.spell(xtml.close_tag(name))}"


def _content(schema: dict[str, Any] | None) -> str:
    return "text" if schema is None else _json(schema)


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**_closed(schema), **_JSON_OPTIONS})}"


def _closed(schema: Any) -> Any:
    """``schema``, its objects without properties that it does not list, unless it speaks of them.

    JSON Schema allows any others, and a model that is sampled would go on adding some.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if key in ("items", "additionalProperties"):
            closed[key] = _closed(value)
        elif key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
        elif key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            closed[key] = [_closed(inner) for inner in value]
    if "properties" in schema and not set(schema) & _OPEN_KEYS:
        closed["additionalProperties"] = False
    return closed


def _calls(wanted: Wanted, tags: _Tags) -> Iterator[str]:
    """Rules of the tools channel: ``calls``, and what it is made of."""
    names = " | ".join(f"call_{i}" for i in range(len(wanted.tools)))
    many = f"({names})+" if wanted.parallel else f"({names})"
    yield f"calls: {tags.around(xtml.open_tag('tools'), 'tools', many)}"
    for i, function in enumerate(wanted.tools):
        tag = xtml.open_tag("call", tool=function["name"], index=1)
        # All of the tag but the index's digits.
        opening = f"{tags.spell(tag[:-3])} {_INDEX} {tags.spell(tag[-2:])}"
        yield f"call_{i}: {opening} arguments_{i} {tags.spell(xtml.close_tag('call'))}"
        yield from _arguments(i, function, tags)


def _arguments(i: int, function: dict[str, Any], tags: _Tags) -> Iterator[str]:
    """Rules of one call's arguments: one by one, or a JSON block where a schema says more."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_object = schema["type"] == "object" and isinstance(properties, dict)
    if not (is_object and isinstance(required, list)):
        raise K3Error(f"the parameters of {function['name']!r} are no schema of an object")
    values = {key: _value(value) for key, value in properties.items()}
    if set(schema) - _PLAIN_KEYS - _NOTES or None in values.values():
        block = tags.around(xtml.open_tag("json", type="object"), "json", f"block_{i}")
        yield f"arguments_{i}: {block}"
        yield f"block_{i}: {_json(schema)}"
        return
    parts = []
    for j, (key, (kind, rule)) in enumerate(values.items()):
        opening = xtml.open_tag("argument", key=key, type=kind)
        yield f"argument_{i}_{j}: {tags.around(opening, 'argument', f'value_{i}_{j}')}"
        yield f"value_{i}_{j}: {rule}"
        parts.append(f"argument_{i}_{j}{'' if key in required else '?'}")
    yield f"arguments_{i}: {' '.join(parts) or _NOTHING}"


def _value(schema: Any) -> tuple[str, str] | None:
    """An argument's type attribute and its rule; None if its schema fixes no single type."""
    if not isinstance(schema, dict) or "$ref" in json.dumps(schema):
        return None
    said = {key: value for key, value in schema.items() if key not in _NOTES}
    kind, texts = said.get("type"), _texts(said)
    if said == {"type": "string"}:
        return "string", "text"
    if texts and kind in (None, "string") and set(said) <= _STRING_KEYS:
        return "string", " | ".join(texts)
    return (_KINDS[kind], _json(said)) if isinstance(kind, str) and kind in _KINDS else None


def _texts(schema: dict[str, Any]) -> list[str]:
    """The strings that a schema lists, in the grammar's notation; none if it lists others too."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(listed, list) or not all(isinstance(value, str) for value in listed):
        return []
    return [json.dumps(value) for value in listed]
