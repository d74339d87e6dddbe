"""The command line's frame: help, exit codes, errors as one line."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mlx_k3 import K3Error, cli

from .conftest import REPOSITORY

COMMANDS = sorted(typer.main.get_command(cli.app).commands)


def run(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlx_k3", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_the_commands() -> None:
    assert {"chat", "convert", "doctor", "generate", "inspect", "verify"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"mlx-k3 {command}" in result.stdout.split("Examples:")[1]


def test_without_a_command_the_help_is_shown() -> None:
    result = run()
    assert result.returncode == 2
    shown = result.stdout + result.stderr
    assert all(command in shown for command in COMMANDS)


def test_help_is_quick() -> None:
    """In seconds of the processor, whatever else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "{missing}", "--prompt", "x"),
        ("generate", "{empty}", "--prompt", "x"),
        ("chat", "{missing}"),
        ("convert", "{missing}", "{out}"),
        ("convert", "{empty}", "{out}"),
        ("inspect", "{missing}"),
        ("inspect", "{empty}"),
        ("verify", "{missing}"),
        ("verify", "{empty}"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple, tmp_path: Path) -> None:
    (tmp_path / "nothing in here").mkdir()
    places = {
        "missing": tmp_path / "no such folder",
        "empty": tmp_path / "nothing in here",
        "out": tmp_path / "out",
    }
    result = run(*(argument.format(**places) for argument in arguments))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mlx-k3: ") and result.stderr.count("\n") == 1
    assert str(tmp_path) in result.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_options_are_refused() -> None:
    assert run("generate", "--no-such-option").returncode == 2
    assert run("no-such-command").returncode == 2


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (K3Error("layer 3: too short"), 2, "mlx-k3: layer 3: too short\n"),
        (KeyboardInterrupt(), 130, ""),
        (ImportError("libmlx.so: cannot open"), 2, "mlx-k3: MLX has no backend here"),
    ],
)
def test_errors_become_exit_codes(
    raised: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def app() -> None:
        raise raised

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == code
    assert capsys.readouterr().err.startswith(line)


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise ImportError("no module named typo")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(ImportError):
        cli.main()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_exits_with_130() -> None:
    """Interrupted while it waits for the prompt on standard input."""
    code = "from mlx_k3.cli import main; print('ready', flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", ".", "--prompt", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in shown


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m mlx_k3 --help | true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in result.stderr and "BrokenPipe" not in result.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_what_the_pages_tell_people_to_type_exists(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    typed = [block for block in text.split("```")[1::2] if block.startswith("sh\n")]
    lines = [line.split("#")[0].split() for block in typed for line in block.splitlines()[1:]]
    for command, *arguments in filter(None, lines):
        if command.startswith("./"):
            assert os.access(REPOSITORY / command, os.X_OK)
        elif command == "mlx-k3":
            known = typer.main.get_command(cli.app).commands[arguments[0]]
            options = {name for parameter in known.params for name in parameter.opts}
            assert {word for word in arguments if word.startswith("--")} <= options
        else:
            raise AssertionError(f"{page}: {command}?")
