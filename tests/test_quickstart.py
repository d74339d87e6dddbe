"""The scripts of a fresh checkout, without network: libraries come from this environment."""

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from .conftest import REPOSITORY

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash")


def shell(code: str, *, cwd: Path = REPOSITORY, path: str = "") -> subprocess.CompletedProcess:
    environment = os.environ | {"PATH": path or os.environ["PATH"]}
    command = [BASH, "-euo", "pipefail", "-c", f"source scripts/environment.sh; {code}"]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def fake(folder: Path, **programs: str) -> str:
    """A PATH of ``programs`` only, each a line of shell."""
    folder.mkdir(exist_ok=True)
    for name, line in programs.items():
        program = folder / name
        program.write_text(f"#!{BASH}\n{line}\n")
        program.chmod(0o755)
    return str(folder)


def test_a_python_that_is_only_a_shim_is_passed_over(tmp_path: Path) -> None:
    shim = "echo 'not installed' >&2; exit 127"
    real = f'exec {sys.executable} "$@"'
    path = fake(tmp_path / "bin", **{"python3": shim, "python3.13": shim, "python3.12": real})
    assert shell("find_python", path=path).stdout == "python3.12\n"


def test_a_python_that_is_too_old_is_refused(tmp_path: Path) -> None:
    path = fake(tmp_path / "bin", python3="exit 1")
    result = shell("find_python", path=path)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("Python 3.11 to 3.13 is needed")


@pytest.mark.parametrize(
    ("system", "driver", "expected"),
    [
        ("Darwin", None, "."),
        ("Linux", None, ".[cpu]"),
        ("Linux", "exit 9", ".[cpu]"),
        ("Linux", "echo '| Driver Version: 550.1   CUDA Version: 12.4 |'", ".[cuda12]"),
        ("Linux", "echo '| Driver Version: 580.1   CUDA Version: 13.0 |'", ".[cuda13]"),
    ],
)
def test_the_extra_follows_the_machine(
    system: str, driver: str | None, expected: str, tmp_path: Path
) -> None:
    programs = {"uname": f"echo {system}"} | ({"nvidia-smi": driver} if driver else {})
    assert shell("requirement", path=fake(tmp_path / "bin", **programs)).stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("system", "loads", "user", "apt", "asked", "warned"),
    [
        ("Darwin", False, 0, "exit 0", False, False),
        ("Linux", True, 0, "exit 0", False, False),
        ("Linux", False, 0, "exit 0", True, False),
        ("Linux", False, 0, "exit 100", True, True),
        ("Linux", False, 1000, "exit 0", False, True),
    ],
)
def test_openblas_is_installed_where_it_can_be(
    system: str, loads: bool, user: int, apt: str, asked: bool, warned: bool, tmp_path: Path
) -> None:
    programs = {
        "uname": f"echo {system}",
        "python": f"exit {int(not loads)}",
        "id": f"echo {user}",
        "apt-get": f'echo "$@" >> "{tmp_path}/asked"; {apt}',
    }
    result = shell("ensure_openblas", path=fake(tmp_path / "bin", **programs))
    assert result.returncode == 0
    assert (tmp_path / "asked").exists() == asked
    if asked and not warned:
        assert "install --yes --no-install-recommends libopenblas0" in (
            tmp_path / "asked"
        ).read_text().replace("-qq ", "")
    assert ("Going on without OpenBLAS" in result.stderr) == warned


@pytest.mark.parametrize("there", [True, False])
def test_clang_is_installed_where_it_is_missing(there: bool, tmp_path: Path) -> None:
    programs = {
        "uname": "echo Linux",
        "id": "echo 0",
        "apt-get": f'echo "$@" >> "{tmp_path}/asked"',
    } | ({"clang++": "exit 0"} if there else {})
    path = fake(tmp_path / "bin", **programs)
    assert shell("ensure_clang", path=path).returncode == 0
    asked = tmp_path / "asked"
    assert asked.exists() != there
    assert there or "no-install-recommends clang" in asked.read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout in a folder with spaces, its .venv made as pip would have made it."""
    folder = tmp_path / "a folder with spaces"
    for name in ("mlx_k3", "convert", "scripts"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / name)
    venv.create(folder / ".venv", symlinks=True)
    python = folder / ".venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    borrowed = Path(site.stdout.strip()) / "borrowed.pth"
    borrowed.write_text(f"{folder}\n{sysconfig.get_path('purelib')}\n")
    # The package's folder for conversions lies beside it; an installer would map it.
    (folder / "mlx_k3" / "convert").symlink_to(folder / "convert")
    script = folder / ".venv" / "bin" / "mlx-k3"
    script.write_text(f'#!{BASH}\nexec "{python}" -m mlx_k3 "$@"\n')
    script.chmod(0o755)
    stamp = 'echo "$(requirement) $(cksum < pyproject.toml)" > .venv/installed'
    assert shell(stamp, cwd=folder).returncode == 0
    return folder


def test_quickstart_converts_and_answers(checkout: Path) -> None:
    # Of another model: it makes way for this checkout's.
    stale = checkout / "models" / "nano" / "model-trunk-00001-of-00001.safetensors"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"another model's")
    for _ in range(2):  # The second time finds everything done and answers again.
        result = subprocess.run(
            [checkout / "scripts" / "quickstart"],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "$ mlx-k3 convert mlx_k3/nano/model models/nano" in result.stdout
        _, shown, after = result.stderr.partition("$ mlx-k3 generate models/nano")
        assert shown
        assert after.rstrip().endswith("47 + 85 = 132.")
        assert "$ mlx-k3 chat" not in result.stdout  # Not on a terminal.
        assert not stale.exists()
    assert (checkout / "models" / "nano" / "config.json").exists()


def test_quickstart_fails_where_the_answer_is_wrong(checkout: Path) -> None:
    script = checkout / ".venv" / "bin" / "mlx-k3"
    text = script.read_text()
    script.write_text(f"#!{BASH}\necho '47 + 85 = 131.'\n")
    try:
        result = subprocess.run(
            [checkout / "scripts" / "quickstart"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    finally:
        script.write_text(text)
    assert result.returncode == 1 and "this answer is wrong" in result.stderr


def test_quickstart_on_a_terminal_opens_a_chat(checkout: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [checkout / "scripts" / "quickstart"], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = _read_until(ours, b"/help")
    os.write(ours, b"/exit\r")
    with contextlib.suppress(OSError):  # A terminal without a program on it.
        while more := os.read(ours, 4096):
            shown += more
    assert process.wait(timeout=60) == 0, shown
    assert b"$ mlx-k3 chat models/nano" in shown


def _read_until(terminal: int, text: bytes) -> bytes:
    shown, end = b"", time.monotonic() + 120
    while text not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096)
    assert text in shown, shown
    return shown
