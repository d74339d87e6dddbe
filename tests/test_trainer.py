"""``mlx-k3 train``: a whole run, and the same one when it was killed and stopped in between."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3 import load
from mlx_k3.convert.stream import convert
from mlx_k3.training import trainer as training
from mlx_k3.training.config import TrainConfig
from mlx_k3.training.step import cross_entropy
from mlx_k3.training.trainer import Trainer

from .support.releases import contents
from .support.training import records, threads_for_processes, without_speed, write_run


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
    assert 6.5 < losses[0] < 8 and np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.7
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
    printed, said = stopped.communicate(timeout=300)
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
