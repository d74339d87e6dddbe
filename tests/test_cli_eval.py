"""``mlx-k3 eval`` from its arguments to its output and exit code."""

import io
import json
import random
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from mlx_k3 import load, nano, tasks
from mlx_k3.chat.xtml import encode_text
from mlx_k3.cli import loading, main
from mlx_k3.cli.eval import MOST_AT_ONCE, _at_once
from mlx_k3.convert.stream import convert
from mlx_k3.evaluation.perplexity import score_text
from mlx_k3.loader import plan_load

from .support.oracle import Oracle, transcripts

TEXT = "The delta rule writes what the memory got wrong, and nothing else.\n" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("a model's folder") / "nano"
    convert(nano.path(), out, trunk="bf16")
    return out


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """Runs the command in this process; gives its exit code, standard output and error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mlx-k3", "eval", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def knowing(monkeypatch, loaded):
    """Puts a model in the place of any folder's: it knows three sums of seed 5, and no more."""
    rng = random.Random("5 addition")
    examples = [tasks.example("addition", rng, "held-out") for _ in range(3)]
    tokenizer = loaded[1]
    spoken = [ids for example in examples for ids in transcripts(tokenizer, example)]
    oracle = Oracle(spoken, len(tokenizer.table.pieces), lost=tokenizer.encode("x")[0])
    oracle.plan = loaded[0].plan

    @contextmanager
    def open_model(folder, how):
        yield oracle, tokenizer

    monkeypatch.setattr(loading, "open_model", open_model)


def test_the_report(evaluate, folder, knowing):
    options = ("--seed", 5, "--items", 4, "--task", "addition", "--task", "talk", "--json")
    code, out, err = evaluate(folder, *options, "--max-tokens", 100)
    assert (code, err, out.count("\n")) == (0, "", 1)
    report = json.loads(out)
    assert report["tasks"] == {"addition": 0.75, "talk": 0.0}
    assert (report["model"], report["seed"], report["items"]) == (str(folder), 5, 4)
    assert (report["perplexity"], report["bits_per_byte"]) == ({}, {})
    assert report["tokens_per_second"] > 0
    sums = [failure for failure in report["failures"] if failure["family"] == "addition"]
    assert len(sums) == 1 and len(report["failures"]) == 1 + 3
    assert sums[0].keys() >= {"prompt", "expected", "got", "reasoning", "finish_reason"}
    assert sums[0]["finish_reason"] == "length"


def test_the_table(evaluate, folder, knowing):
    options = ("--seed", 5, "--items", 4, "--task", "addition", "--task", "talk")
    code, out, err = evaluate(folder, *options, "--max-tokens", 100)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["addition", "4", "75.0", "%", "30.1", "to", "95.4"] in rows
    assert ["talk", "4", "0.0", "%", "0.0", "to", "49.0"] in rows
    assert "Seed 5; " in out


def test_all_families_are_asked_unless_some_are_named(evaluate, folder, knowing):
    _, out, _ = evaluate(folder, "--items", 1, "--max-tokens", 1, "--json")
    assert list(json.loads(out)["tasks"]) == list(tasks.FAMILIES)


def test_a_seed_makes_it_repeatable_and_each_run_has_another(evaluate, folder):
    options = (folder, "--task", "sort", "--items", 2, "--max-tokens", 3, "--json")
    first, second = (json.loads(evaluate(*options)[1]) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = json.loads(evaluate(*options, "--seed", first["seed"])[1])
    assert again["failures"] == first["failures"] != second["failures"]


def test_texts(evaluate, folder, loaded, text, monkeypatch):
    code, out, err = evaluate(folder, "--text", text, "--context", 30, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    model, tokenizer = loaded
    ids = encode_text(TEXT, tokenizer)
    want = score_text(model, tokenizer.table, ids, window_tokens=30)
    assert report["perplexity"] == {str(text): pytest.approx(want.perplexity, rel=1e-4)}
    assert report["bits_per_byte"] == {str(text): pytest.approx(want.bits_per_byte, rel=1e-4)}
    assert (report["tasks"], report["failures"], report["tokens_per_second"]) == ({}, [], None)

    monkeypatch.chdir(text.parent)
    _, out, _ = evaluate(folder, "--text", text.name, "--context", 30)
    shown = out.split(text.name)[1].split()
    assert shown == [f"{want.tokens}", f"{want.perplexity:.4g}", f"{want.bits_per_byte:.4g}"]


def test_a_text_and_a_task(evaluate, folder, knowing, loaded, text, monkeypatch):
    monkeypatch.setattr("mlx_k3.evaluation.perplexity.score_text", lambda *_, **__: _Score())
    options = ("--text", text, "--task", "addition", "--items", 3, "--seed", 5)
    report = json.loads(evaluate(folder, *options, "--json")[1])
    assert (report["tasks"], report["perplexity"]) == ({"addition": 1.0}, {str(text): 2.0})


class _Score:
    perplexity, bits_per_byte = 2.0, 0.5


def test_experts_on_demand_give_the_same_answers(evaluate, folder):
    plan = plan_load(folder, None)
    little = plan.minimum_bytes + 12 * plan.slot_bytes
    options = (folder, "--task", "tools", "--items", 3, "--max-tokens", 8, "--seed", 1, "--json")
    reports = [json.loads(evaluate(*options, *m)[1]) for m in ((), ("--memory", little))]
    assert reports[0]["failures"] == reports[1]["failures"]
    assert len(reports[0]["failures"]) == 3


def test_as_many_at_once_as_the_plan_has_room_for(folder):
    plan = replace(plan_load(folder, None), budget_bytes=None)
    planned = plan.state_bytes + plan.cache_bytes
    each = plan.state_bytes + 200 * plan.cache_bytes_per_token
    assert 1 < planned // each < MOST_AT_ONCE
    assert _at_once(plan, 200) == planned // each
    assert _at_once(plan, plan.context_tokens * 9) == 1
    roomy = replace(plan, budget_bytes=plan.total_bytes + 2 * each)
    assert _at_once(roomy, 200) == planned // each + 2
    assert _at_once(replace(plan, budget_bytes=1 << 40), 200) == MOST_AT_ONCE


def test_without_a_model_it_is_the_bundled_one(evaluate, monkeypatch, tmp_path):
    monkeypatch.setattr(nano, "cache_folder", lambda: tmp_path)
    options = ("--task", "talk", "--items", 1, "--max-tokens", 1, "--json")
    code, out, err = evaluate(*options)
    assert code == 0 and "no MODEL given" in err
    assert json.loads(out)["model"] == str(nano.converted())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "sums"), "no task 'sums'; there are addition, "),
        (("--text", "no such file"), "--text no such file: No such file or directory"),
        (("--text", "{binary}"), "is not UTF-8 text: byte 1 "),
        (("--text", "{short}"), "is too short"),
        (("--memory", "lots"), "'lots' is not a size"),
        (("--policy", "lru"), "--policy acts on experts that are read on demand"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(evaluate, folder, tmp_path, arguments, message):
    (tmp_path / "binary").write_bytes(b"a\xff\xfe")
    (tmp_path / "short").write_text("a")
    places = {"binary": tmp_path / "binary", "short": tmp_path / "short"}
    code, out, err = evaluate(folder, *(a.format(**places) for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("mlx-k3: ") and err.count("\n") == 1
    assert message in err


def test_a_model_without_a_tokenizer_is_refused(evaluate, folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    code, out, err = evaluate(bare, "--task", "talk", "--items", 1)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no tokenizer" in err


def test_ctrl_c_ends_with_130_and_says_nothing(evaluate, folder, knowing, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Oracle, "__call__", interrupted)
    assert evaluate(folder, "--task", "talk", "--items", 2) == (130, "", "")


def test_a_bar_on_a_terminal_and_nothing_of_it_on_standard_output(
    evaluate, folder, knowing, text, monkeypatch
):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    options = ("--seed", 5, "--items", 3, "--task", "addition", "--json")
    code, out, _ = evaluate(folder, *options)
    assert code == 0 and json.loads(out)["tasks"] == {"addition": 1.0}
    assert "tasks" in screen.getvalue() and "3/3" in screen.getvalue()
