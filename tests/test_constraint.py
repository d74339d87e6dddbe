"""What an answer may be: the grammar of a reply, token by token."""

import json

import jsonschema
import mlx.core as mx
import pytest

from mlx_k3 import generate, load, nano, stream_generate
from mlx_k3.chat import xtml
from mlx_k3.chat.constraint import Constraint, constrain
from mlx_k3.chat.grammar import Wanted, reply_grammar
from mlx_k3.chat.tokenizer import load_tokenizer
from mlx_k3.convert.tokenizer import write_tokenizer
from mlx_k3.errors import K3Error, UnsupportedError
from mlx_k3.tasks.toolbox import CALCULATOR, CLOCK, CONVERT

from .support.schemas import SCHEMAS
from .support.tasks import drawn
from .support.vocabulary import sample_texts, write_vocabulary


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(nano.converted())


@pytest.fixture(scope="module")
def model(tokenizer):
    return load(nano.converted())[0]


def reply_ids(tokenizer, message, *, thinking=True):
    """An assistant's message as the model writes it, after the opening that the prompt has."""
    rendered = xtml.render([message], thinking=thinking, add_generation_prompt=False)
    [segments] = rendered.messages
    return xtml.encode(segments[len(xtml.reply_opening(thinking)) :], tokenizer)


def first_refused(constraint, ids, rows=1800):
    """Position of the first id that is not allowed where it stands; None if all are."""
    tokens = [0, 0]  # of a prompt
    for position, token in enumerate(ids):
        allowed = constraint(mx.array(tokens), mx.zeros((1, rows)))[0]
        if allowed[token].item() != 0:
            return position
        tokens.append(token)
    return None


def allowed_after(constraint, ids, rows=1800):
    """The ids that may follow."""
    constraint(mx.array([0]), mx.zeros((1, rows)))
    logits = constraint(mx.array([0, *ids]), mx.zeros((1, rows)))
    return [i for i, value in enumerate(logits[0].tolist()) if value == 0]


def called(*calls):
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {
        "role": "assistant",
        "reasoning_content": "So.",
        "content": "",
        "tool_calls": tool_calls,
    }


def said(content):
    return {"role": "assistant", "reasoning_content": "Well.\n<|close|>", "content": content}


def test_every_right_answer_in_json_is_allowed(tokenizer):
    for example in drawn("json", 60):
        constraint = constrain(tokenizer, response_format=example.response_format)
        assert first_refused(constraint, reply_ids(tokenizer, example.messages[-1])) is None


def test_every_right_tool_call_is_allowed_and_no_other_answer(tokenizer):
    seen = 0
    for example in drawn("tools", 80):
        calls = next((m for m in example.messages if m.get("tool_calls")), None)
        if calls is None:
            continue
        seen += 1
        must = {"tools": example.tools, "tool_choice": "required"}
        assert first_refused(constrain(tokenizer, **must), reply_ids(tokenizer, calls)) is None
        answer = reply_ids(tokenizer, {**calls, "tool_calls": None})
        # Up to the message's end all is the same; there the tools have to open.
        refused = first_refused(constrain(tokenizer, **must), answer)
        assert answer[refused:] == xtml.encode(xtml.end_message(), tokenizer)
    assert seen > 40


def test_the_skeleton_is_forced_and_text_is_free(tokenizer):
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMAS["flat"]}}
    thought = tokenizer.encode("Any text, even { or <|close|>.")
    allowed = allowed_after(constrain(tokenizer, response_format=wanted), thought)
    control = tokenizer.table.control
    assert [control[i] for i in allowed if i in control] == [xtml.CLOSE]
    assert len(allowed) > 1000
    border = [*xtml.close_tag("think"), *xtml.open_tag("response")]
    ids = xtml.encode(border, tokenizer)
    for i in range(1, len(ids)):
        constraint = constrain(tokenizer, response_format=wanted)
        assert allowed_after(constraint, [*thought, *ids[:i]]) == [ids[i]]
    whole = [*thought, *ids, *tokenizer.encode('{"name": "a", "age": 3}')]
    ending = xtml.encode([*xtml.close_tag("response"), *xtml.end_message()], tokenizer)
    for i in range(len(ending)):
        constraint = constrain(tokenizer, response_format=wanted)
        assert allowed_after(constraint, [*whole, *ending[:i]]) == [ending[i]]


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([("convert", {"value": 2.5, "from": "metres", "to": "feet"})], True),
        ([("convert", {"value": "two", "from": "metres", "to": "feet"})], False),
        ([("convert", {"value": 2, "from": "metres"})], False),
        ([("convert", {"value": 2, "from": "a", "to": "b", "more": 1})], False),
        ([("clock", {}), ("clock", {"city": "Oslo"})], True),
        ([("calculator", {"expression": '<|close|> "quoted"\n'})], True),
        ([("unknown", {})], False),
    ],
)
def test_arguments_keep_to_their_declaration(tokenizer, calls, right):
    tools = [CALCULATOR, CLOCK, CONVERT]
    constraint = constrain(tokenizer, tools=tools, tool_choice="required")
    refused = first_refused(constraint, reply_ids(tokenizer, called(*calls)))
    assert (refused is None) == right


def test_which_tools_may_be_called(tokenizer):
    tools = [CALCULATOR, CLOCK]
    clock = reply_ids(tokenizer, called(("clock", {})))
    twice = reply_ids(tokenizer, called(("clock", {}), ("clock", {})))
    text = reply_ids(tokenizer, said("Hello"))
    strict = {**CLOCK, "function": {**CLOCK["function"], "strict": True}}

    def allows(ids, **settings):
        constraint = constrain(tokenizer, **{"tools": tools, **settings})
        return constraint is None or first_refused(constraint, ids) is None

    assert constrain(tokenizer, tools=tools) is None
    assert constrain(tokenizer, tools=tools, tool_choice="auto") is None
    assert constrain(tokenizer, tool_choice="none") is None
    named = {"type": "function", "function": {"name": "clock"}}
    other = {"type": "function", "function": {"name": "calculator"}}
    assert allows(clock, tool_choice=named) and allows(twice, tool_choice=named)
    assert not allows(clock, tool_choice=other) and not allows(text, tool_choice=named)
    assert allows(text, tool_choice="none") and not allows(clock, tool_choice="none")
    assert allows(clock, parallel_tool_calls=False) and allows(text, parallel_tool_calls=False)
    assert not allows(twice, parallel_tool_calls=False)
    assert allows(clock, tools=[strict]) and allows(text, tools=[strict])
    assert not allows(reply_ids(tokenizer, called(("clock", {"zone": "x"}))), tools=[strict])


def test_json_or_tools(tokenizer):
    """With both, an answer is JSON, or calls tools and may leave the JSON out."""
    settings = {"tools": [CLOCK], "response_format": "json_object"}
    for message, right in (
        (said('{"a": 1}'), True),
        (said("Hello"), False),
        (said(""), False),
        (called(("clock", {})), True),
        ({**called(("clock", {})), "content": '{"a": 1}'}, True),
        ({**called(("clock", {})), "content": "Hello"}, False),
    ):
        constraint = constrain(tokenizer, **settings)
        assert (first_refused(constraint, reply_ids(tokenizer, message)) is None) == right


def test_a_schema_that_says_more_than_tags_can_makes_arguments_a_json_block(tokenizer):
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}$"}},
        "required": ["code"],
    }
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    for arguments, right in (('{"code": "AB"}', True), ('{"code": "ab"}', False)):
        constraint = constrain(tokenizer, tools=tools, tool_choice="required")
        tags = [
            *xtml.close_tag("think"),
            *xtml.open_tag("response"),
            *xtml.close_tag("response"),
            *xtml.open_tag("tools"),
            *xtml.open_tag("call", tool="find", index=1),
            *xtml.open_tag("json", type="object"),
            xtml.Segment(arguments, False),
            *xtml.close_tag("json"),
            *xtml.close_tag("call"),
            *xtml.close_tag("tools"),
            *xtml.end_message(),
        ]
        refused = first_refused(constraint, xtml.encode(tags, tokenizer))
        assert (refused is None) == right


def test_strings_that_are_listed_are_the_only_ones(tokenizer):
    parameters = {"type": "object", "properties": {"unit": {"enum": ['a "b"', "kelvin"]}}}
    tools = [{"type": "function", "function": {"name": "heat", "parameters": parameters}}]
    for value, right in (('a "b"', True), ("kelvin", True), ("celsius", False)):
        constraint = constrain(tokenizer, tools=tools, tool_choice="required")
        ids = reply_ids(tokenizer, called(("heat", {"unit": value})))
        assert (first_refused(constraint, ids) is None) == right


def test_objects_have_no_properties_that_are_not_listed(tokenizer):
    open_one = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema, more in (
        (open_one, False),
        ({**open_one, "additionalProperties": True}, True),
        ({"type": "object"}, True),
        # Names of properties are no keywords.
        ({"type": "object", "properties": {"properties": {"type": "object"}}}, False),
    ):
        wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
        constraint = constrain(tokenizer, response_format=wanted)
        ids = reply_ids(tokenizer, said('{"zoo": 1}'))
        assert (first_refused(constraint, ids) is None) == more


def test_ids_that_the_tokenizer_lacks_are_never_allowed(tokenizer):
    constraint = constrain(tokenizer, response_format="json_object")
    known = len(tokenizer.table.pieces)
    assert max(allowed_after(constraint, [], rows=known + 200)) < known
    fewer = constrain(tokenizer, response_format="json_object")
    assert fewer(mx.array([0]), mx.zeros((1, 100))).shape == (1, 100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"response_format": {"type": "xml"}}, "there are text, json_object and json_schema"),
        ({"response_format": {"type": "json_schema"}}, "has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "no schema"),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "'x', which is not among the tools",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string", "pattern": "(?<=a)b"}},
                }
            },
            "cannot be enforced",
        ),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "no schema of an object",
        ),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"required": None}}}],
                "tool_choice": "required",
            },
            "no schema of an object",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(tokenizer, settings, message):
    with pytest.raises(K3Error, match=message) as raised:
        constrain(tokenizer, **settings)
    assert "\n" not in str(raised.value)


def test_a_broken_grammar_is_an_error(tokenizer):
    with pytest.raises(UnsupportedError, match="cannot be enforced"):
        Constraint(tokenizer, "start: nowhere")
    wanted = Wanted(None, "must", [{"name": 'say "so" & <|close|>'}])
    encode = lambda segments: xtml.encode(segments, tokenizer)  # noqa: E731
    assert Constraint(tokenizer, reply_grammar(wanted, True, encode))


def test_a_format_that_is_a_template_has_json_alone(tmp_path):
    names = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_middle|>"]
    slots = {**dict(enumerate(names)), 254: "[UNK]", 255: "[PAD]"}
    write_vocabulary(tmp_path, sample_texts(), 1000, slots)
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path, tmp_path / "out")
    templated = load_tokenizer(tmp_path / "out")
    end = templated.convert_tokens_to_ids("<|im_end|>")
    ids = templated.encode('{"a": 1}')
    constraint = constrain(templated, response_format="json_object")
    assert first_refused(constraint, [*ids, end]) is None
    constraint = constrain(templated, response_format="json_object")
    assert first_refused(constraint, [*ids[:-1], end]) == len(ids) - 1
    with pytest.raises(UnsupportedError, match="tool calls cannot be enforced"):
        constrain(templated, tools=[CLOCK], tool_choice="required")


@pytest.mark.parametrize("thinking", [True, False])
def test_generate_keeps_to_the_format(model, tokenizer, thinking):
    schema = SCHEMAS["flat"]
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    text = "Mira is 34 years old and lives in Oslo."
    answer = generate(model, tokenizer, text, response_format=wanted, thinking=thinking)
    assert json.loads(answer) == {"name": "Mira", "age": 34}
    for seed in range(3):
        options = {"temp": 1.5, "seed": seed, "thinking": thinking}
        answer = generate(model, tokenizer, text, response_format=wanted, **options)
        jsonschema.validate(json.loads(answer), schema)


def test_generate_calls_the_tool_that_is_chosen(model, tokenizer):
    choice = {"type": "function", "function": {"name": "clock"}}
    options = {"tools": [CALCULATOR, CLOCK], "tool_choice": choice, "temp": 1.5}
    for seed in range(3):
        *_, last = stream_generate(model, tokenizer, "What is 3 + 4?", seed=seed, **options)
        calls = last.reply.message["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"clock"}
    with pytest.raises(UnsupportedError, match="no response format"):
        stream_generate(model, tokenizer, "x", raw=True, response_format="json_object")
