"""Tasks about pictures: batched answers, others in their places, and who is asked at all."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_k3 import UnsupportedError, load, tasks
from mlx_k3.chat.attaching import attach
from mlx_k3.chat.generation import stream_generate
from mlx_k3.cli import main
from mlx_k3.convert.stream import convert
from mlx_k3.evaluation import accuracy
from mlx_k3.evaluation.accuracy import measure
from mlx_k3.evaluation.batch import Answer, Batch, render_prompt

from .support.releases import edit_json
from .support.seeing import seeing_model

pytest.importorskip("PIL")

HOW = {"seed": 3, "items": 4, "max_tokens": 3, "pass_tokens": 256}
FAMILIES = ["picture_colour", "picture_pair", "picture_missing"]


@pytest.fixture(scope="module")
def folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(golden, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return load(folder)


@pytest.fixture(scope="module")
def reading(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads text only: the same without its tower."""
    out = tmp_path_factory.mktemp("reading")
    seeing_model(golden, out)
    release = out / "release"
    edit_json(release / "config.json", lambda c: c.update(vision_config=None))
    is_seen = ("vision_tower.", "mm_projector.")
    index = json.loads((release / "model.safetensors.index.json").read_text())
    kept = {n: f for n, f in index["weight_map"].items() if not n.startswith(is_seen)}
    for file in {*index["weight_map"].values()} - {*kept.values()}:
        (release / file).unlink()
    (release / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    convert(release, out / "text", trunk="bf16")
    return out / "text"


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """Runs the command in this process; gives its exit code, standard output and error."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx-k3", "eval", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        return code, *capsys.readouterr()

    return run


def conversations(model: Any) -> list[list[dict[str, Any]]]:
    rng = random.Random(1)
    families = ("picture_colour", "picture_pair", "picture_turns", "picture_missing", "addition")
    drawn = [tasks.drawn(tasks.example(f, rng, "held-out")) for f in families for _ in range(2)]
    return [attach(tasks.asked(example), model) for example in drawn]


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_batch_answers_as_one_by_one(loaded: tuple[Any, Any], at_once: int) -> None:
    model, tokenizer = loaded
    asked = conversations(model)
    alone = [[*stream_generate(model, tokenizer, c, max_tokens=6)][-1].reply for c in asked]
    together = Batch(model, tokenizer, max_tokens=6, at_once=at_once, pass_tokens=256)
    for i, messages in enumerate(asked):
        together.ask(i, render_prompt(tokenizer, messages))
    answers = dict(together.answers())
    for i, reply in enumerate(alone):
        assert answers[i] == Answer(reply.message, reply.ids, reply.finish_reason)
    assert len({tuple(reply.ids) for reply in alone}) > 3


def test_prompts_with_pictures_wait_until_they_can_be_answered(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lies in memory from when it is read."""
    model, tokenizer = loaded
    batch = Batch(model, tokenizer, max_tokens=2, at_once=2)
    read = 0
    look = Batch._look

    def counting(self: Batch, prompt: Any) -> Any:
        nonlocal read
        read += 1
        return look(self, prompt)

    monkeypatch.setattr(Batch, "_look", counting)
    pictured = [c for c in conversations(model) if not isinstance(c[0]["content"], str)]
    for i, messages in enumerate(pictured):
        batch.ask(i, render_prompt(tokenizer, messages))
    for answered, _ in enumerate(batch.answers(), start=1):
        assert read <= answered - 1 + 2
    assert answered == read == len(pictured)


def spied(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[list[Any], Any]:
    """What ``measure`` shows, item by item, and its result."""
    shown = []

    def spy(*arguments: Any, **settings: Any) -> Any:
        prompt = render_prompt(*arguments, **settings)
        text = [part for part in arguments[1] if part["role"] == "user"][-1]["content"]
        shown.append(([medium.digest for medium in prompt.media], accuracy._as_line(text)))
        return prompt

    monkeypatch.setattr(accuracy, "render_prompt", spy)
    return shown, measure(*loaded, FAMILIES, **HOW, **how)


def test_blind_the_questions_are_the_same_and_all_pictures_others(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pictures, result = spied(loaded, monkeypatch)
    with_others, _ = spied(loaded, monkeypatch, blind=True)
    assert [text for _, text in with_pictures] == [text for _, text in with_others]
    for (own, _), (others, _) in zip(with_pictures, with_others, strict=True):
        assert len(own) == len(others) and not set(own) & set(others)
    assert [len(own) for own, _ in with_pictures] == [1] * 4 + [2] * 4 + [0] * 4
    assert spied(loaded, monkeypatch)[0] == with_pictures
    assert list(result.scores) == FAMILIES
    assert "[picture]" in result.failures[0].prompt and result.failures[0].family == FAMILIES[0]


def test_one_who_sees_is_asked_as_such(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measure(*loaded, ["talk"], **HOW | {"items": 60})
    said = {failure.expected for failure in result.failures}
    assert said and "No, I only read and write text." not in said
    examples = accuracy._examples("talk", 3, 60, blind=False)
    answers = {accuracy._item(loaded[0], e).example.messages[-1]["content"] for e in examples}
    assert not any("only read" in answer for answer in answers)


def test_a_model_that_reads_text_only_is_not_asked(
    reading: Path, evaluate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = evaluate(reading, "--items", 1, "--max-tokens", 1, "--json")
    assert code == 0 and err.count("\n") == 1
    assert "reads text only; tasks about pictures are left out" in err
    assert list(json.loads(out)["tasks"]) == list(tasks.FAMILIES)
    for options, says in (
        (("--task", "picture_digit"), "this model reads text only"),
        (("--blind",), "--blind acts on tasks about pictures"),
        (("--blind", "--task", "talk"), "--blind acts on tasks about pictures"),
    ):
        code, out, err = evaluate(reading, *options, "--items", 1)
        assert (code, out, err.count("\n")) == (2, "", 1) and says in err


def test_without_pillow_text_is_asked(
    folder: Path, evaluate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = accuracy.find_spec
    monkeypatch.setattr(accuracy, "find_spec", lambda name: None if name == "PIL" else find(name))
    code, out, err = evaluate(folder, "--items", 1, "--max-tokens", 1, "--json")
    assert code == 0 and list(json.loads(out)["tasks"]) == list(tasks.FAMILIES)
    assert "Pillow is not installed (mlx-k3[vision]); tasks about pictures are left out" in err
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "mlx_k3.tasks.drawing")
    code, out, err = evaluate(folder, "--items", 1, "--task", "picture_word")
    assert (code, out) == (2, "")
    assert err == "mlx-k3: drawing needs Pillow; install mlx-k3[vision]\n"


def test_a_model_that_sees_is_asked(folder: Path, evaluate: Callable) -> None:
    options = ("--items", 1, "--max-tokens", 1, "--json")
    code, out, err = evaluate(folder, *options)
    report = json.loads(out)
    assert (code, err, report["blind"]) == (0, "", False)
    assert list(report["tasks"]) == list(tasks.ALL_FAMILIES)
    code, out, err = evaluate(folder, *options, "--blind")
    report = json.loads(out)
    assert (code, err, report["blind"]) == (0, "", True)
    assert list(report["tasks"]) == list(tasks.PICTURE_FAMILIES)


def test_a_family_that_needs_sight_is_refused_without(reading: Path) -> None:
    with pytest.raises(UnsupportedError, match="reads text only"):
        measure(*load(reading), ["picture_word"], **HOW)
