"""The queue and what a request becomes, in this process: who leaves, what fails and is written."""

import asyncio
import json
import time

import mlx.core as mx
import pytest

from mlx_k3 import load, nano
from mlx_k3.chat.constraint import constrain
from mlx_k3.chat.generation import run
from mlx_k3.chat.xtml_parser import Event
from mlx_k3.loader import assemble
from mlx_k3.server.answers import Answer, Delta
from mlx_k3.server.app import Limits, Service, create_app
from mlx_k3.server.asks import Asker, Defaults
from mlx_k3.server.bodies import ChatRequest, parse
from mlx_k3.server.errors import api_error
from mlx_k3.server.metrics import Metrics
from mlx_k3.server.pictures import Pictures, Sources
from mlx_k3.server.queue import BLOCK_TOKENS, GenerationQueue, Job, Left, Reading
from mlx_k3.server.tool_calls import ToolCallWriter
from mlx_k3.tasks.toolbox import CALCULATOR, CONVERT

LONG = "The kite is blue. " * 320


@pytest.fixture(scope="module")
def loaded():
    return load(nano.converted())


def make_ask(tokenizer, text, **options):
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **options}
    asker = Asker(tokenizer, 2048, Defaults(), Pictures(None, Sources(), 2048))
    return asker.chat(*parse(ChatRequest, json.dumps(body).encode()))


def make_job(tokenizer, tell, text="Hello!", **options):
    ask = make_ask(tokenizer, text, **options)
    return Job(ask, Answer(len(ask.ids), ask.stop, None), tell)


def make_queue(model, tokenizer):
    return GenerationQueue(model, tokenizer, None, None, Metrics("m"))


@pytest.mark.parametrize("on_demand", [False, True])
def test_who_leaves_while_the_prompt_is_read_stops_it_within_a_step(loaded, on_demand):
    model, tokenizer = loaded
    if on_demand:
        model = assemble(nano.converted(), slots=40)
    queue, heard = make_queue(model, tokenizer), []

    def tell(news):
        heard.append(news)
        if isinstance(news, Reading) and news.done:
            queue.leave(job)

    job = make_job(tokenizer, tell, LONG)
    assert len(job.ask.ids) > 3 * BLOCK_TOKENS
    queue.add(job)
    assert isinstance(job.future.exception(30), Left)
    [done] = [news.done for news in heard if isinstance(news, Reading) and news.done]
    # Where experts are read on demand a step is a layer, else a block of the prompt.
    assert 0 < done < BLOCK_TOKENS if on_demand else done == BLOCK_TOKENS
    assert queue.running == 0
    following = make_job(tokenizer, heard.append)
    queue.add(following)
    following.future.result(30)
    assert "".join(d.content for d in heard if isinstance(d, Delta)) == "Hello! How can I help?"
    queue.close()
    if on_demand:
        model.offload.close()


def test_who_leaves_while_waiting_is_never_answered(loaded):
    model, tokenizer = loaded
    queue, heard = make_queue(model, tokenizer), []
    first = make_job(tokenizer, lambda _: time.sleep(0.01))
    second, third = (make_job(tokenizer, heard.append) for _ in range(2))
    for job in (first, second, third):
        queue.add(job)
    assert [job.ahead for job in (first, second, third)] == [0, 1, 2]
    queue.leave(second)
    queue.leave(second)
    assert second.future.cancelled()
    third.future.result(30)
    assert third.answer.counts.generated > 3 and second.answer.counts.generated == 0
    assert queue.waiting == queue.running == 0
    queue.close()


def test_closing_ends_all_that_is_left(loaded):
    model, tokenizer = loaded
    queue = make_queue(model, tokenizer)
    jobs = [make_job(tokenizer, lambda _: time.sleep(0.05)) for _ in range(3)]
    for job in jobs:
        queue.add(job)
    queue.close()
    assert all(isinstance(job.future.exception(), Left) for job in jobs)


class Asgi:
    """Asks an application without a network."""

    def __init__(self, app):
        self._app = app

    def post(self, path, body):
        return asyncio.run(self._post(path, json.dumps(body).encode()))

    async def _post(self, path, body):
        sent, received = [], [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if received:
                return received.pop()
            await asyncio.sleep(30)  # the client stays
            raise AssertionError

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        try:
            await self._app(scope, receive, send)
        except RuntimeError as e:
            assert str(e) == SECRET  # for the log, after the response
        text = b"".join(message.get("body", b"") for message in sent).decode()
        return sent[0]["status"], text


SECRET = "at /somewhere/secret.py, line 3"


class Broken:
    """A model that fails at its third token."""

    offload = None

    def __init__(self, model):
        self._model, self._calls = model, 0

    def __call__(self, *args, **options):
        self._calls += 1
        if self._calls == 4:
            raise RuntimeError(SECRET)
        return self._model(*args, **options)

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_told_without_its_text_and_the_next_answer_is_right(loaded, stream, caplog):
    model, tokenizer = loaded
    defaults = Defaults(temperature=0)
    service = Service(
        Broken(model),
        tokenizer,
        name="m",
        created=1,
        prompts=None,
        most_waiting=None,
        defaults=defaults,
    )
    asgi = Asgi(create_app(service, Limits()))
    body = {"messages": [{"role": "user", "content": "Hello!"}], "stream": stream}
    status, text = asgi.post("/v1/chat/completions", body)
    assert status == (200 if stream else 500)
    error = json.loads(text.split("data: ")[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in text
    status, text = asgi.post("/v1/chat/completions", {**body, "stream": False})
    assert status == 200
    assert json.loads(text)["choices"][0]["message"]["content"] == "Hello! How can I help?"
    service.close()
    if stream:
        assert SECRET in caplog.text  # who runs the server learns what it was


def test_unexpected_errors_show_nothing():
    shown = api_error(ValueError(SECRET))
    assert shown.status == 500 and "secret" not in str(shown.body())


def test_penalties_count_the_answer_only(loaded):
    tokenizer = loaded[1]
    text = "Repeat: lamp lamp lamp lamp"
    ask = make_ask(tokenizer, text, presence_penalty=2, reasoning_effort="none")
    [penalty] = ask.sampling.options["logits_processors"]
    logits = mx.zeros((1, 1792))
    assert mx.array_equal(penalty(mx.array(ask.ids), logits + 0), logits)
    lower = penalty(mx.array([*ask.ids, 7, 7]), logits + 0)
    assert lower[0, 7].item() == -2 and mx.sum(lower).item() == -2


def written(events):
    """What the pieces of a call's arguments join to, and how many there were."""
    writer, pieces = ToolCallWriter(), []
    for event in events:
        pieces += [call["function"]["arguments"] for call in writer.write(event)]
    return "".join(pieces), len(pieces), writer.called


def call_event(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return Event("tool_end", index=1, call=call)


@pytest.mark.parametrize(
    ("pieces", "arguments"),
    [
        ([], {}),
        ([("a", "string", "x")], {"a": "x"}),
        ([("a", "string", 'say "so"\n'), ("a", "string", "\\ü")], {"a": 'say "so"\n\\ü'}),
        ([("n", "number", "1"), ("n", "number", "2.5"), ("s", "string", "12")], None),
        ([("list", "array", "[1,"), ("list", "array", " 2]")], {"list": [1, 2]}),
        ([("broken", "object", "{oops")], {"broken": "{oops"}),
        ([("odd", "number", "NaN")], {"odd": "NaN"}),
    ],
)
def test_arguments_join_to_the_object_that_the_call_has(pieces, arguments):
    arguments = {"n": 12.5, "s": "12"} if arguments is None else arguments
    events = [Event("tool_argument", text, 1, key, kind) for key, kind, text in pieces]
    text, _, called = written([Event("tool_start", "f", 1), *events, call_event(arguments)])
    assert json.loads(text) == arguments and called == 1


def test_an_argument_without_text_is_there_too():
    events = [Event("tool_argument", "x", 1, "a", "string"), call_event({"a": "x", "b": ""})]
    assert json.loads(written([Event("tool_start", "f", 1), *events])[0]) == {"a": "x", "b": ""}


def test_a_json_block_is_passed_on_as_it_is():
    events = [Event("tool_argument", text, 1, None, "object") for text in ('{"a":', " [1]}")]
    text, pieces, _ = written([Event("tool_start", "f", 1), *events, call_event({"a": [1]})])
    assert (text, pieces) == ('{"a": [1]}', 3)


def test_random_calls_that_are_enforced_join_to_what_they_say(loaded):
    """Arguments as the model writes them at a high temperature, through parser and writer."""
    model, tokenizer = loaded
    for seed in range(4):
        tools = [CALCULATOR, CONVERT]
        ask = make_ask(
            tokenizer,
            "Hello!",
            tools=tools,
            tool_choice="required",
            temperature=1.6,
            seed=seed,
            max_tokens=400,
            reasoning_effort="none",
        )
        assert constrain(tokenizer, tools=tools, tool_choice="required") is not None
        mx.random.seed(seed)
        answer, joined = Answer(len(ask.ids), [], None), {}
        for chunk in run(model, tokenizer, ask.ids, ask.parser, ask.sampling):
            for call in answer.take(chunk).tool_calls:
                known = joined.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name", "")
                known[1] += call["function"]["arguments"]
        if chunk.reply.finish_reason == "length":
            continue
        functions = [call["function"] for call in chunk.reply.message["tool_calls"]]
        assert [[f["name"], f["arguments"]] for f in functions] == [
            [name, json.loads(text)] for name, text in joined.values()
        ]
