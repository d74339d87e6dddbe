"""The programs in ``examples/``, run as a person would run them."""

import os
import re
import subprocess
import sys

import pytest

from .conftest import REPOSITORY
from .support.server import KEY, serving

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def run(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OPENAI_API_KEY": KEY},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_all_examples_are_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "python_import.py",
        "openai_client.py",
        "agent_with_tools.py",
    }


def test_a_model_in_a_python_program():
    said = run("python_import.py")
    assert "An answer: 47 + 85 = 132.\n" in said
    assert re.search(r"Thinking: .+\nAnd its answer: \S", said)
    assert "JSON: Mira is 34\n" in said
    first, second = re.findall(r"\((\d+) tokens known before\)", said)
    assert int(first) == 0 < int(second)


def test_openais_client(server):
    said = run("openai_client.py", server.base_url)
    assert re.search(r"Thinking: .+\nAnswer: 47 \+ 85 = 132\.\n", said)
    assert "JSON: Mira is 34\n" in said
    assert re.search(r"At once: Hello! .+\(least sure of '.+'\)\n\d+ \+ \d+ tokens", said)


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is 483 * 17?", "483 * 17 = 8211."), ("Hello!", "Hello! How can I help?")],
)
def test_an_agent(server, question, answer):
    said = run("agent_with_tools.py", question, server.base_url)
    assert said.splitlines()[-1] == answer
    assert ("calculator(" in said) == ("*" in question)
