"""The server under many clients, clients that leave, and signals that end it."""

import json
import random
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from .support.server import KEY, MODEL, Server, ask, serving

ENDLESS = {"logit_bias": {"1538": -100, "1540": -100, "1537": -100}}
"""Nothing ends the answer of such a request but its limit."""
LONG = {"max_tokens": 1500, **ENDLESS}


SUM, RIGHT = "What is 47 + 85?", "47 + 85 = 132."
QUESTIONS = (SUM, "Hello!", "What is 12 * 3?", "Who are you?", "Sort: 4, 2, 9.")


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def answers(server):
    """What each question is answered when nobody else asks."""
    with server.client(timeout=60) as client:
        alone = {text: ask(client, text).choices[0].message.content for text in QUESTIONS}
    assert alone[SUM] == RIGHT
    return alone


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def raw_request(server: Server, text: str, **options) -> socket.socket:
    """A request on a socket of its own; nothing is read."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **options}
    content = json.dumps(body).encode()
    where = urlsplit(server.base_url)
    connection = socket.create_connection((where.hostname, where.port), timeout=30)
    connection.sendall(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return connection


def is_idle(server: Server) -> bool:
    return not server.figure("mlx_k3_running") and not server.figure("mlx_k3_queue_waiting")


def test_twenty_clients_at_once(server, answers):
    def one(number: int) -> None:
        question = QUESTIONS[number % len(QUESTIONS)]
        with server.client(timeout=120) as client:
            if number % 2:
                chunks = ask(client, question, stream=True)
                said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                said = ask(client, question).choices[0].message.content
        assert said == answers[question]

    with ThreadPoolExecutor(20) as clients:
        list(clients.map(one, range(20)))
    assert is_idle(server)


def test_who_waits_is_told_how_many_are_ahead(server):
    with server.client(timeout=60) as client:
        first = raw_request(server, "Hello!", **LONG)
        wait_for(lambda: server.figure("mlx_k3_running") == 1)
        second = raw_request(server, "Hello!", **LONG)
        wait_for(lambda: server.figure("mlx_k3_queue_waiting") == 1)
        third = raw_request(server, "Hello!", stream=True, max_tokens=3)
        assert b"x-queue-position: 2" in third.recv(4096).lower()
        threading.Timer(0.2, second.close).start()
        wait_for(lambda: b": waiting, 1 ahead" in third.recv(4096))
        first.close()
        heard = b""
        while b"[DONE]" not in heard:
            heard += third.recv(4096)
        third.close()
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello!"}], max_tokens=1
        )
        assert raw.headers["x-queue-position"] == "0"
        assert "1 ahead" in server.log or "2 ahead" in server.log


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_stops_their_work_at_once(server, stream):
    before = server.figure("mlx_k3_cancelled_total")
    tokens = server.figure("mlx_k3_generated_tokens_total")
    running = raw_request(server, "Hello!", stream=stream, **LONG)
    wait_for(lambda: server.figure("mlx_k3_running") == 1)
    waiting = raw_request(server, "Hello!", stream=stream, **LONG)
    wait_for(lambda: server.figure("mlx_k3_queue_waiting") == 1)
    waiting.close()
    wait_for(lambda: server.figure("mlx_k3_queue_waiting") == 0, 5)
    assert server.figure("mlx_k3_running") == 1
    running.close()
    wait_for(lambda: server.figure("mlx_k3_running") == 0, 5)
    assert server.figure("mlx_k3_cancelled_total") == before + 2
    assert server.figure("mlx_k3_generated_tokens_total") - tokens < LONG["max_tokens"]


def test_a_hundred_clients_leave_at_random_and_the_next_answer_is_right(server):
    rng = random.Random(5)
    connections = []
    for _ in range(100):
        stream, text = rng.random() < 0.5, rng.choice(QUESTIONS) * rng.choice((1, 1, 40))
        connections.append(raw_request(server, text, stream=stream))
        time.sleep(rng.random() * 0.1)
        if rng.random() < 0.7:
            leaving = connections.pop(rng.randrange(len(connections)))
            if rng.random() < 0.5:
                # A reset instead of a farewell.
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            leaving.close()
    for connection in connections:
        connection.close()
    with server.client(timeout=60) as client:
        assert ask(client, SUM).choices[0].message.content == RIGHT
    wait_for(lambda: is_idle(server), 5)
    assert server.figure("mlx_k3_cancelled_total") > 20
    assert "Traceback" not in server.log


def _threads(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"^Threads:\s+(\d+)$", status, re.M)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("before", "then"), [(20, 40), pytest.param(200, 1000, marks=pytest.mark.slow)]
)
def test_many_requests_leave_nothing_behind(server, before, then):
    def requests(count: int) -> None:
        with server.client(timeout=120) as client:
            whole = ask(client, SUM, reasoning_effort="none").choices[0].message.content
            for number in range(count):
                options = {"max_tokens": 1 + number % 8, "stream": number % 3 == 0}
                reply = ask(client, SUM, reasoning_effort="none", **options)
                if options["stream"]:
                    said = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
                else:
                    said = reply.choices[0].message.content
                assert said and whole.startswith(said)

    requests(before)
    memory, threads = server.figure("process_resident_memory_bytes"), _threads(server)
    files = server.figure("process_open_fds")
    requests(then)
    assert _threads(server) <= threads
    assert server.figure("process_open_fds") <= files + 2
    assert server.figure("process_resident_memory_bytes") < memory + 15e6


def test_a_full_queue_refuses_until_there_is_room():
    with serving("--max-queue", "1") as server, server.client(timeout=60) as client:
        running = raw_request(server, "Hello!", **LONG)
        wait_for(lambda: server.figure("mlx_k3_running") == 1)
        waiting = raw_request(server, "Hello!", **LONG)
        wait_for(lambda: server.figure("mlx_k3_queue_waiting") == 1)
        with pytest.raises(openai.RateLimitError) as raised:
            ask(client, "Hello!")
        assert raised.value.body["code"] == "queue_full"
        assert int(raised.value.response.headers["retry-after"]) > 0
        waiting.close()
        running.close()
        wait_for(lambda: is_idle(server), 5)
        assert ask(client, "Hello!", max_tokens=1).usage.completion_tokens == 1


def test_sigterm_answers_first_what_was_accepted():
    with serving() as server, ThreadPoolExecutor(3) as clients:
        client = server.client(timeout=60)
        first = clients.submit(ask, client, "Hello!", max_tokens=200, **ENDLESS)
        wait_for(lambda: server.figure("mlx_k3_running") == 1)
        asked = [clients.submit(ask, client, SUM) for _ in range(2)]
        wait_for(lambda: server.figure("mlx_k3_queue_waiting") == 2)
        assert server.end(signal.SIGTERM) == 0
        assert first.result().usage.completion_tokens == 200
        for answer in asked:
            assert answer.result().choices[0].message.content == RIGHT
        with pytest.raises(openai.APIConnectionError):
            ask(client, "Hello!")
        assert "Traceback" not in server.log


def test_ctrl_c_gives_up_and_ends_cleanly():
    with serving() as server, ThreadPoolExecutor(2) as clients:
        client = server.client(timeout=60)
        running = clients.submit(ask, client, "Hello!", **LONG)
        waiting = clients.submit(lambda: list(ask(client, "Hello!", stream=True, **LONG)))
        wait_for(lambda: server.figure("mlx_k3_queue_waiting") == 1)
        begin = time.monotonic()
        assert server.end(signal.SIGINT) == 130
        assert time.monotonic() - begin < 5
        with pytest.raises(openai.InternalServerError) as raised:
            running.result()
        assert raised.value.body["code"] == "shutting_down"
        with pytest.raises(openai.APIError, match="shutting down"):
            waiting.result()
        assert "Traceback" not in server.log


def test_a_second_signal_ends_the_draining():
    with serving() as server:
        connection = raw_request(server, "Hello!", **LONG)
        wait_for(lambda: server.figure("mlx_k3_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        begin = time.monotonic()
        assert server.end(signal.SIGTERM) == 0
        assert time.monotonic() - begin < 5
        connection.close()
