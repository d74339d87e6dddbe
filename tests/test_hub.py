"""The Hub as a source, over a loopback server that has the faults of a real network."""

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from mlx_k3.convert import download, transfer
from mlx_k3.convert import hub as hub_module
from mlx_k3.convert.hub import HubSource
from mlx_k3.convert.source import open_source
from mlx_k3.errors import BudgetError, CheckpointError, UnsupportedError

from .support.hub_server import Fault, HubServer, use_hub

REPO = "org/model"
SHARD = "model-00001-of-000002.safetensors"
SHARD_BYTES = 1_000_003


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Not a model that loads, but files of every kind; enough for all but conversions."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_bytes(b'{"model_type": "kimi_k3"}')
    (folder / "modeling.py").write_bytes(b"raise SystemExit")
    (folder / "LICENSE").write_bytes(b"as you like")
    for n in (1, 2):
        data = hashlib.shake_128(bytes([n])).digest(SHARD_BYTES)
        (folder / f"model-0000{n}-of-000002.safetensors").write_bytes(data)
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub in this process, to which huggingface_hub is directed; small pieces, short waits."""
    with HubServer() as server:
        use_hub(server, monkeypatch, tmp_path)
        monkeypatch.setattr(download, "PIECE_BYTES", 100_000)
        monkeypatch.setattr(hub_module, "_HEAD_BYTES", 1000)
        monkeypatch.setattr(transfer, "_FIRST_WAIT_SECONDS", 0.01)
        monkeypatch.setattr(transfer, "_LONGEST_WAIT_SECONDS", 0.02)
        yield server
        huggingface_hub.close_session()


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "staging"


def test_without_staging_only_a_download_of_before_can_be_fetched(
    server: HubServer, folder: Path
) -> None:
    server.publish(REPO, folder)
    source = HubSource(REPO)
    with pytest.raises(UnsupportedError, match=f"this needs {SHARD} itself; download the model"):
        source.fetch(SHARD)
    cached = huggingface_hub.hf_hub_download(REPO, SHARD)
    assert source.fetch(SHARD) == Path(cached)


def test_lists_one_commit_without_code(server: HubServer, folder: Path) -> None:
    commit = server.publish(REPO, folder)
    source = HubSource(REPO)
    assert source.commit == commit
    assert source.files() == {
        "LICENSE": 11,
        "config.json": 25,
        "model-00001-of-000002.safetensors": SHARD_BYTES,
        "model-00002-of-000002.safetensors": SHARD_BYTES,
    }
    assert [r.name for r in server.requests] == [""]


def test_stays_on_its_commit_when_the_branch_moves(
    server: HubServer, folder: Path, staging: Path
) -> None:
    commit = server.publish(REPO, folder)
    source = HubSource(REPO, staging=staging)
    source.fetch("LICENSE")
    newer = folder.with_name("newer")
    newer.mkdir()
    (newer / "config.json").write_bytes(b"{}")
    moved = server.publish(REPO, newer)
    assert source.read("config.json", 0, 25) == b'{"model_type": "kimi_k3"}'
    # An interrupted run goes on with what it began with, too.
    assert HubSource(REPO, staging=staging).commit == commit
    assert HubSource(REPO).commit == moved
    assert HubSource(REPO, revision=commit).commit == commit


def test_staging_of_another_model_is_refused(
    server: HubServer, folder: Path, staging: Path
) -> None:
    server.publish(REPO, folder)
    server.publish("org/other", folder)
    HubSource(REPO, staging=staging).fetch("LICENSE")
    with pytest.raises(CheckpointError, match="holds files of org/model at its default branch"):
        HubSource("org/other", staging=staging)
    with pytest.raises(CheckpointError, match="holds files of org/model"):
        HubSource(REPO, revision="v2", staging=staging)


def test_reads_ranges_and_fetches_no_more(server: HubServer, folder: Path) -> None:
    server.publish(REPO, folder)
    source = HubSource(REPO)
    data = (folder / SHARD).read_bytes()
    assert source.read(SHARD, 0, 8) == data[:8]
    assert source.read(SHARD, 8, 900) == data[8:908]
    assert source.read(SHARD, 5000, 70) == data[5000:5070]
    assert source.read(SHARD, SHARD_BYTES - 1, 1) == data[-1:]
    assert source.read(SHARD, 0, 0) == b""
    assert server.sent_bytes(SHARD) == 1000 + 70 + 1
    # A plan reads every header: the other shard's came along.
    assert server.sent_bytes(SHARD.replace("00001-", "00002-")) == 1000
    with pytest.raises(CheckpointError, match="ends 1 bytes early"):
        source.read(SHARD, SHARD_BYTES, 1)
    for name in ("modeling.py", "absent.json", "../config.json"):
        with pytest.raises(CheckpointError, match="is missing"):
            source.read(name, 0, 1)


def test_fetches_release_and_progress(server: HubServer, folder: Path, staging: Path) -> None:
    server.publish(REPO, folder)
    seen: list[tuple[str, int, int]] = []
    source = HubSource(REPO, free_source=True, staging=staging)
    source.progress = lambda *args: seen.append(args)
    path = source.fetch(SHARD)
    assert path == staging / SHARD
    assert path.read_bytes() == (folder / SHARD).read_bytes()
    assert seen[0] == (SHARD, 0, SHARD_BYTES)
    assert seen[-1] == (SHARD, SHARD_BYTES, SHARD_BYTES)
    counts = [here for _, here, _ in seen]
    assert counts == sorted(counts) and len(counts) > 10
    source.fetch(SHARD)
    assert server.sent_bytes(SHARD) == SHARD_BYTES
    source.release(SHARD)
    assert [p.name for p in staging.iterdir()] == ["staging.json"]
    source.fetch("config.json")
    source.close()
    assert not staging.exists()


def test_the_room_that_downloads_take(server: HubServer, folder: Path, staging: Path) -> None:
    server.publish(REPO, folder)
    other = SHARD.replace("00001-", "00002-")
    groups = [("config.json", SHARD), (SHARD, other)]
    freeing = HubSource(REPO, free_source=True, staging=staging)
    assert freeing.room_bytes(groups[:1]) == 25 + SHARD_BYTES
    assert freeing.room_bytes(groups) == 2 * SHARD_BYTES
    keeping = HubSource(REPO, staging=staging)
    assert keeping.room_bytes(groups) == 25 + 2 * SHARD_BYTES
    keeping.fetch(SHARD)
    (staging / f"{other}.part").write_bytes(bytes(1000))
    assert keeping.room_bytes(groups) == 25 + SHARD_BYTES - 1000
    huggingface_hub.hf_hub_download(REPO, other)
    assert keeping.room_bytes(groups) == 25
    keeping.close()
    assert (staging / SHARD).is_file()


def test_without_free_source_a_shard_stays_and_is_not_fetched_again(
    server: HubServer, folder: Path, staging: Path
) -> None:
    server.publish(REPO, folder)
    source = HubSource(REPO, staging=staging)
    source.release(SHARD)
    source.fetch(SHARD)
    source.release(SHARD)
    assert HubSource(REPO, staging=staging).fetch(SHARD) == staging / SHARD
    assert server.sent_bytes(SHARD) == SHARD_BYTES


def test_resumes_from_the_byte_after_drops(server: HubServer, folder: Path, staging: Path) -> None:
    server.publish(REPO, folder)
    server.faults += [Fault(SHARD, drop_at=offset) for offset in (0, 4321, 654_321, 999_999)]
    path = HubSource(REPO, staging=staging).fetch(SHARD)
    assert path.read_bytes() == (folder / SHARD).read_bytes()
    assert all(fault.times == 0 for fault in server.faults)
    assert server.sent_bytes(SHARD) == SHARD_BYTES
    starts = {r.start for r in server.requests if r.name == SHARD}
    assert {4321, 654_321, 999_999} <= starts


def test_continues_what_a_killed_process_left(
    server: HubServer, folder: Path, staging: Path
) -> None:
    server.publish(REPO, folder)
    data = (folder / SHARD).read_bytes()
    staging.mkdir()
    (staging / f"{SHARD}.part").write_bytes(data[:700_001])
    path = HubSource(REPO, staging=staging).fetch(SHARD)
    assert path.read_bytes() == data
    assert server.sent_bytes(SHARD) == SHARD_BYTES - 700_001


@pytest.mark.parametrize("damage", ["garbage", "too long"])
def test_a_damaged_partial_file_is_fetched_anew(
    server: HubServer, folder: Path, staging: Path, damage: str
) -> None:
    server.publish(REPO, folder)
    data = (folder / SHARD).read_bytes()
    staging.mkdir()
    left = bytes(5000) if damage == "garbage" else data + b"more"
    (staging / f"{SHARD}.part").write_bytes(left)
    assert HubSource(REPO, staging=staging).fetch(SHARD).read_bytes() == data


def test_a_damaged_staged_file_is_noticed(server: HubServer, folder: Path, staging: Path) -> None:
    server.publish(REPO, folder)
    path = HubSource(REPO, staging=staging).fetch(SHARD)
    with open(path, "r+b") as file:
        file.seek(500_000)
        file.write(b"\0\0\0\0")
    assert (
        HubSource(REPO, staging=staging).fetch(SHARD).read_bytes() == (folder / SHARD).read_bytes()
    )


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_one_wrong_byte_is_downloaded_again_once(
    server: HubServer, folder: Path, staging: Path, name: str
) -> None:
    server.publish(REPO, folder)
    server.faults.append(Fault(name, corrupt_at=20))
    path = HubSource(REPO, staging=staging).fetch(name)
    assert path.read_bytes() == (folder / name).read_bytes()
    assert server.sent_bytes(name) == 2 * path.stat().st_size


def test_a_wrong_byte_twice_is_an_error(server: HubServer, folder: Path, staging: Path) -> None:
    server.publish(REPO, folder)
    server.faults.append(Fault(SHARD, corrupt_at=654_321, times=2))
    source = HubSource(REPO, staging=staging)
    with pytest.raises(CheckpointError, match=f"{SHARD} came with a wrong checksum twice") as error:
        source.fetch(SHARD)
    assert "\n" not in str(error.value)
    assert not list(staging.glob("*.safetensors*"))
    assert source.fetch(SHARD).is_file()


def test_honours_retry_after_and_says_so(
    server: HubServer, folder: Path, staging: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(REPO, folder)
    waits: list[float] = []

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:  # not one of ours
                return super().wait()
            waits.append(timeout)
            return False

    server.faults += [
        Fault(SHARD, status=429, headers={"Retry-After": "7"}),
        Fault(SHARD, status=503),
        Fault(SHARD, status=429, headers={"ratelimit": '"resolvers";r=0;t=55'}),
    ]
    source = HubSource(REPO)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(transfer.threading, "Event", Impatient)
        data = source.read(SHARD, 2000, 10)
    assert data == (folder / SHARD).read_bytes()[2000:2010]
    # Twice what the server asked for; in between the second failure's own wait.
    assert waits == [7.0, 0.02, 55.0]
    assert f"{SHARD}: HTTP 429; trying again in 7 s" in caplog.messages
    assert f"{SHARD}: HTTP 429; trying again in 55 s" in caplog.messages


def test_a_retry_after_is_waited_for(server: HubServer, folder: Path) -> None:
    server.publish(REPO, folder)
    server.faults.append(Fault("", status=429, headers={"Retry-After": "1"}))
    start = transfer.time.monotonic()
    HubSource(REPO)
    assert transfer.time.monotonic() - start >= 1


def test_an_endless_wait_and_endless_failures_are_errors(server: HubServer, folder: Path) -> None:
    server.publish(REPO, folder)
    source = HubSource(REPO)
    server.faults.append(Fault("config.json", status=429, headers={"Retry-After": "86400"}))
    with pytest.raises(CheckpointError, match=r"HTTP 429, and asks to wait 86400 s.*goes on from"):
        source.read("config.json", 0, 25)
    server.faults.append(Fault("config.json", status=503, times=1000))
    with pytest.raises(CheckpointError, match=r"does not deliver config.json \(HTTP 503\)"):
        source.read("config.json", 0, 25)
    assert server.faults[-1].times == 1000 - transfer._ATTEMPTS


def test_progress_renews_the_patience(server: HubServer, folder: Path) -> None:
    server.publish(REPO, folder)
    drops = [Fault(SHARD, drop_at=2000 + n) for n in range(1, 3 * transfer._ATTEMPTS)]
    server.faults += drops
    data = HubSource(REPO).read(SHARD, 2000, 100)
    assert data == (folder / SHARD).read_bytes()[2000:2100]
    assert all(fault.times == 0 for fault in drops)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_file_of_another_length_than_listed_is_refused(
    server: HubServer, folder: Path, staging: Path, name: str
) -> None:
    server.publish(REPO, folder)
    server.faults.append(Fault(name, cut_to=20, times=100))
    with pytest.raises(CheckpointError, match=rf"{name} has 20 bytes, its listing says"):
        HubSource(REPO, staging=staging).fetch(name)


def test_a_server_without_ranges_is_refused_unless_the_whole_is_wanted(
    server: HubServer, folder: Path, staging: Path
) -> None:
    server.publish(REPO, folder)
    server.faults += [Fault(name, no_ranges=True, times=100) for name in (SHARD, "config.json")]
    source = HubSource(REPO, staging=staging)
    assert source.fetch("config.json").read_bytes() == (folder / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="does not serve byte ranges"):
        source.fetch(SHARD)


def test_a_token_goes_to_the_hub_and_never_to_its_storage(
    server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(REPO, folder)
    server.gated.add(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    source = HubSource(REPO)
    source.read(SHARD, 0, 8)
    source.read("config.json", 0, 8)
    sent = {(r.name, r.at_storage): r.authorization for r in server.requests}
    assert sent == {
        ("", False): "Bearer hf_secret",
        ("config.json", False): "Bearer hf_secret",
        (SHARD, True): None,
        (SHARD.replace("00001-", "00002-"), True): None,
    }


def test_refusals_say_what_to_do(server: HubServer, folder: Path) -> None:
    server.publish(REPO, folder)
    server.publish("org/gated", folder)
    server.gated.add("org/gated")
    expected = {
        ("org/gated", None): f"accept the terms at {server.endpoint}/org/gated, then log in with",
        ("org/absent", None): "org/absent: no such folder, and no such model at",
        (REPO, "v9"): "org/model: no such revision",
    }
    for (repo, revision), message in expected.items():
        with pytest.raises(CheckpointError) as error:
            open_source(repo, revision=revision)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_a_refused_token(server: HubServer, folder: Path) -> None:
    server.publish(REPO, folder)
    server.faults.append(Fault("", status=403))
    with pytest.raises(CheckpointError, match=r"the token was refused \(HTTP 403\); log in with"):
        HubSource(REPO)


def test_no_network_is_one_line(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"127.0.0.1:1 does not deliver its listing .*check"):
        open_source(REPO)


def test_an_endpoint_that_is_no_url(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "hub.example")
    with pytest.raises(CheckpointError, match=r"HF_ENDPOINT=hub\.example is not a URL"):
        open_source(REPO)


def test_something_else_that_answers(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: _not_json())
    with pytest.raises(CheckpointError, match="does not answer as a Hub does; check HF_ENDPOINT"):
        open_source(REPO)


def _not_json() -> None:
    transfer.json.loads("<html>Welcome to the hotel</html>")


def test_a_download_of_before_is_used_and_never_deleted(
    server: HubServer, folder: Path, staging: Path
) -> None:
    server.publish(REPO, folder)
    cached = huggingface_hub.hf_hub_download(REPO, SHARD)
    sent = server.sent_bytes(SHARD)
    source = HubSource(REPO, free_source=True, staging=staging)
    assert source.fetch(SHARD) == Path(cached)
    source.release(SHARD)
    assert Path(cached).is_file()
    assert server.sent_bytes(SHARD) == sent
    with open(os.path.realpath(cached), "r+b") as file:
        file.write(b"damage")
    assert source.fetch(SHARD) == staging / SHARD


def test_offline_uses_the_cache(
    server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(REPO, folder)
    huggingface_hub.snapshot_download(REPO, ignore_patterns="*.py")
    asked = len(server.requests)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_source(REPO).files()[SHARD] == SHARD_BYTES
    with pytest.raises(UnsupportedError, match="HF_HUB_OFFLINE is set; leave one of them out"):
        open_source(REPO, free_source=True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set and the Hub's cache does not"):
        open_source("org/absent")
    assert len(server.requests) == asked


def test_a_full_disk_stops_the_download_and_keeps_what_is_there(
    server: HubServer, folder: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(REPO, folder)
    real_open = open

    class Full:
        """A file on a disk that is full after 250,000 bytes."""

        def __init__(self, *args: object) -> None:
            self.file = real_open(*args)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str):
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            if self.file.tell() + len(data) > 250_000:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

    source = HubSource(REPO, staging=staging)
    with monkeypatch.context() as patch:
        patch.setattr(download, "open", Full, raising=False)
        with pytest.raises(BudgetError, match=r"the disk is full, .* needs 1 MB; make room and"):
            source.fetch(SHARD)
    assert (staging / f"{SHARD}.part").stat().st_size == 200_000
    seen: list[int] = []
    source.progress = lambda name, here, size: seen.append(here)
    assert source.fetch(SHARD).read_bytes() == (folder / SHARD).read_bytes()
    assert seen[0] == 200_000
