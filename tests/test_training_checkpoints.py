"""What a run leaves while it goes: checkpoints that hold everything, and a log without gaps."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_k3.config import K3Config
from mlx_k3.errors import CheckpointError
from mlx_k3.training import checkpoints
from mlx_k3.training.checkpoints import Saved, latest, save
from mlx_k3.training.config import TrainConfig
from mlx_k3.training.data import Position
from mlx_k3.training.initialize import new_model
from mlx_k3.training.log import Log
from mlx_k3.training.muon import make_optimizer
from mlx_k3.training.step import State, initial_state, make_step


def small(step: int) -> Saved:
    state = State({"w": mx.full(2, step)}, [mx.zeros(2)], {"states": [{"step": mx.array(step)}]})
    return Saved(state, step, Position(step // 4, step % 4))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_checkpoint_holds_all_that_a_step_needs(
    start: Path, tmp_path: Path, optimizer: str
) -> None:
    config = K3Config.from_file(start)
    settings = TrainConfig(start, tmp_path, steps=4)
    ids = mx.random.randint(0, config.vocab_size, (1, 33), key=mx.random.key(0))
    batch = ids, mx.ones((1, 32))

    def begin():
        model = new_model(config, seed=0)
        made = make_optimizer(config, 1e-3, 0.1, optimizer)
        return initial_state(model, made), make_step(model, made, settings, quantized=False)

    state, step = begin()
    state, _ = step(state, *batch)
    save(tmp_path, "run", Saved(state, 1, Position(2, 3)))
    found = latest(tmp_path, "run")
    assert (found.step, found.position) == (1, Position(2, 3))
    arrays, restored = (dict(tree_flatten(s._asdict())) for s in (state, found.state))
    assert set(restored) == set(arrays)
    for name, array in arrays.items():
        assert restored[name].dtype == array.dtype and mx.array_equal(restored[name], array), name
    # By a model and an optimizer that know nothing of the first step.
    expected, _ = step(state, *batch)
    again, _ = begin()[1](found.state, *batch)
    expected, again = (dict(tree_flatten(s._asdict())) for s in (expected, again))
    for name, array in expected.items():
        assert mx.array_equal(again[name], array), name


def test_the_last_ones_are_kept_and_an_unfinished_one_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert latest(folder, "run") is None
    for step in (5, 10, 100, 1000):
        save(folder, "run", small(step))
    (folder / ".step-00002000.safetensors").write_bytes(b"unfinished")
    names = sorted(path.name for path in folder.glob("step*"))
    assert names == ["step-00000100.safetensors", "step-00001000.safetensors"]
    found = latest(folder, "run")
    assert found.step == 1000 and found.position == Position(250, 0)
    assert found.state.parameters["w"].tolist() == [1000, 1000]


def test_one_that_fails_leaves_those_before(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, "run", small(5))

    def replace(*paths: Path) -> None:
        raise OSError("full")

    monkeypatch.setattr(checkpoints.os, "replace", replace)
    with pytest.raises(OSError, match="full"):
        save(tmp_path, "run", small(10))
    assert latest(tmp_path, "run").step == 5


def test_another_run_is_told_apart(tmp_path: Path) -> None:
    save(tmp_path, "run", small(5))
    with pytest.raises(CheckpointError, match="of a run with other settings"):
        latest(tmp_path, "other")


# The log


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_log_continues_after_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    path, told = tmp_path / "log.jsonl", []
    with Log(path, 0, told.append) as log:
        for step in (1, 2, 3, 4):
            log.write({"step": step, "loss": 1 / 3})
    assert steps(path) == [1, 2, 3, 4]
    with Log(path, 2, told.append) as log:
        assert steps(path) == [1, 2]
        log.write({"step": 3, "loss": 0.25})
        assert steps(path) == [1, 2, 3]  # At once, for who looks on.
    assert [record["step"] for record in told] == [1, 2, 3, 4, 3]
    assert told[0]["loss"] == 0.333333 and json.loads(path.read_text().splitlines()[0]) == told[0]


def test_a_line_that_was_cut_off_goes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    with Log(path, 5, lambda record: None) as log:
        log.write({"step": 6})
    assert steps(path) == [1, 2, 6]


def test_speed_is_of_the_tokens_since_the_last_line(tmp_path: Path, monkeypatch) -> None:
    times = iter([10.0, 12.0, 16.0])
    monkeypatch.setattr("mlx_k3.training.log.time.perf_counter", lambda: next(times))
    told = []
    with Log(tmp_path / "log.jsonl", 0, told.append) as log:
        log.count(300)
        log.count(100)
        log.write({"step": 1})
        log.count(100)
        log.write({"step": 2})
    assert [record["tokens_per_second"] for record in told] == [200, 25]
