"""Training runs in one process: their variants, phases, logs, and a stop within a step."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.optimizers import AdamW
from typer.testing import CliRunner

from mlx_k3.cli import app
from mlx_k3.cli.train import progress
from mlx_k3.tasks import Example, is_held_out
from mlx_k3.training import data
from mlx_k3.training import trainer as training
from mlx_k3.training.config import TrainConfig
from mlx_k3.training.data import Tokens, tokenize
from mlx_k3.training.step import Metrics
from mlx_k3.training.trainer import Trainer

from .support.releases import all_tensors, contents
from .support.training import records, threads_for_processes, without_speed, write_run

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


def test_what_is_held_out_is_never_trained(
    start: Path, vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_for_processes(monkeypatch)
    made: list[Example] = []

    def spy(item: Example, tokenizer: Any) -> Tokens:
        made.append(item)
        return tokenize(item, tokenizer)

    monkeypatch.setattr(data, "tokenize", spy)
    path = write_run(tmp_path / "run.toml", start, lengths=[256])
    batches = Trainer(TrainConfig.from_file(path))._held_out(vocabulary)
    assert len(batches) == training.HELD_OUT_BATCHES and len(made) > 100
    assert all(is_held_out(item.key) for item in made)


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
        def step(state: Any, ids: mx.array, weights: mx.array, pictures: None) -> Any:
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
