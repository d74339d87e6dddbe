"""The picture of a training run."""

import json
import sys
from pathlib import Path

import pytest

from mlx_k3.errors import K3Error
from mlx_k3.training.plot import plot_losses

figure = pytest.importorskip("matplotlib.figure")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    records = [
        {"step": s, "loss": 8 / s, "learning_rate": 1e-3, "grad_norm": 1.0, "max_load": 1 + 3 / s}
        for s in range(10, 110, 10)
    ]
    records[4]["held_out_loss"], records[9]["held_out_loss"] = 0.5, 0.25
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that were saved."""
    figures, save = [], figure.Figure.savefig

    def savefig(self, *args, **options) -> None:
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return figures


def test_losses_and_loads_are_drawn(log: Path, tmp_path: Path, drawn: list) -> None:
    out = tmp_path / "loss.png"
    plot_losses(log, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    losses, loads = drawn[0].axes
    training, held_out = losses.get_lines()
    assert training.get_xdata().tolist() == [*range(10, 110, 10)]
    assert training.get_ydata()[3] == 0.2
    assert (held_out.get_xdata().tolist(), held_out.get_ydata().tolist()) == (
        [50, 100],
        [0.5, 0.25],
    )
    assert losses.get_yscale() == "log"
    assert loads.get_lines()[0].get_ydata()[0] == 1.3


def test_what_a_log_does_not_tell_is_left_out(tmp_path: Path, drawn: list) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2}\n')
    plot_losses(log, tmp_path / "loss.svg")
    losses, loads = drawn[0].axes
    assert [line.get_ydata().tolist() for line in losses.get_lines()] == [[2.5, 2]]
    assert len(loads.get_lines()) == 1  # The line of perfect balance.


@pytest.mark.parametrize("bad", ["{", "[1]", '{"step": 2}', '{"step": 2, "loss": null}'])
def test_a_line_that_makes_no_sense_is_named(log: Path, tmp_path: Path, bad: str) -> None:
    log.write_text(log.read_text() + bad + "\n")
    with pytest.raises(K3Error, match=r"log\.jsonl, line 11 is no JSON object with"):
        plot_losses(log, tmp_path / "loss.png")


def test_other_mistakes_are_told(log: Path, tmp_path: Path) -> None:
    with pytest.raises(K3Error, match="none: No such file"):
        plot_losses(tmp_path / "none", tmp_path / "loss.png")
    with pytest.raises(K3Error, match=r"cannot draw \.doc; use"):
        plot_losses(log, tmp_path / "loss.doc")
    with pytest.raises(K3Error, match=r"loss\.png: No such file"):
        plot_losses(log, tmp_path / "none" / "loss.png")
    log.write_text("")
    with pytest.raises(K3Error, match="tells of no step"):
        plot_losses(log, tmp_path / "loss.png")


def test_without_matplotlib_it_says_what_to_install(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(K3Error, match=r"install mlx-k3\[plot\]"):
        plot_losses(log, tmp_path / "loss.png")
