"""The bundled model as the default of commands: converted once, into the user's cache."""

import io
import sys
from pathlib import Path

import pytest

from mlx_k3 import K3Error, nano
from mlx_k3.cli import loading, main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which nothing is yet."""
    monkeypatch.setattr(nano, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_it_is_converted_once_and_that_is_said(
    cache: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not nano.is_converted()
    folder = loading.model_folder(None)
    first = capsys.readouterr().err
    assert "no MODEL given" in first and "preparing the bundled model" in first
    assert [folder] == list(cache.iterdir()) and (folder / "config.json").exists()
    assert nano.is_converted()

    monkeypatch.setattr("mlx_k3.convert.stream.convert", None)  # not called again
    assert loading.model_folder(None) == folder
    assert "preparing" not in capsys.readouterr().err


def test_a_given_folder_is_used_without_a_word(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture
) -> None:
    assert loading.model_folder(tmp_path) == tmp_path
    assert capsys.readouterr().err == "" and not cache.exists()


def test_its_progress_ends_at_all_bytes() -> None:
    calls: list[tuple[int, int, str]] = []
    nano.converted(lambda *call: calls.append(call))
    done, total, _ = calls[-1]
    assert done == total > 1000


def test_a_cache_that_cannot_be_written_is_one_line(cache: Path) -> None:
    cache.write_text("a file where the folder belongs")
    with pytest.raises(K3Error, match=r"cache: .+; the bundled model is converted into this") as e:
        nano.converted()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "arguments",
    [("chat", "--max-tokens", "3"), ("generate", "--prompt", "Hi", "--max-tokens", "3")],
)
def test_a_command_without_a_model_uses_it(
    arguments: tuple, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["mlx-k3", *arguments, "--no-thinking"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert not end.value.code
    assert out.strip() and "no MODEL given" in err
    assert ("I am K3 nano" in err) == (arguments[0] == "chat")
