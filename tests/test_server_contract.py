"""mlx-lm's own server beside ours: what ours takes from it, and why it is not a subclass.

If one of these fails after mlx-lm has changed, :mod:`mlx_k3.server` has to be looked at again.
"""

import inspect
import re
import socket
import subprocess
import sys
import time

import httpx2
import pytest
from mlx_lm.server import APIHandler

from mlx_k3 import nano
from mlx_k3.server.bodies import ChatRequest, CompletionRequest

from .support.server import MODEL, serving

# Fields of mlx-lm's that are refused here: there is one model, and no draft model or adapter.
NOT_TAKEN = {"adapters", "draft_model", "num_draft_tokens", "role_mapping"}
PROMPT = {"prompt": "47 + 85 =", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def theirs():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(nano.converted())]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    with httpx2.Client(base_url=url, timeout=60) as client:
        end = time.monotonic() + 60
        while True:
            try:
                client.get("/health")
                break
            except httpx2.TransportError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.1)
        yield client
    process.kill()
    process.wait(30)


@pytest.fixture(scope="module")
def ours():
    with serving(key=None) as server, httpx2.Client(timeout=60) as client:
        client.base_url = server.base_url.removesuffix("/v1")
        yield client


def test_every_field_that_their_handler_reads_is_known_here():
    source = inspect.getsource(APIHandler)
    fields = set(re.findall(r'body\.get\(\s*"(\w+)"', source))
    assert len(fields) > 20
    known = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert fields - known == NOT_TAKEN


def test_a_text_is_continued_alike(theirs, ours):
    one, two = (side.post("/v1/completions", json=PROMPT).json() for side in (theirs, ours))
    [first], [second] = one["choices"], two["choices"]
    # Their detokenizer takes a text's first blank away.
    assert first["text"] == second["text"].lstrip() != ""
    assert first["finish_reason"] == second["finish_reason"] == "length"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert one["usage"][name] == two["usage"][name]
    assert set(one) - set(two) == {"system_fingerprint"}
    assert set(first) <= set(second)


def test_a_chat_has_the_same_fields(theirs, ours):
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 60}
    one, two = (side.post("/v1/chat/completions", json=body).json() for side in (theirs, ours))
    assert set(one) - set(two) == {"system_fingerprint"}
    [first], [second] = one["choices"], two["choices"]
    assert set(first) <= set(second) and set(first["message"]) <= set(second["message"])


def test_what_keeps_ours_from_being_a_subclass(theirs):
    """Each of these is inside a method of theirs that does more than that."""
    body = {"messages": [{"role": "user", "content": "Hello!"}]}
    wrong = theirs.post("/v1/chat/completions", json={**body, "temperature": -1})
    assert isinstance(wrong.json()["error"], str)
    other = theirs.post("/v1/chat/completions", json={**body, "model": "/no/such/model"})
    assert other.status_code == 404 and "/no/such/model" in other.json()["error"]
    # The thinking has no field of its own, because the prompt opens it.
    message = theirs.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert set(message) == {"role", "content"}
    assert "urlopen" in inspect.getsource(sys.modules[APIHandler.__module__]._inline_image_urls)


def test_the_same_model_has_one_name_here(ours):
    assert ours.post("/v1/completions", json={**PROMPT, "model": MODEL}).status_code == 200
    refused = ours.post("/v1/completions", json={**PROMPT, "model": str(nano.converted())})
    assert refused.json()["error"]["code"] == "model_not_found"
