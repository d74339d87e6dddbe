"""The built wheel, installed outside the checkout: what a person who runs pip install gets."""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from .conftest import REPOSITORY

pytestmark = pytest.mark.slow


def run(*command: str | Path, **options) -> str:
    """Standard output of a command that must succeed."""
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, **options
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files, so that nothing else can slip in or leave a trace."""
    source = tmp_path_factory.mktemp("source")
    tracked = run(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY
    )
    for name in filter(None, tracked.split("\0")):
        if not name.startswith("tests/"):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((REPOSITORY / name).read_bytes())
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment with the wheel and this one's libraries.

    The libraries are borrowed rather than installed again; the package itself is not among them.
    """
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False, symlinks=True)
    python = root / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A folder added like this has its own .pth files ignored: the editable checkout stays out.
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root / "bin"


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict:
    """Options of ``run``: another folder, and a cache of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return {"cwd": tmp_path, "env": environment}


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [license_name] = [name for name in names if name.endswith("licenses/LICENSE")]
        assert archive.read(license_name) == (REPOSITORY / "LICENSE").read_bytes()
        for path in (REPOSITORY / "mlx_k3" / "nano" / "model").iterdir():
            carried = archive.read(f"mlx_k3/nano/model/{path.name}")
            assert hashlib.sha256(carried).digest() == hashlib.sha256(path.read_bytes()).digest()
    ours = {str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / "mlx_k3").rglob("*.py")}
    ours |= {str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / "mlx_k3").rglob("*.h")}
    ours |= {f"mlx_k3/{p.relative_to(REPOSITORY)}" for p in (REPOSITORY / "convert").rglob("*.py")}
    assert ours <= names
    foreign = {n for n in names if not n.startswith("mlx_k3/") and ".dist-info/" not in n}
    assert not foreign


def test_it_comes_from_the_wheel(installed: Path, elsewhere: dict) -> None:
    code = "import mlx_k3, mlx_k3.convert as c; print(mlx_k3.__file__); print(c.__file__)"
    for line in run(installed / "python", "-c", code, **elsewhere).splitlines():
        assert Path(line).is_relative_to(installed.parent)


def test_every_command_has_help(installed: Path, elsewhere: dict) -> None:
    shown = run(installed / "mlx-k3", "--help", **elsewhere)
    code = (
        "import typer, mlx_k3.cli as c; print(*typer.main.get_command(c.app).commands, sep='\\n')"
    )
    commands = run(installed / "python", "-c", code, **elsewhere).split()
    assert len(commands) >= 6
    for command in commands:
        assert command in shown
        assert "Usage" in run(installed / "mlx-k3", command, "--help", **elsewhere)


def test_every_module_can_be_imported(installed: Path, elsewhere: dict) -> None:
    code = """
import importlib, pkgutil, mlx_k3
found = pkgutil.walk_packages(mlx_k3.__path__, "mlx_k3.")
names = [module.name for module in found if module.name != "mlx_k3.__main__"]
for name in names:
    importlib.import_module(name)
for name in mlx_k3.__all__:
    getattr(mlx_k3, name)
print(*names, sep="\\n")
"""
    names = run(installed / "python", "-c", code, **elsewhere).split()
    assert {"mlx_k3.convert.stream", "mlx_k3.models.kimi", "mlx_k3.chat.session"} <= set(names)
    packages = {name.split(".")[1] for name in names}
    tables = {p.parent.name for p in (REPOSITORY / "mlx_k3").glob("*/__init__.py")}
    assert tables <= packages


def test_the_bundled_checkpoint_converts_and_is_right(installed: Path, elsewhere: dict) -> None:
    report = json.loads(run(installed / "mlx-k3", "doctor", "--json", **elsewhere))
    assert report["ok"] and report["self_check_error"] <= 1e-4


def test_its_requirements_are_met_by_what_is_installed(wheel: Path) -> None:
    """pip resolves the wheel with the CPU extra and asks for nothing that the tests do not have."""
    arguments = ("--dry-run", "--no-index", "--quiet", "--report", "-", f"{wheel}[cpu]")
    report = json.loads(run(sys.executable, "-m", "pip", "install", *arguments))
    assert {item["metadata"]["name"] for item in report["install"]} <= {"mlx-k3"}
