"""``mlx-k3 serve``, a process of its own, asked by OpenAI's client: what is answered."""

import json
from typing import Any

import openai
import pytest

from mlx_k3 import generate, load, nano
from mlx_k3.tasks.toolbox import CALCULATOR, CLOCK, CONVERT, evaluate

from .support.server import KEY, MODEL, ask, serving

SUM = "What is 47 + 85?"
PERSON = "Mira is 34 years old and lives in Oslo."


@pytest.fixture(scope="module")
def server():
    with serving("--max-body", "200kB", "--origin", "http://localhost:3000") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def streamed(client, text: str, **options: Any) -> dict[str, Any]:
    """A streamed answer, put together."""
    whole = {"content": "", "reasoning": "", "calls": {}, "finish": None, "logprobs": []}
    for chunk in ask(client, text, stream=True, **options):
        whole["usage"] = chunk.usage
        for choice in chunk.choices:
            whole["content"] += choice.delta.content or ""
            whole["reasoning"] += getattr(choice.delta, "reasoning_content", "")
            whole["finish"] = choice.finish_reason or whole["finish"]
            whole["logprobs"] += choice.logprobs.content if choice.logprobs else []
            for call in choice.delta.tool_calls or ():
                known = whole["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments
    return whole


def test_what_is_there(server, client):
    [model] = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    assert server.get("/health").json() == {"status": "ok"}


def test_an_answer_with_its_thinking(client):
    reply = ask(client, SUM)
    [choice] = reply.choices
    assert choice.message.content == "47 + 85 = 132."
    assert "7 + 5 = 12" in choice.message.reasoning_content
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 20 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (SUM, {}),
        (SUM, {"reasoning_effort": "none"}),
        (SUM, {"max_tokens": 50}),
        (SUM, {"stop": [" =", "5"]}),
        ("Hello!", {"temperature": 1.3, "seed": 7, "logprobs": True, "top_logprobs": 2}),
        ("What is 3 * 4? And what time is it in Oslo?", {"tools": [CALCULATOR, CLOCK]}),
        ("Convert 5 metres to centimetres.", {"tools": [CALCULATOR, CONVERT]}),
        (PERSON, {"response_format": {"type": "json_object"}}),
    ],
)
def test_a_stream_tells_what_the_whole_answer_does(client, text, options):
    reply = ask(client, text, **options)
    [choice] = reply.choices
    stream = streamed(client, text, stream_options={"include_usage": True}, **options)
    message = choice.message
    assert stream["content"] == (message.content or "")
    assert stream["reasoning"] == getattr(message, "reasoning_content", "")
    calls = [call.function.model_dump() for call in message.tool_calls or ()]
    assert list(stream["calls"].values()) == calls
    assert stream["finish"] == choice.finish_reason
    assert stream["usage"].completion_tokens == reply.usage.completion_tokens
    assert stream["usage"].prompt_tokens == reply.usage.prompt_tokens
    assert stream["logprobs"] == (choice.logprobs.content if choice.logprobs else [])


def test_it_says_what_python_gets(client):
    model, tokenizer = load(nano.converted())
    for text in (SUM, "What can you do?"):
        assert ask(client, text).choices[0].message.content == generate(model, tokenizer, text)


def test_two_steps_with_a_tool_end_with_the_right_answer(client):
    messages: list[Any] = [{"role": "user", "content": "What is 483 * 17?"}]
    for _ in range(2):
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[CALCULATOR])
        [choice] = reply.choices
        messages.append(choice.message)  # with all that the client makes of it
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls:
            result = evaluate(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert [getattr(m, "role", None) or m["role"] for m in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert messages[-1].content == f"483 * 17 = {483 * 17}."


def test_a_second_turn_reads_only_what_is_new(client):
    messages: list[Any] = [{"role": "user", "content": f"{PERSON} " * 20}]
    first = client.chat.completions.create(model=MODEL, messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Hello!"}]
    second = client.chat.completions.create(model=MODEL, messages=messages).usage
    cached = second.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 1 <= cached < second.prompt_tokens
    again = client.chat.completions.create(model=MODEL, messages=messages[:1])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_arguments_come_while_they_are_written(client):
    pieces = [
        call.function.arguments
        for chunk in ask(client, "Convert 5 metres to feet.", tools=[CONVERT], stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert len(pieces) > 4
    assert json.loads("".join(pieces)) == {"value": 5, "from": "metres", "to": "feet"}


def test_how_much_to_think(client):
    def thought(**options: Any) -> str:
        message = ask(client, SUM, **options).choices[0].message
        assert message.content.startswith("47 + 85 = ")
        return getattr(message, "reasoning_content", "")

    def tokens(**options: Any) -> int:
        return ask(client, SUM, max_tokens=1, **options).usage.prompt_tokens

    assert thought() and thought(reasoning_effort="low")
    for off in (
        {"reasoning_effort": "none"},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        assert thought(**off) == ""
    # The prompt says how much.
    efforts = {effort: tokens(reasoning_effort=effort) for effort in ("low", "medium", "high")}
    assert efforts["medium"] == efforts["high"]
    assert tokens() == tokens(reasoning_effort="max") == tokens(reasoning_effort="xhigh")
    kwargs = {"chat_template_kwargs": {"thinking_effort": "low"}}
    assert tokens(extra_body=kwargs) == efforts["low"]


def test_a_stop_text_is_not_part_of_the_answer(client):
    reply = ask(client, SUM, stop="132")
    assert reply.choices[0].message.content == "47 + 85 = "
    assert "132" in reply.choices[0].message.reasoning_content  # a stop is for the answer proper
    assert reply.choices[0].finish_reason == "stop"
    # It is made of several tokens, and the text before it looks like its beginning.
    assert ask(client, SUM, stop=["85 = 1", "= 2"]).choices[0].message.content == "47 + "


def test_a_limit_in_the_thinking_leaves_no_answer(client):
    [choice] = ask(client, SUM, max_completion_tokens=5).choices
    assert choice.finish_reason == "length"
    assert choice.message.content == "" and choice.message.reasoning_content
    assert ask(client, SUM, max_completion_tokens=5).usage.completion_tokens == 5


def test_log_probabilities_are_those_of_the_answer(client):
    [choice] = ask(client, SUM, logprobs=True, top_logprobs=3).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0 and bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.top_logprobs[0].token == entry.token  # the likeliest was taken
    stopped = ask(client, SUM, logprobs=True, stop="132").choices[0]
    assert "".join(e.token for e in stopped.logprobs.content) == stopped.message.content


def test_sampling_does_what_it_says(client):
    def sample(**options: Any) -> str:
        options = {"reasoning_effort": "none", "max_tokens": 30, **options}
        return ask(client, "Hello!", **options).choices[0].message.content

    def best(**options: Any) -> str:
        return sample(temperature=2, seed=1, **options)

    assert best() == best()
    assert len({sample(temperature=2, seed=seed) for seed in range(12)}) > 1
    assert best(top_p=1e-6) == best(extra_body={"top_k": 1}) == sample(temperature=0)
    assert best(extra_body={"min_p": 1.0}) == sample(temperature=0)
    # A bias of 100 is a ban or a command.
    tokenizer = load(nano.converted())[1]
    word = tokenizer.table.pieces.index(b" metres")
    assert sample(logit_bias={word: 100}, max_tokens=3) == " metres metres metres"
    loud = sample(logit_bias={word: 25}, max_tokens=20)
    calm = sample(logit_bias={word: 25}, max_tokens=20, frequency_penalty=2, presence_penalty=2)
    assert calm.count("metres") < loud.count("metres")


def test_json_with_and_without_tools(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    reply = ask(client, PERSON, response_format=wanted)
    assert json.loads(reply.choices[0].message.content) == {"name": "Mira", "age": 34}
    reply = ask(client, "Hello!", tools=[CLOCK, CALCULATOR], tool_choice="required")
    assert reply.choices[0].finish_reason == "tool_calls"
    choice = {"type": "function", "function": {"name": "clock"}}
    reply = ask(client, SUM, tools=[CLOCK, CALCULATOR], tool_choice=choice)
    assert {call.function.name for call in reply.choices[0].message.tool_calls} == {"clock"}
    reply = ask(client, SUM, tools=[CLOCK, CALCULATOR], tool_choice="none")
    assert reply.choices[0].message.tool_calls is None


def test_a_text_is_continued(client):
    tokenizer = load(nano.converted())[1]
    whole = client.completions.create(model=MODEL, prompt="47 + 85 =", max_tokens=8, logprobs=2)
    [choice] = whole.choices
    assert choice.text and "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs)
    ids = tokenizer.encode("47 + 85 =")
    for prompt in (ids, [ids], ["47 + 85 ="]):
        again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8)
        assert again.choices[0].text == choice.text
    stream = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text
    assert whole.usage.prompt_tokens == len(ids)


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
ERRORS = [
    ({"model": "gpt-4"}, 404, "model", "model_not_found"),
    ({"n": 2}, 400, "n", "invalid_value"),
    ({"temperature": -1}, 400, "temperature", "invalid_value"),
    ({"temperature": "hot"}, 400, "temperature", "invalid_value"),
    ({"top_p": 0}, 400, "top_p", "invalid_value"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ({"messages": []}, 400, "messages", "invalid_value"),
    ({"messages": [{"role": "king"}]}, 400, "messages[0].role", "invalid_value"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", "missing_required_parameter"),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        400,
        "messages[0].content[0]",
        "unsupported_content",
    ),
    ({"messages": [{"role": "user", "content": "a " * 3000}]}, 400, "messages", None),
    ({"messages": [{"role": "tool", "content": "4"}]}, 400, None, None),
    ({"extra_body": {"adapters": "x"}}, 400, "adapters", "unknown_parameter"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "invalid_value"),
    ({"stream": False, "stream_options": {}}, 400, "stream_options", "invalid_value"),
    ({"logit_bias": {"9999999": 1}}, 400, "logit_bias", "invalid_value"),
    ({"stop": ["", "x"]}, 400, "stop[0]", "invalid_value"),
    ({"tool_choice": "required"}, 400, None, None),
    ({"tools": [{"type": "function", "function": {}}]}, 400, "tools[0].function.name", None),
    ({"response_format": {"type": "json_schema"}}, 400, None, None),
    ({"reasoning_effort": "heroic"}, 400, "reasoning_effort", "invalid_value"),
    ({"extra_body": {"top_k": 10**6}}, 400, "top_k", "invalid_value"),
]


@pytest.mark.parametrize(("change", "status", "param", "code"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_told_as_openai_does(client, change, status, param, code, stream):
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], **change}
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**{"stream": stream, **request})
    assert raised.value.status_code == status
    error = raised.value.body
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert code is None or error["code"] == code
    assert error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"messages":' + b"[" * 5000, "invalid_json"),
        (b"{}", "missing_required_parameter"),
    ],
)
def test_bodies_that_are_no_requests(client, server, body, code):
    response = client._client.post(
        f"{server.base_url}/chat/completions",
        content=body,
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


def test_only_who_knows_the_key_gets_in(server, client):
    for key in ("sk-wrong", KEY + "x", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError) as raised:
            client.with_options(api_key=key).models.list()
        assert raised.value.body["code"] == "invalid_api_key"
    for given in ("", f"Basic {KEY}", KEY, b"Bearer \xd0\xba\xff"):
        assert server.get("/metrics", Authorization=given).status_code == 401
    assert server.get("/health", Authorization="").status_code == 200


def test_pages_of_other_origins_get_nothing(server, client):
    with pytest.raises(openai.PermissionDeniedError) as raised:
        client.with_options(default_headers={"Origin": "http://evil.example"}).models.list()
    assert raised.value.body["code"] == "origin_not_allowed"
    page = "http://localhost:3000"
    allowed = server.get("/v1/models", Origin=page)
    assert allowed.headers["access-control-allow-origin"] == page
    # A refusal can be read by the page too, or it would see a network error.
    refused = server.get("/v1/models/x", Origin=page)
    assert refused.status_code == 404 and "access-control-allow-origin" in refused.headers
    preflight = client._client.request(
        "OPTIONS",
        f"{server.base_url}/chat/completions",
        headers={
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200


def test_a_body_has_a_largest_size(server, client):
    with pytest.raises(openai.APIStatusError) as raised:
        ask(client, "a" * 5_000_000)
    assert (raised.value.status_code, raised.value.body["code"]) == (413, "body_too_large")
    pieces = (b"a" * 10_000 for _ in range(100))  # without saying how many
    response = client._client.post(
        f"{server.base_url}/completions",
        content=pieces,
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert response.status_code == 413
    assert ask(client, SUM).choices[0].message.content == "47 + 85 = 132."


def test_paths_that_do_not_exist(client):
    for path, status in (("/nothing", 404), ("/chat/completions", 405)):
        with pytest.raises(openai.APIStatusError) as raised:
            client.get(path, cast_to=object)
        assert raised.value.status_code == status and set(raised.value.body) == {
            "message",
            "type",
            "param",
            "code",
        }


def test_what_is_counted(server, client):
    before = server.figure("mlx_k3_generated_tokens_total")
    usage = ask(client, SUM).usage
    assert server.figure("mlx_k3_generated_tokens_total") == before + usage.completion_tokens
    assert server.figure("mlx_k3_tokens_per_second") > 1
    assert server.figure("mlx_k3_queue_waiting") == server.figure("mlx_k3_running") == 0
    assert server.figure("mlx_k3_memory_active_bytes") > 1e6
    answered = 'mlx_k3_requests_total{path="/v1/chat/completions",status="200"}'
    assert server.figure(answered) > 10
    assert 'path="other",status="404"' in server.get("/metrics").text


def test_the_log_tells_of_requests_and_not_of_what_was_said(server, client):
    ask(client, "Remember the word zanzibar.")
    server.get("/v1/%0aforged")
    assert "POST /v1/chat/completions 200" in server.log
    assert "zanzibar" not in server.log and KEY not in server.log
    assert "\nforged" not in server.log and "Traceback" not in server.log
