"""Structured output through the server: always JSON, and always of the schema."""

import json

import jsonschema
import openai
import pytest

from .support.schemas import SCHEMAS
from .support.server import ask, serving

TEXT = "Mira is 34 years old and lives in Oslo."


@pytest.fixture(scope="module")
def client():
    with serving() as server, server.client() as client:
        yield client


def wanted(schema):
    described = {"name": "record", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": described}


def test_there_are_enough_kinds():
    assert len(SCHEMAS) >= 20


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_of_its_schema(client, name, temperature):
    schema, number = SCHEMAS[name], list(SCHEMAS).index(name)
    effort = "max" if temperature and number % 2 else "none"
    options = {"temperature": temperature, "seed": number, "reasoning_effort": effort}
    reply = ask(client, TEXT, response_format=wanted(schema), max_tokens=1500, **options)
    [choice] = reply.choices
    assert choice.finish_reason == "stop"
    value = json.loads(choice.message.content)
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("seed", range(5))
def test_json_object_is_an_object(client, seed):
    options = {"temperature": 1.5, "seed": seed, "max_tokens": 1500}
    reply = ask(client, TEXT, response_format={"type": "json_object"}, **options)
    [choice] = reply.choices
    if choice.finish_reason == "stop":  # at such a temperature a text in it may go on and on
        assert isinstance(json.loads(choice.message.content), dict)


def test_a_stream_is_of_its_schema_too(client):
    chunks = ask(client, TEXT, response_format=wanted(SCHEMAS["nested"]), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMAS["nested"])


def test_a_bias_does_not_break_it(client):
    schema = SCHEMAS["flat"]
    options = {"logit_bias": {str(i): 100 for i in range(20)}, "reasoning_effort": "none"}
    reply = ask(client, TEXT, response_format=wanted(schema), **options)
    jsonschema.validate(json.loads(reply.choices[0].message.content), schema)


def test_the_client_makes_objects_of_it(client):
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    messages = [{"role": "user", "content": TEXT}]
    reply = client.chat.completions.parse(
        model="k3-nano", messages=messages, response_format=Person
    )
    assert reply.choices[0].message.parsed == Person(name="Mira", age=34)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "stone"}}},
        {"type": "string", "pattern": "(?<=a)b"},
        {"$ref": "#/$defs/missing"},
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(client, schema):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, TEXT, response_format=wanted(schema))
    assert "cannot be enforced" in raised.value.body["message"]
    assert "\n" not in raised.value.body["message"]
