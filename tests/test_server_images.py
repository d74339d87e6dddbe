"""Pictures in requests to a real server, sent by OpenAI's client."""

import base64
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import openai
import pytest

from mlx_k3 import generate, load
from mlx_k3.media.attachments import MAX_ATTACHMENTS

from .support.seeing import photo, png, seeing_model
from .support.server import serving


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url: str, **more: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **more}}


PHOTO = image(url_of(png(photo(1))))


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    return seeing_model(golden, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What the server's owner lets requests name: a folder, and it is on the web too."""
    shared = tmp_path_factory.mktemp("shared")
    (shared / "a photo.png").write_bytes(png(photo(1)))
    (shared / "notes.txt").write_text("private")
    (shared / "out.png").symlink_to("/etc/hostname")
    return shared


@pytest.fixture(scope="module")
def web(shared):
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            away = {"/away": (shared / "a photo.png").as_uri(), "/moved": "/a%20photo.png"}
            if self.path not in away:
                return super().do_GET()
            self.send_response(302)
            self.send_header("Location", away[self.path])
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=shared)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def client(folder):
    with serving("--max-body", "4MB", model=folder) as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def open_client(folder, shared):
    options = ("--allow-files", str(shared), "--allow-urls")
    with serving(*options, model=folder) as server, server.client() as client:
        yield client


def ask(client, *parts, **options):
    content = [*parts, {"type": "text", "text": "What is this?"}]
    options = {"max_tokens": 8, "reasoning_effort": "none"} | options
    return client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": content}], **options
    )


def refused(client, *parts, **options) -> openai.APIStatusError:
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, *parts, **options)
    assert "\n" not in e.value.body["message"]
    return e.value


def test_a_data_url_is_seen_as_python_sees_it(client, folder):
    reply = ask(client, PHOTO)
    expected = generate(
        *load(folder), "What is this?", images=[photo(1)], max_tokens=8, thinking=False
    )
    assert reply.choices[0].message.content == expected
    stream = ask(client, PHOTO, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == expected


def test_pictures_go_with_all_that_a_request_may_ask_for(client):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    for options in (
        {"response_format": {"type": "json_object"}, "reasoning_effort": "low"},
        {"tools": [tool], "tool_choice": "required"},
        {"logprobs": True, "top_logprobs": 2, "frequency_penalty": 1.0, "stop": ["x"]},
        {"extra_body": {"repetition_penalty": 1.2}},
    ):
        reply = ask(client, PHOTO, **options)
        assert reply.choices[0].finish_reason in ("length", "stop", "tool_calls")
        assert reply.usage.completion_tokens > 0


def test_another_picture_is_read_anew_and_the_same_is_not(client):
    first = ask(client, image(url_of(png(photo(5))))).usage
    again = ask(client, image(url_of(png(photo(5))), detail="high")).usage
    other = ask(client, image(url_of(png(photo(6))))).usage
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1
    assert first.prompt_tokens == other.prompt_tokens
    assert other.prompt_tokens_details.cached_tokens < other.prompt_tokens - 20


@pytest.mark.parametrize(
    ("part", "code", "message"),
    [
        (image("file:///etc/passwd"), "url_not_allowed", "--allow-files"),
        (image("https://localhost/a.png"), "url_not_allowed", "--allow-urls"),
        (image("/etc/passwd"), "url_not_allowed", "no scheme"),
        (image("ftp://localhost/a.png"), "url_not_allowed", "'ftp'"),
        ({"type": "image", "image": "/etc/passwd"}, "unsupported_content", "'image'"),
        ({"type": "input_audio", "input_audio": {}}, "unsupported_content", "'input_audio'"),
        ({"type": "image_url"}, "missing_required_parameter", "url is required"),
        ({"type": "image_url", "attachment": {}}, "missing_required_parameter", "url is required"),
        (image(url_of(png(photo())[:500])), "invalid_image", "cut off"),
        (image(url_of(b"Dear diary", "image/jpeg")), "invalid_image", "no picture"),
        (image("data:image/png;base64,?"), "invalid_image", "base64"),
        (image(url_of(png(photo())), detail="low"), "unsupported_value", "detail"),
        (
            {"type": "video_url", "video_url": {"url": url_of(b"no film", "video/mp4")}},
            "invalid_video",
            "no video",
        ),
    ],
)
def test_what_cannot_be_seen_is_refused_in_openai_s_form(client, part, code, message):
    error = refused(client, part)
    assert (error.code, error.type) == (code, "invalid_request_error")
    assert error.param.startswith("messages[0].content[0]")
    assert message in error.body["message"]
    assert "root:" not in str(error.body)


def test_too_many_pictures_and_pictures_too_large(client):
    small = image(url_of(png(photo(width=28, height=28))))
    error = refused(client, *[small] * 50)
    assert (error.code, error.param) == ("too_many_images", "messages")
    assert f"at most {MAX_ATTACHMENTS}" in error.body["message"]
    large = np.zeros((1400, 1400, 3), np.uint8)
    error = refused(client, image(url_of(png(large))), image(url_of(png(large))))
    assert error.code == "context_length_exceeded"
    assert error.param == "messages[0].content[1]"


def test_files_of_the_folder_that_is_allowed_and_no_others(open_client, shared):
    expected = ask(open_client, PHOTO).choices[0].message.content
    url = (shared / "a photo.png").as_uri()
    assert ask(open_client, image(url)).choices[0].message.content == expected
    for name, message in (
        ("/etc/passwd", "not in the folder"),
        (f"{shared}/../secret.png", "not in the folder"),
        (f"{shared}/out.png", "not in the folder"),
        (f"{shared}/none.png", "no such file"),
        (f"{shared}/notes.txt", "is no picture"),
    ):
        error = refused(open_client, image(f"file://{name}"))
        assert (error.code, message in error.body["message"]) == ("invalid_image", True)


def test_addresses_are_fetched_if_that_is_allowed(open_client, web):
    expected = ask(open_client, PHOTO).choices[0].message.content
    for path in ("a%20photo.png", "moved"):
        assert ask(open_client, image(f"{web}/{path}")).choices[0].message.content == expected
    for path, message in (
        ("none.png", "status 404"),
        ("notes.txt", "is no picture"),
        ("away", "status 302"),  # to a file, where it is not followed
    ):
        error = refused(open_client, image(f"{web}/{path}"))
        assert (error.code, message in error.body["message"]) == ("invalid_image", True)
    error = refused(open_client, image("http://127.0.0.1:9/x.png"))
    assert "cannot be fetched" in error.body["message"]


def test_a_server_that_sees_nothing_says_so(folder):
    with serving("--no-vision", model=folder) as server, server.client() as client:
        error = refused(client, PHOTO)
        assert (error.code, error.param) == ("unsupported_content", "messages[0].content[0]")
        assert "vision" in error.body["message"]
        assert ask(client).choices[0].finish_reason
