"""Whole training runs: from a configuration to a model, and the same one however often stopped."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.optimizers import AdamW
from typer.testing import CliRunner

from mlx_k3 import load
from mlx_k3.cli import app
from mlx_k3.cli.train import progress
from mlx_k3.convert.stream import convert
from mlx_k3.training import trainer as training
from mlx_k3.training.config import TrainConfig
from mlx_k3.training.step import Metrics, cross_entropy
from mlx_k3.training.trainer import Trainer

from .support.releases import all_tensors, contents
from .support.training import threads_for_processes, write_run

QUICK = {
    "steps": 4,
    "tokens_per_batch": 256,
    "lengths": [128, 256],
    "conversations_per_chunk": 32,
    "checkpoint_every": 2,
}
VARIANTS = [
    {"balance": "none", "optimizer": "adamw"},
    {"balance": "sign", "schedule": "cosine", "balance_rate": 0.125, "steps": 3},
    {"balance": "quantile", "optimizer": "adamw", "schedule": "cosine", "quantize_from": 0},
]


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def without_speed(out: Path) -> list[dict[str, Any]]:
    """The same, less what no two runs share."""
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records(out)]


# By the command, in processes


def begin(path: Path) -> subprocess.Popen:
    """``mlx-k3 train`` in a group of processes of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "mlx_k3", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def uninterrupted(start: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a run, and what it printed on both streams."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = begin(write_run(folder / "run.toml", start))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder / "out", out, err


@pytest.mark.slow
def test_a_run_learns_and_says_so(uninterrupted: tuple) -> None:
    out, printed, said = uninterrupted
    assert printed == f"{out / 'model'}\n"
    first, last = said.splitlines()
    assert first.startswith("step 6 of 12: loss ") and last.startswith("step 12 of 12: loss ")
    log = records(out)
    assert f"{log[-1]['loss']:.4f}, " in last and last.endswith(f"{log[-1]['held_out_loss']:.4f}")
    assert [r["step"] for r in log] == [*range(1, 13)]
    assert [r["step"] for r in log if "held_out_loss" in r] == [6, 12]
    losses = [r["loss"] for r in log]
    assert 6.5 < losses[0] < 8 and np.mean(losses[-3:]) < np.mean(losses[:3]) - 1.5
    assert log[-1]["held_out_loss"] < log[5]["held_out_loss"] < 6.5
    checkpoints = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert checkpoints == ["step-00000010.safetensors", "step-00000012.safetensors"]


@pytest.mark.slow
def test_the_result_is_a_release_that_is_as_good_as_the_log_says(
    uninterrupted: tuple, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _, _ = uninterrupted
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json"):
        came, went = (out / "model" / name).read_bytes(), (start / name).read_bytes()
        assert came == went or json.loads(came) == json.loads(went)
    convert(out / "model", tmp_path / "package", trunk="bf16")
    model, tokenizer = load(tmp_path / "package")
    assert len(tokenizer.table.pieces) == model.config.vocab_size
    threads_for_processes(monkeypatch)
    run = Trainer(TrainConfig.from_file(out.parent / "run.toml"))
    losses = []
    for batch in run._held_out(tmp_path / "package"):
        ids = mx.array(batch.ids)
        loss = cross_entropy(model(ids[:, :-1]), ids[:, 1:], mx.array(batch.weights))
        losses.append(loss.item())
    assert len(losses) == training.HELD_OUT_BATCHES
    assert np.mean(losses) == pytest.approx(records(out)[-1]["held_out_loss"], rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_killed_and_stopped_it_ends_with_the_same_bytes(
    uninterrupted: tuple, start: Path, tmp_path: Path
) -> None:
    path, out = write_run(tmp_path / "run.toml", start), tmp_path / "out"
    checkpoints = out / "checkpoints"

    killed = begin(path)
    wait_for((checkpoints / "step-00000005.safetensors").exists, killed)
    killed.kill()
    killed.communicate()
    wait_for(lambda: group_is_gone(killed.pid))

    stopped = begin(path)
    wait_for(lambda: [r["step"] for r in records(out)][6:7] == [7], stopped)
    os.killpg(stopped.pid, signal.SIGINT)  # As Ctrl-C does: to the workers too.
    printed, said = stopped.communicate(timeout=60)
    assert (stopped.returncode, printed) == (130, "")
    assert all(line.startswith("step 6 of 12") for line in said.splitlines())
    saved = max(int(path.stem.removeprefix("step-")) for path in checkpoints.iterdir())
    assert 7 <= saved < 12
    assert not (out / "model").exists()

    last = begin(path)
    _, said = last.communicate(timeout=300)
    assert last.returncode == 0, said
    assert contents(out / "model") == contents(uninterrupted[0] / "model")
    assert without_speed(out) == without_speed(uninterrupted[0])


# In this process, and quicker


@pytest.fixture
def run(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, list[dict[str, Any]]]]:
    """Train in this process; returns the result and what was reported."""
    threads_for_processes(monkeypatch)
    monkeypatch.setattr("mlx_k3.training.data._PART", 32)

    def train(out: str = "out", **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
        path = write_run(tmp_path / "run.toml", start, out=out, **QUICK | changes)
        told: list[dict[str, Any]] = []
        return Trainer(TrainConfig.from_file(path)).run(told.append), told

    return train


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: " ".join(map(str, v.values())))
def test_variants_run(run: Callable, variant: dict[str, Any]) -> None:
    model, told = run(**variant)
    assert told == records(model.parent)
    assert told[-1]["loss"] < told[0]["loss"] and "held_out_loss" in told[-1]
    rates = [record["learning_rate"] for record in told]
    assert rates[0] == 0.003 and (rates[-1] < 0.002) == ("schedule" in variant)
    biases = [
        np.frombuffer(raw, np.float32)
        for name, (_, _, raw) in all_tensors(model).items()
        if name.endswith("e_score_correction_bias")
    ]
    assert len(biases) == 4
    for bias in biases:
        if variant["balance"] == "none":
            assert not bias.any()
        elif variant["balance"] == "sign":
            assert np.array_equal(bias * 8, np.round(bias * 8)) and bias.any()
        else:
            assert abs(bias.sum()) < 1e-5 and bias.any()


@pytest.mark.parametrize("steps", [0, 1])
def test_stopped_within_a_step_it_ends_the_same(
    run: Callable, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """After so many steps, while the optimizer has gone through a part of the parameters."""
    model, _ = run(out="straight")
    apply, calls = AdamW.apply_single, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 * steps + 2:  # The last of three optimizers' share.
            raise KeyboardInterrupt
        return apply(*arguments)

    monkeypatch.setattr(AdamW, "apply_single", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out="stopped")
    stopped, told = run(out="stopped")
    assert [record["step"] for record in told] == [*range(steps + 1, 5)]
    assert contents(stopped) == contents(model)
    assert without_speed(stopped.parent) == without_speed(model.parent)


def test_a_finished_run_only_writes_its_model_again(run: Callable) -> None:
    model, _ = run()
    before, log = contents(model), (model.parent / "log.jsonl").read_bytes()
    (model / "config.json").unlink()
    again, told = run(workers=2, log_every=3)
    assert again == model and told == []
    assert contents(model) == before and (model.parent / "log.jsonl").read_bytes() == log


def test_another_seed_is_another_model(run: Callable) -> None:
    first, second = (run(out=str(seed), seed=seed, steps=1)[0] for seed in (1, 2))
    one, other = all_tensors(first), all_tensors(second)
    assert one.keys() == other.keys()
    changed = [name for name in one if one[name] != other[name]]
    assert any("embed_tokens" in name for name in changed) and len(changed) > len(one) / 2


@pytest.mark.parametrize(
    ("quantize_from", "phases"),
    [(0, [True] * 4), (0.5, [False, False, True, True]), (0.8, [False] * 3 + [True])],
)
def test_the_last_phase_computes_in_mxfp4(
    run: Callable,
    monkeypatch: pytest.MonkeyPatch,
    quantize_from: float,
    phases: list[bool],
) -> None:
    seen = []

    def make_step(*arguments: Any, quantized: bool) -> Callable:
        def step(state: Any, ids: mx.array, weights: mx.array) -> Any:
            assert ids.shape in ((2, 129), (1, 257))
            assert weights.shape == (ids.shape[0], ids.shape[1] - 1)
            seen.append(bool(quantized))
            return state, Metrics(*[mx.array(1.0)] * len(Metrics._fields))

        return step

    monkeypatch.setattr(training, "make_step", make_step)
    run(quantize_from=quantize_from)
    assert seen == phases


def test_the_command_draws_the_losses(run: Callable, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, _ = run(steps=1)
    arguments = ["train", str(tmp_path / "run.toml"), "--plot", str(tmp_path / "losses.png")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (0, f"{model}\n")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_shows_a_bar(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    config = TrainConfig.from_file(write_run(tmp_path / "run.toml", start))
    with progress(config) as report:
        report({"step": 3, "loss": 1.25, "tokens_per_second": 12345, "held_out_loss": 1.5})
    shown = sys.stderr.getvalue()
    assert "loss 1.2500, 12,345 tokens/s, held-out loss 1.5000" in shown and "3/12" in shown


def test_checkpoints_and_lines_come_as_often_as_asked(run: Callable) -> None:
    model, told = run(steps=5, log_every=2, evaluate_every=4, checkpoint_every=3)
    assert [record["step"] for record in told] == [2, 4, 5]
    assert [record["step"] for record in told if "held_out_loss" in record] == [4, 5]
    names = sorted(path.stem for path in (model.parent / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000005"]
