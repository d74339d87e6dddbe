"""doctor, and the BLAS it shows."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from mlx_k3 import nano
from mlx_k3.cli import app
from mlx_k3.cli.doctor import _expert_reads


def has_openblas() -> bool:
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL("libopenblas.so.0")
    except OSError:
        return False
    return True


needs_openblas = pytest.mark.skipif(not has_openblas(), reason="no OpenBLAS here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano, "cache_folder", lambda: tmp_path / "cache")


def test_all_is_well() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["problems"] == []
    assert report["self_check_error"] <= 1e-4
    assert report["device"] in ("CPU", "Metal", "CUDA")
    assert report["memory_bytes"] > 2**30 and report["free_bytes"] > 0 and report["gflops"] > 0
    assert report["expert_reads"] in ("direct", "buffered")


def test_for_people() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    names = [line[:12].strip() for line in result.stdout.splitlines()]
    for name in (
        "mlx-k3",
        "libraries",
        "system",
        "device",
        "BLAS",
        "disk",
        "expert reads",
        "kernels",
        "self check",
    ):
        assert names.count(name) == 1


def test_expert_reads_are_what_the_probe_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_k3.experts.disk._direct_works", lambda *_: False)
    fact = _expert_reads()
    assert fact.data == {"expert_reads": "buffered"} and fact.text.startswith("buffered, ")


def test_a_wrong_logit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mx.load(str(nano.EXPECTED))
    logits = expected["last_logits"]
    logits[0, 7] += 0.001 * mx.abs(logits).max()
    mx.save_safetensors(str(tmp_path / "wrong.safetensors"), expected)
    monkeypatch.setattr(nano, "EXPECTED", tmp_path / "wrong.safetensors")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert report["self_check_error"] == pytest.approx(1e-3, rel=0.05)
    assert report["problems"] == ["self check: logits differ by 1.0e-03, more than 1e-04"]


def test_a_logit_that_is_no_number_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mx.load(str(nano.EXPECTED))
    expected["last_logits"][0, 7] = float("nan")
    mx.save_safetensors(str(tmp_path / "wrong.safetensors"), expected)
    monkeypatch.setattr(nano, "EXPECTED", tmp_path / "wrong.safetensors")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_mlx_without_a_backend() -> None:
    """What Linux has after a plain `pip install mlx-k3`."""
    code = """
import sys

class NoBackend:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file")

sys.meta_path.insert(0, NoBackend())
from mlx_k3.cli import main
main()
"""
    result = _python(code, "doctor")
    assert result.returncode == 1
    assert "Problem: MLX cannot be loaded: libmlx.so" in result.stdout
    assert "mlx-k3[cpu]" in result.stdout


@needs_openblas
@pytest.mark.parametrize("first", ["mlx_k3", "mlx_k3.cli", "mlx_k3.config"])
def test_mlx_multiplies_with_openblas(first: str, tmp_path: Path) -> None:
    """The dynamic linker's own account of where libmlx found its matrix product."""
    pytest.importorskip("mlx.core")
    code = f"import {first}, mlx.core; from mlx_k3 import blas; print(blas.name(), blas.advice())"
    linker = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "linker")}
    shown = _python(code, env=os.environ | linker).stdout
    assert shown.startswith("OpenBLAS ") and shown.endswith(" None\n")
    account = "".join(path.read_text() for path in tmp_path.glob("linker.*"))
    bound = [line for line in account.splitlines() if "`cblas_sgemm'" in line and "libmlx" in line]
    assert bound and all("libopenblas" in line.split(" to ")[1] for line in bound)


@needs_openblas
def test_mlx_imported_first_is_said() -> None:
    shown = _python("import mlx.core, mlx_k3; print(mlx_k3.blas.name(), '|', mlx_k3.blas.advice())")
    assert shown.stdout == "unknown: MLX was imported first | import mlx_k3 before mlx.core\n"


def test_without_openblas_the_advice_is_to_install_it() -> None:
    code = """
import ctypes, sys

class Missing:
    def __init__(self, name, mode=0):
        raise OSError(name)

ctypes.CDLL = Missing
sys.platform = "linux"
from mlx_k3 import blas
print(blas.name(), "|", blas.advice())
"""
    shown = _python(code).stdout
    assert shown.startswith("reference BLAS of MLX's wheel | install OpenBLAS")


def _python(code: str, *arguments: str, env: dict[str, str] | None = None):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
