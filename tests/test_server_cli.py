"""``mlx-k3 serve`` on the command line: what it refuses before a model is loaded."""

import dataclasses
import inspect
import socket
import sys

import pytest

from mlx_k3 import nano
from mlx_k3.cli import main
from mlx_k3.cli.loading import Loading
from mlx_k3.cli.serve import serve
from mlx_k3.convert.stream import convert
from mlx_k3.errors import K3Error
from mlx_k3.loader import plan_load
from mlx_k3.server.run import bind, url_of

from .support.server import serving


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs the command, which must end with exit code 2; returns what it says."""

    def run(*options: str) -> str:
        monkeypatch.delenv("MLX_K3_API_KEY", raising=False)
        monkeypatch.setattr(sys, "argv", ["mlx-k3", "serve", str(nano.converted()), *options])
        monkeypatch.setattr("mlx_k3.loader.load", None)  # it does not come to this
        with pytest.raises(SystemExit) as raised:
            main()
        assert raised.value.code == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "lets other machines in; give an --api-key"),
        (("--host", "::"), "lets other machines in"),
        (("--host", "no such host"), "--host no such host: "),
        (("--api-key", ""), "--api-key is empty"),
        (("--max-body", "big"), "is not a size"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--temp", "-1"), "the temperature is -1"),
        (("--top-p", "2"), "top_p is 2"),
        (("--memory", "much"), "is not a size"),
        (("--policy", "fifo"), "--policy fifo"),
        (("--port", "70000"), "65535"),
    ],
)
def test_what_is_refused_at_once(refused, options, said):
    assert said in refused(*options)


def test_it_loads_with_all_options_that_loading_has():
    options = set(inspect.signature(serve).parameters)
    assert {field.name for field in dataclasses.fields(Loading)} <= options


def test_a_port_that_is_taken_is_told(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: Address already in use" in refused("--port", str(port))


def test_where_it_may_listen():
    for host in ("127.0.0.1", "localhost"):
        with bind(host, 0, has_key=False) as listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    for how in ({"has_key": True}, {"has_key": False, "open_to_all": True}):
        with bind("0.0.0.0", 0, **how) as listener:
            assert url_of(listener).startswith("http://0.0.0.0:")
    with pytest.raises(K3Error, match="--without-key"):
        bind("0.0.0.0", 0, has_key=False)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_address_of_the_sixth_version():
    try:
        listener = bind("::1", 0, has_key=False)
    except K3Error as e:
        pytest.skip(str(e))
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_a_model_without_tokenizer_is_not_served(tmp_path, monkeypatch, capsys, golden):
    convert(golden / "tiny-text", tmp_path / "model", trunk="bf16")
    for file in ("tokenizer.json", "tokenizer_config.json", "tiktoken.model"):
        (tmp_path / "model" / file).unlink(missing_ok=True)
    monkeypatch.setattr(sys, "argv", ["mlx-k3", "serve", str(tmp_path / "model"), "--port", "0"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2 and "has no tokenizer" in capsys.readouterr().err


def test_experts_on_demand_and_their_figures():
    """With all loading options, under the folder's name, and without a key."""
    plan = plan_load(nano.converted(), None, context_tokens=1024)
    memory = (plan.minimum_bytes + plan.resident_bytes) // 2
    options = ("--memory", str(memory), "--context", "1k", "--policy", "lfu", "--no-prefetch")
    with serving(*options, key=None, model=nano.converted()) as server:
        client = server.client()
        [model] = client.models.list().data
        assert model.id == nano.converted().name
        reply = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "What is 47 + 85?"}]
        )
        assert reply.choices[0].message.content == "47 + 85 = 132."
        assert server.figure("mlx_k3_expert_read_bytes_total") > 1e5
        assert 0 < server.figure("mlx_k3_expert_hit_rate") < 1
        assert server.figure("mlx_k3_expert_slots") > 0
        assert server.end() == 0
