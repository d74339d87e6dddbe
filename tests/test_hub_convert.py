"""Converting straight from the Hub: the same bytes as from a folder, whatever the network does."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from mlx_k3.convert import download, stream, transfer
from mlx_k3.convert import hub as hub_module
from mlx_k3.convert.plan import NothingToDo
from mlx_k3.convert.stream import convert
from mlx_k3.convert.verify import verify
from mlx_k3.errors import BudgetError, CheckpointError, UnsupportedError

from .support.hub_server import Fault, HubServer, use_hub

REPO = "org/tiny"
SHARDS = [f"model-{n:05}-of-000006.safetensors" for n in range(1, 7)]
# Beyond every header of the checkpoint: only a download gets there, the plan's reads do not.
DEEP = 200_000


@pytest.fixture(scope="module")
def folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden text checkpoint with what else a release has."""
    folder = tmp_path_factory.mktemp("release") / "tiny"
    shutil.copytree(golden / "tiny-text", folder, ignore=shutil.ignore_patterns("expected*"))
    (folder / "LICENSE").write_text("as you like\n")
    (folder / "README.md").write_text("# Tiny\n")
    (folder / "generation_config.json").write_text('{"max_length": 512}\n')
    (folder / "modeling_kimi.py").write_text("raise SystemExit\n")
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a conversion of the folder writes."""
    out = tmp_path_factory.mktemp("wanted") / "out"
    convert(folder, out)
    return contents(out)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> Iterator[HubServer]:
    """A Hub with the checkpoint; a shard comes in a dozen pieces."""
    with HubServer() as server:
        use_hub(server, monkeypatch, tmp_path)
        monkeypatch.setattr(download, "PIECE_BYTES", 40_000)
        monkeypatch.setattr(hub_module, "_HEAD_BYTES", 1000)
        monkeypatch.setattr(transfer, "_FIRST_WAIT_SECONDS", 0.01)
        server.publish(REPO, folder)
        yield server
        huggingface_hub.close_session()


def contents(out: Path) -> dict[str, bytes]:
    """Every file's bytes; the manifest without the one line that names the source."""
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    manifest = json.loads(files["mlx_k3.json"])
    del manifest["job"]["source"]
    files["mlx_k3.json"] = json.dumps(manifest).encode()
    return files


def command(*args: str) -> list[str]:
    """``mlx-k3 ARGS`` in another process, with the fixture's small pieces."""
    setup = (
        "from mlx_k3.convert import download, hub, transfer; download.PIECE_BYTES = 40_000; "
        "hub._HEAD_BYTES = 1000; transfer._FIRST_WAIT_SECONDS = 0.01; "
        "from mlx_k3.cli import main; main()"
    )
    return [sys.executable, "-c", setup, *args]


def environment(server: HubServer, home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return {**kept, "HF_ENDPOINT": server.endpoint, "HF_HOME": str(home)}


FAULTS = {
    "none": [],
    "drops": [Fault(name, drop_at=DEEP + 777 * n) for n, name in enumerate(SHARDS)],
    "a wrong byte": [Fault(SHARDS[2], corrupt_at=DEEP)],
    "too many requests": [Fault(SHARDS[1], status=429, headers={"Retry-After": "1"})],
    "unavailable": [Fault("", status=503), *(Fault(name, status=503, times=2) for name in SHARDS)],
    "everything": [
        Fault(SHARDS[0], drop_at=DEEP),
        Fault(SHARDS[0], drop_at=DEEP + 1),
        Fault(SHARDS[1], status=500, times=3),
        Fault(SHARDS[2], corrupt_at=DEEP),
        Fault(SHARDS[2], drop_at=DEEP + 20_000),
        Fault("config.json", drop_at=100),
        Fault("README.md", corrupt_at=0),
    ],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_the_same_bytes_as_from_the_folder(
    server: HubServer, wanted: dict[str, bytes], tmp_path: Path, faults: list[Fault]
) -> None:
    server.faults += [Fault(**vars(fault)) for fault in faults]
    convert(REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == wanted
    assert all(fault.times == 0 for fault in server.faults)
    assert {r.name for r in server.requests} & {"modeling_kimi.py"} == set()


def test_free_source_holds_one_shard_at_a_time(
    server: HubServer, folder: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    staging = tmp_path / "out.source"
    held: list[list[str]] = []
    bytes_held: list[int] = []

    def look(done: int, total: int, file: str) -> None:
        shards = [p for p in staging.glob("*.safetensors*") if p.exists()]
        held.append([p.name.removesuffix(".part") for p in shards])
        bytes_held.append(sum(os.path.getsize(p) for p in shards if p.exists()))

    convert(REPO, tmp_path / "out", free_source=True, progress=look)
    assert contents(tmp_path / "out") == wanted
    assert {name for names in held for name in names} == set(SHARDS)
    assert max(map(len, held)) == 1
    assert 0 < max(bytes_held) <= max((folder / name).stat().st_size for name in SHARDS)
    assert not staging.exists()


def test_each_shard_is_downloaded_once_and_kept(
    server: HubServer, folder: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    convert(REPO, tmp_path / "out")
    for name in SHARDS:
        downloads = [r for r in server.requests if r.name == name and r.stop > DEEP]
        starts = sorted(r.start for r in downloads)
        assert len(set(starts)) == len(starts)
        staged = tmp_path / "out.source" / name
        assert staged.read_bytes() == (folder / name).read_bytes()
    # Another conversion of the same model to the same place finds them.
    shutil.rmtree(tmp_path / "out")
    before = len([r for r in server.requests if r.stop > DEEP])
    convert(REPO, tmp_path / "out", trunk="bf16")
    assert len([r for r in server.requests if r.stop > DEEP]) == before


def test_progress_shows_the_download(server: HubServer, tmp_path: Path) -> None:
    seen: list[str] = []
    convert(REPO, tmp_path / "out", progress=lambda done, total, file: seen.append(file))
    assert any(s.startswith(f"downloading {SHARDS[3]}, ") and s.endswith(" KB") for s in seen)
    assert "model-experts-00001-of-00004.safetensors" in seen


@pytest.mark.parametrize("free_source", [False, True])
@pytest.mark.parametrize("shard", [SHARDS[0], SHARDS[3]])
def test_kill_and_resume(
    server: HubServer, wanted: dict[str, bytes], tmp_path: Path, shard: str, free_source: bool
) -> None:
    out, staging = tmp_path / "out", tmp_path / "out.source"
    server.faults.append(Fault(shard, hang_at=DEEP + 5000))
    args = ["convert", REPO, str(out), *(["--free-source"] if free_source else [])]
    process = subprocess.Popen(
        command(*args), env=environment(server, tmp_path), stderr=subprocess.DEVNULL
    )
    try:
        assert server.hanging.wait(30)
        part = staging / f"{shard}.part"
        # The piece that hangs is the sixth; those before it are on the disk or about to be.
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (out / "config.json").exists()
    here = part.stat().st_size
    earlier = SHARDS[: SHARDS.index(shard)]
    asked = len(server.requests)

    convert(REPO, out, free_source=free_source)
    assert contents(out) == wanted
    again = [r for r in server.requests[asked:] if r.stop > DEEP]
    assert {r.name for r in again}.isdisjoint(earlier)
    assert min(r.start for r in again if r.name == shard) >= here
    assert staging.exists() is not free_source


def wait_until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        transfer.time.sleep(0.01)
    raise AssertionError("it did not happen within half a minute")


def test_resuming_stays_on_the_commit_when_the_branch_moves(
    server: HubServer, folder: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    server.faults.append(Fault(SHARDS[4], corrupt_at=DEEP, times=2))
    with pytest.raises(CheckpointError, match=f"{SHARDS[4]} came with a wrong checksum twice"):
        convert(REPO, tmp_path / "out", free_source=True)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    (moved / "LICENSE").write_text("not as you like\n")
    server.publish(REPO, moved)
    convert(REPO, tmp_path / "out", free_source=True)
    assert contents(tmp_path / "out") == wanted
    manifest = json.loads((tmp_path / "out" / "mlx_k3.json").read_text())
    assert manifest["job"]["source"] == f"{REPO}@{server.publish('org/tiny', folder)}"


def test_a_complete_conversion_lets_go_of_its_commit(
    server: HubServer, folder: Path, tmp_path: Path
) -> None:
    convert(REPO, tmp_path / "out")
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    (moved / "LICENSE").write_text("not as you like\n")
    commit = server.publish(REPO, moved)
    shutil.rmtree(tmp_path / "out")
    asked = len(server.requests)
    convert(REPO, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "mlx_k3.json").read_text())
    assert manifest["job"]["source"] == f"{REPO}@{commit}"
    assert (tmp_path / "out" / "LICENSE").read_text() == "not as you like\n"
    # What did not change is still in staging.
    assert all(r.stop < DEEP for r in server.requests[asked:])


def test_a_shard_of_another_length_than_listed(
    server: HubServer, tmp_path: Path, folder: Path
) -> None:
    size = (folder / SHARDS[5]).stat().st_size
    server.faults.append(Fault(SHARDS[5], cut_to=size - 4, times=100))
    with pytest.raises(CheckpointError) as error:
        convert(REPO, tmp_path / "out")
    assert f"{SHARDS[5]} has {size - 4:,} bytes, its listing says {size:,}" in str(error.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.source").exists()


def test_a_shard_that_is_shorter_than_its_header(
    server: HubServer, tmp_path: Path, folder: Path
) -> None:
    """Uploaded incompletely: the listing agrees with the file, and the plan still notices."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    os.truncate(broken / SHARDS[5], (broken / SHARDS[5]).stat().st_size - 4)
    server.publish("org/broken", broken)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[5]} ends 4 bytes early"):
        convert("org/broken", tmp_path / "out")
    assert all(r.stop < DEEP for r in server.requests)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.source").exists()


def test_a_missing_shard_is_noticed_before_any_download(
    server: HubServer, tmp_path: Path, folder: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken, ignore=shutil.ignore_patterns(SHARDS[4]))
    server.publish("org/broken", broken)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[4]} missing"):
        convert("org/broken", tmp_path / "out")
    assert all(r.stop < DEEP for r in server.requests)


def test_experts_cannot_stay_on_the_hub(server: HubServer, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--experts reference: org/tiny is not a folder"):
        convert(REPO, tmp_path / "out", experts="reference")
    assert not (tmp_path / "out").exists()


def test_the_disk_must_have_room_for_what_is_downloaded(
    server: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(folder / name).stat().st_size for name in SHARDS]
    total = stream.open_conversion(REPO, tmp_path / "out").plan.total_bytes
    monkeypatch.setattr(stream, "_free_bytes", lambda out: total + max(sizes))
    with pytest.raises(BudgetError, match="more than the disk has room for"):
        convert(REPO, tmp_path / "out")
    stream.open_conversion(REPO, tmp_path / "out", free_source=True).check()
    monkeypatch.setattr(stream, "_free_bytes", lambda out: total + max(sizes) - 1)
    with pytest.raises(BudgetError):
        convert(REPO, tmp_path / "out", free_source=True)
    monkeypatch.setattr(stream, "_free_bytes", lambda out: total + sum(sizes))
    stream.open_conversion(REPO, tmp_path / "out").check()


def test_a_finished_conversion_has_nothing_to_do(server: HubServer, tmp_path: Path) -> None:
    convert(REPO, tmp_path / "out", free_source=True)
    asked = len(server.requests)
    with pytest.raises(NothingToDo, match="complete"):
        convert(REPO, tmp_path / "out", free_source=True)
    assert all(r.stop < DEEP for r in server.requests[asked:])


def test_the_command_line(
    server: HubServer, folder: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    server.publish(REPO, folder, branch="v2")
    server.faults.append(Fault(SHARDS[1], status=429, headers={"Retry-After": "1"}))
    out = tmp_path / "out"
    run = subprocess.run(
        command("convert", REPO, str(out), "--revision", "v2", "--free-source", "--json"),
        env=environment(server, tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout)["out"] == str(out)
    assert f"{SHARDS[1]}: HTTP 429; trying again in 1 s" in run.stderr
    assert contents(out) == wanted


def test_ctrl_c_stops_a_slow_download_and_keeps_it(server: HubServer, tmp_path: Path) -> None:
    server.bytes_per_second = 50_000
    part = tmp_path / "out.source" / f"{SHARDS[0]}.part"
    process = subprocess.Popen(
        command("convert", REPO, str(tmp_path / "out")),
        env=environment(server, tmp_path),
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in shown
    assert part.stat().st_size > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["org/absent", "out"], "no such folder, and no such model at"),
        ([REPO, "out", "--revision", "v9"], "no such revision"),
        (["nothing", "out"], "no such folder, and not a Hub id of the form org/name"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    server: HubServer, tmp_path: Path, args: list[str], message: str
) -> None:
    run = subprocess.run(
        command("convert", *args),
        env=environment(server, tmp_path),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert message in run.stderr and run.stderr.count("\n") == 1
    assert list(tmp_path.glob("out*")) == []


def test_inspect_reads_only_headers(server: HubServer, folder: Path, tmp_path: Path) -> None:
    def inspect(model: str) -> dict:
        run = subprocess.run(
            command("inspect", model, "--json"),
            env=environment(server, tmp_path),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(run.stdout)

    remote = inspect(REPO)
    assert remote.pop("path") == REPO
    local = inspect(str(folder))
    assert local.pop("path") == str(folder)
    assert remote == local
    assert remote["complete"] is True
    assert all(r.stop < DEEP for r in server.requests)


def test_verify_against_the_hub_says_what_it_needs(
    server: HubServer, folder: Path, tmp_path: Path
) -> None:
    convert(folder, tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"this needs .* itself; download the model"):
        verify(tmp_path / "out", against=REPO)
    huggingface_hub.snapshot_download(REPO)
    assert verify(tmp_path / "out", against=REPO)["ok"]
