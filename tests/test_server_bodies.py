"""Bodies that nobody foresaw: a request is understood or refused, and nothing else happens."""

import copy
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_k3 import nano
from mlx_k3.chat.tokenizer import load_tokenizer
from mlx_k3.config import K3Config
from mlx_k3.errors import K3Error
from mlx_k3.server.asks import Asker, Defaults
from mlx_k3.server.bodies import ChatRequest, CompletionRequest, parse
from mlx_k3.server.errors import ApiError, api_error
from mlx_k3.server.pictures import Pictures, Sources
from mlx_k3.tasks.toolbox import CALCULATOR, CONVERT

CHAT = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 3 * 4?"}], "name": "Ada"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I call calculator.",
            "refusal": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "calculator", "arguments": '{"expression": "3 * 4"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
    ],
    "tools": [CALCULATOR, CONVERT],
    "tool_choice": {"type": "function", "function": {"name": "calculator"}},
    "parallel_tool_calls": False,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "result",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "unit": {"enum": ["a", "b"]}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    },
    "reasoning_effort": "low",
    "chat_template_kwargs": {"thinking": True, "thinking_effort": "high"},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "stop": ["\n\n"],
    "seed": -1,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "max_completion_tokens": 50,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "ada",
    "metadata": {"a": "b"},
}
COMPLETION = {"prompt": [[1, 2, 3]], "max_tokens": 5, "logprobs": 1, "echo": False, "stop": "a"}


@pytest.fixture(scope="module")
def asker():
    model = SimpleNamespace(vision=None, config=K3Config.from_file(nano.converted()))
    pictures = Pictures(model, Sources(), 2048)
    return Asker(load_tokenizer(nano.converted()), 2048, Defaults(), pictures)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of everything in ``value``."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(inner, (*path, key))
    return found


def changed(body: Any, path: tuple, value: Any) -> Any:
    body = copy.deepcopy(body)
    here = body
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return body


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["object", "string", "array", "$ref", "function", "tool", "system", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "enum", "name", "function", "content", "x"]
            )
            | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def understood(asker: Asker, raw: bytes, chat: bool) -> bool:
    """Whether it is; else it is refused in one line, as the client's mistake."""
    try:
        if chat:
            asker.chat(*parse(ChatRequest, raw))
        else:
            asker.completion(parse(CompletionRequest, raw)[0])
    except K3Error as e:
        refusal = api_error(e)
        assert refusal.status == 400 and str(e)
        assert "\n" not in str(e) or json.dumps("\n")[1:-1] in raw.decode()
        return False
    return True


def test_what_is_changed_below_is_a_request(asker):
    assert understood(asker, json.dumps(CHAT).encode(), True)
    assert understood(asker, json.dumps(COMPLETION).encode(), False)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_any_other_value_anywhere(asker, body, data):
    path = data.draw(st.sampled_from(places(body)))
    raw = json.dumps(changed(body, path, data.draw(ANYTHING))).encode()
    understood(asker, raw, body is CHAT)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=60), cut=st.integers(0, 3000), seed=st.integers(0, 10**6))
def test_any_other_bytes(asker, raw, cut, seed):
    whole = json.dumps(CHAT).encode()
    at = random.Random(seed).randrange(len(whole))
    for body in (raw, whole[:cut], whole[:at] + raw + whole[at + len(raw) :]):
        try:
            asker.chat(*parse(ChatRequest, body))
        except K3Error as e:
            assert api_error(e).status == 400


@pytest.mark.parametrize("missing", ["messages", "prompt"])
def test_what_is_missing_is_named(missing):
    kind = ChatRequest if missing == "messages" else CompletionRequest
    with pytest.raises(ApiError, match=f"^{missing} is required$") as raised:
        parse(kind, b"{}")
    assert raised.value.param == missing


def test_a_place_has_no_names_of_types():
    for path, value, param in (
        (("messages", 1, "content", 0, "type"), 3, "messages[1].content[0].type"),
        (("messages", 2, "tool_calls", 0, "function"), 3, "messages[2].tool_calls[0].function"),
        (("tool_choice", "function", "name"), 3, "tool_choice.function.name"),
        (("stop", 0), 3, "stop[0]"),
        (("response_format", "type"), "xml", "response_format.type"),
    ):
        with pytest.raises(ApiError) as raised:
            parse(ChatRequest, json.dumps(changed(CHAT, path, value)).encode())
        assert raised.value.param == param
