"""Conversations with names: saved, taken up, listed and deleted."""

import io
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from mlx_k3 import nano
from mlx_k3.chat.saved import NamedSessions, is_name, read_saved, write_saved
from mlx_k3.cli import main
from mlx_k3.cli.sessions import _age
from mlx_k3.errors import K3Error

ORIGINAL = nano.converted()
OPTIONS = ("--temp", "0", "--max-tokens", "80")


@pytest.fixture
def data(monkeypatch, tmp_path):
    """Where this user's sessions and states are."""
    monkeypatch.setattr("typer.get_app_dir", lambda name: str(tmp_path / "data"))
    monkeypatch.setattr(nano, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "data" / "sessions"


@pytest.fixture
def command(monkeypatch, capsys, data):
    """Runs mlx-k3 in this process, with lines to type."""

    def run(*arguments: str, lines: tuple[str, ...] = ()):
        monkeypatch.setattr(sys, "argv", ["mlx-k3", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        return code, *capsys.readouterr()

    return run


def chat(command, *lines: str, options: tuple[str, ...] = ()):
    code, out, err = command("chat", str(ORIGINAL), *OPTIONS, *options, lines=lines)
    assert code == 0, err
    return out, err


def listed(command):
    code, out, _ = command("sessions", "--json")
    assert code == 0
    return {session["name"]: session for session in json.loads(out)["sessions"]}


def test_a_resumed_session_goes_on_as_if_it_had_never_stopped(command, data):
    whole, _ = chat(command, "What is 12 + 30?", "And 5 + 5?", "/save whole")
    chat(command, "What is 12 + 30?", "/save talk")
    out, err = chat(command, "And 5 + 5?", "/stats", options=("--resume", "talk"))
    assert "2 messages of talk" in err
    answers = whole.splitlines()
    assert out.splitlines()[0] == answers[1]
    # What was read before was not read again: only the new message, and what closes the old one.
    counts = re.search(r"prompts of (\d+) tokens, (\d+) of them kept from before", out)
    asked, kept = map(int, counts.groups())
    assert 0 < asked - kept < 40 < kept
    # Saved by itself after the answer.
    assert read_saved(data / "talk.json")["messages"] == read_saved(data / "whole.json")["messages"]
    assert [session["messages"] for session in listed(command).values()] == [4, 4]


@pytest.mark.parametrize("other", ["/reset", "/load b"])
def test_another_conversation_does_not_take_a_resumed_one_s_place(command, data, other):
    chat(command, "Hello", "/save b", "/save talk")
    before = (data / "talk.json").read_text()
    chat(command, other, "What is 12 + 30?", options=("--resume", "talk"))
    assert (data / "talk.json").read_text() == before


def test_a_session_works_without_what_is_kept_of_it(command, data, tmp_path):
    chat(command, "What is 12 + 30?", "/save talk")
    with_states, _ = chat(command, "/load talk", "And 5 + 5?")
    for file in (tmp_path / "cache" / "prompts").iterdir():
        file.unlink()
    assert listed(command)["talk"]["state_bytes"] == 0
    without, _ = chat(command, "/load talk", "And 5 + 5?")
    assert without == with_states


def test_retry_answers_again_or_something_else(command):
    out, _ = chat(command, "What is 12 + 30?", "/retry", "/retry What is 2 + 2?", "/stats")
    first, again, other, *_ = out.splitlines()
    assert first == again != other
    code, _, err = command("chat", str(ORIGINAL), lines=("/retry",))
    assert code == 2 and "nothing has been asked" in err


def test_the_list_tells_size_and_age(command, data):
    assert command("sessions")[1:] == ("", "no sessions; /save NAME in a chat makes one\n")
    chat(command, "Hello", "/save my first talk", "/save b")
    os.utime(data / "b.json", (time.time() - 7200,) * 2)
    _, out, _ = command("sessions")
    header, first, second = (line.split() for line in out.splitlines())
    assert header == ["name", "messages", "size", "saved"]
    assert first[:4] == ["my", "first", "talk", "2"] and first[-3:] == ["a", "moment", "ago"]
    assert second[:2] == ["b", "2"] and second[-3:] == ["2", "hours", "ago"]
    facts = listed(command)["b"]
    assert facts["bytes"] == (data / "b.json").stat().st_size
    assert facts["state_bytes"] > 100_000
    assert 7200 <= facts["age_seconds"] < 7300


def test_deleting_takes_what_only_that_session_needs(command, data, tmp_path):
    prompts = tmp_path / "cache" / "prompts"
    chat(command, "What is 12 + 30?", "/save one", "And 5 + 5?", "/save two")
    both = listed(command)
    assert both["one"]["state_bytes"] < both["two"]["state_bytes"]
    assert command("sessions", "--delete", "two")[0] == 0
    assert listed(command) == {"one": pytest.approx(both["one"], abs=100)}
    # The states of `one` are still there.
    assert sum(file.stat().st_size for file in prompts.iterdir()) == both["one"]["state_bytes"]
    assert command("sessions", "--delete", "one")[0] == 0
    assert listed(command) == {} and list(prompts.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "lines", "message"),
    [
        (("sessions", "--delete", "none"), (), "there is no session 'none'"),
        (("sessions", "--delete", "../x"), (), "cannot name a session"),
        (("chat", str(ORIGINAL), "--resume", "none"), (), "mlx-k3 sessions lists"),
        (("chat", str(ORIGINAL), "--resume", ".x"), (), "cannot name a session"),
        (("chat", str(ORIGINAL)), ("/load none",), "there is no session 'none'"),
        (("chat", str(ORIGINAL)), ("/save",), "/save needs a name"),
        (("chat", str(ORIGINAL)), ("/save .x",), "cannot name a session"),
        (("chat", str(ORIGINAL)), ("/load none.json",), "none.json: No such file"),
    ],
)
def test_mistakes_are_told_in_a_line(command, arguments, lines, message):
    code, _, err = command(*arguments, lines=lines)
    assert code == 2
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize("option", ["--no-thinking", "--system=x"])
def test_a_resumed_session_has_its_own_settings(command, data, option):
    chat(command, "Hello", "/save talk")
    code, _, err = command("chat", str(ORIGINAL), "--resume", "talk", option)
    assert code == 2 and "has its own" in err


def test_only_names_are_names():
    for text in ("talk", "my talk", "a.b", "Gespräch-2"):
        assert is_name(text)
    for text in ("a/b", "/tmp/x", "talk.json", "~/talk"):
        assert not is_name(text)
    assert str(NamedSessions(Path("folder")).path("Gespräch 2.1_x")) == "folder/Gespräch 2.1_x.json"
    for text in ("", " ", ".hidden", "a\nb", "x" * 101, "a*"):
        with pytest.raises(K3Error, match="cannot name"):
            NamedSessions(Path("folder")).path(text)


def test_saving_replaces_a_file_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "talk.json"
    write_saved(path, {"messages": []})
    before = path.read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(K3Error, match="No space left"):
        write_saved(path, {"messages": [1] * 1000})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_no_sessions_are_not_listed(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.txt").write_text("")
    write_saved(tmp_path / "c.json", {"messages": [], "states": "no list"})
    assert [session.name for session in NamedSessions(tmp_path)] == ["c"]
    assert list(NamedSessions(tmp_path / "none")) == []


def test_ages_are_in_the_largest_unit():
    ages = {3: "a moment", 60: "1 minute", 3599: "59 minutes", 7200: "2 hours", 10**6: "11 days"}
    assert {seconds: _age(seconds) for seconds in ages} == ages
