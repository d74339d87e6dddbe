"""``mlx-k3 chat`` from a pipe and on a terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from mlx_k3 import nano
from mlx_k3.cli import main
from mlx_k3.cli.chat import recommended_sampling
from mlx_k3.cli.terminal import AnswerPrinter
from mlx_k3.convert.stream import convert
from mlx_k3.errors import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("chat") / "nano"
    convert(nano.path(), out, trunk="bf16")
    return out


@pytest.fixture
def chat(monkeypatch, capsys, folder, tmp_path):
    """Pipes lines into the command in this process."""
    monkeypatch.setattr("typer.get_app_dir", lambda name: str(tmp_path / "data" / name))
    monkeypatch.setattr("mlx_k3.cli.prompts.prompts_folder", lambda: tmp_path / "prompts")

    def run(*lines: str, options=("--temp", "0", "--max-tokens", "4", "--no-thinking")):
        monkeypatch.setattr(sys, "argv", ["mlx-k3", "chat", str(folder), *options])
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        return code, *capsys.readouterr()

    return run


def test_each_line_of_a_pipe_is_a_message(chat, tmp_path):
    talk = tmp_path / "my talk.json"
    code, out, _ = chat("Hello", "", "And you?", f"/save {talk}", "/stats", "/exit", "not read")
    assert code == 0
    saved = json.loads(talk.read_text())
    asked = [m["content"] for m in saved["messages"] if m["role"] == "user"]
    assert asked == ["Hello", "And you?"]
    answers = [m["content"] for m in saved["messages"] if m["role"] == "assistant"]
    assert out.startswith("".join(f"{answer}\n" for answer in answers))
    assert "2 answers, 8 tokens" in out


def test_a_loaded_conversation_goes_on_as_the_saved_one_would(chat, tmp_path):
    talk, one, two = (tmp_path / name for name in ("talk.json", "one.json", "two.json"))
    chat("Hello", f"/save {talk}", "More", f"/save {one}")
    chat("something else", f"/load {talk}", "More", f"/save {two}")
    assert json.loads(two.read_text()) == json.loads(one.read_text())


def test_reset_and_system_change_what_is_read(chat, tmp_path):
    talk = tmp_path / "talk.json"
    code, out, _ = chat(
        "/system", "/system Be brief.", "/system", "Hello", "/reset", "Again", f"/save {talk}"
    )
    assert code == 0
    assert out.startswith("no system message\nBe brief.\n")
    saved = json.loads(talk.read_text())
    assert saved["system"] == "Be brief."
    assert [m["content"] for m in saved["messages"]][:1] == ["Again"]


def test_only_the_bundled_model_is_introduced(chat):
    assert chat("/exit") == (0, "", "")


def test_help_names_every_command(chat):
    _, out, _ = chat("/help")
    commands = (
        "help",
        "reset",
        "image",
        "video",
        "retry",
        "save",
        "load",
        "system",
        "stats",
        "exit",
    )
    for command in commands:
        assert f"/{command} " in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/jump", "no command /jump"),
        ("/save", "/save needs a name"),
        ("/load /no/such/file", "No such file"),
    ],
)
def test_a_mistake_in_a_pipe_ends_it_with_exit_code_2(chat, line, message):
    code, _, err = chat(line, "Hello")
    assert code == 2
    assert err.startswith("mlx-k3: ") and message in err


def test_a_path_at_the_beginning_of_a_message_is_no_command(chat, tmp_path):
    code, _, _ = chat("/usr/bin is a folder", f"/save {tmp_path / 'talk.json'}")
    assert code == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][0]["content"] == "/usr/bin is a folder"


def test_an_answer_cut_short_is_said_to_be(chat):
    _, _, err = chat("Hello")
    assert "the answer was cut at 4 tokens" in err
    _, out, err = chat("Hello", options=("--temp", "0", "--max-tokens", "4"))
    assert (out, "the thinking was cut at 4 tokens" in err) == ("", True)


def test_recommended_sampling_is_that_of_the_model(tmp_path):
    assert recommended_sampling(tmp_path) == {"temperature": 1.0, "top_p": 1.0}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_p": 0.95, "eos_token_id": 3}')
    assert recommended_sampling(tmp_path) == {"temperature": 0.6, "top_p": 0.95}
    for damaged in ("{", "[]", '{"top_p": "x"}'):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match="generation_config"):
            recommended_sampling(tmp_path)


class FakeChunk:
    def __init__(self, text="", reasoning=""):
        self.text, self.reasoning = text, reasoning


def test_a_terminal_gets_no_escape_sequences_from_the_model(monkeypatch):
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    printer = AnswerPrinter()
    printer.show(FakeChunk(reasoning="hm \x1b[31m"))
    printer.show(FakeChunk(text="[bold]\x1b]0;title\x07 \ttab\n"))
    printer.end()
    assert out.getvalue() == ("\x1b[2mhm \ufffd[31m\x1b[0m\n\n[bold]\ufffd]0;title\ufffd \ttab\n\n")


class Terminal:
    """The command on a pseudo-terminal, as a person has it."""

    def __init__(self, home, *arguments):
        self._end, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_k3", "chat", *map(str, arguments)],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "TERM": "xterm", "HOME": str(home), "COLUMNS": "200"},
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 30) -> str:
        """Read on until ``pattern`` appears after what was matched before."""
        deadline = time.monotonic() + seconds
        while True:
            if match := re.search(pattern, self.seen, re.DOTALL):
                before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
                return before
            ready, _, _ = select.select([self._end], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; instead: {self.seen!r}"
            text = os.read(self._end, 65536).decode(errors="replace")
            # prompt_toolkit asks where the cursor is, and waits a little for an answer.
            if "\x1b[6n" in text:
                os.write(self._end, b"\x1b[1;1R")
            self.seen += text

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_conversation_on_a_terminal(folder, tmp_path):
    talk = tmp_path / "talk.json"
    # So hot that it babbles on instead of answering.
    options = ("--max-tokens", "20000", "--seed", "1", "--temp", "20")
    terminal = Terminal(tmp_path, folder, *options)
    try:
        terminal.expect("lists the commands")
        terminal.expect(">")
        terminal.type("two\x1b\rlines\r")
        terminal.expect("\x1b\\[2m.+\x1b\\[0m")  # dimmed thinking begins
        time.sleep(0.3)
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.expect("stopped")
        terminal.type("/nonsense\r")
        terminal.expect("no command /nonsense")
        terminal.type("/stats\r")
        terminal.expect("1 answers")
        terminal.type(f"/save {talk}\r")
        terminal.expect("2 messages in.+>")
        terminal.type("\x03")
        terminal.expect("Ctrl-D or /exit leaves.+>")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
    question, answer = json.loads(talk.read_text())["messages"]
    assert question["content"] == "two\nlines"
    assert answer["reasoning_content"]
