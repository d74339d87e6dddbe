"""What goes wrong in hours of conversion: kills, full disks, damaged shards, two at once."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_k3.checkpoint.index import INDEX
from mlx_k3.convert import journal
from mlx_k3.convert.stream import convert
from mlx_k3.convert.verify import verify
from mlx_k3.errors import BudgetError, CheckpointError, K3Error

from .support.releases import (
    contents,
    copy_release,
    edit_json,
    random_release,
    read_tensors,
    write_tensors,
)

SHARD = "model-0000{}-of-000006.safetensors"


@pytest.fixture
def release(golden, tmp_path) -> Path:
    return copy_release(golden / "tiny-text", tmp_path / "release")


@pytest.fixture(autouse=True)
def tidy(tmp_path):
    """pytest keeps what tests leave: a gigabyte for each run of these."""
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="module")
def big(golden, tmp_path_factory) -> Iterator[Path]:
    """100 MB: a conversion takes long enough to be killed in the middle."""
    folder = random_release(
        tmp_path_factory.mktemp("big") / "release",
        golden / "tiny-text",
        num_experts=64,
        moe_intermediate_size=256,
        routed_expert_hidden_size=768,
        hidden_size=512,
    )
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def wanted(big, tmp_path_factory) -> dict[str, bytes]:
    """What an undisturbed conversion of ``big`` writes."""
    out = tmp_path_factory.mktemp("wanted") / "out"
    convert(big, out)
    result = contents(out)
    shutil.rmtree(out)
    return result


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "mlx_k3", "convert", *map(str, args)]


def kill_at_random(big: Path, out: Path, rng: random.Random) -> bool:
    """Start a conversion and kill it within its working time; whether it was still running."""
    process = subprocess.Popen(command(big, out), stdout=subprocess.DEVNULL)
    before = set(os.listdir(out)) if out.exists() else set()
    while process.poll() is None and (not out.exists() or set(os.listdir(out)) == before):
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.25))
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def test_killed_twenty_times_the_bytes_are_the_same(big, wanted, tmp_path):
    rng = random.Random(0)
    out, kills, completed, unfinished = tmp_path / "out", 0, 0, 0
    while kills < 20:
        if kill_at_random(big, out, rng):
            kills += 1
            if (out / journal.NAME).exists() and not (out / "config.json").exists():
                unfinished += 1
                with pytest.raises(CheckpointError, match="not finished"):
                    verify(out)
        if out.exists() and not (out / journal.NAME).exists() and (out / "config.json").exists():
            assert contents(out) == wanted
            shutil.rmtree(out)
            completed += 1
    subprocess.run(command(big, out), check=True, stdout=subprocess.DEVNULL)
    assert contents(out) == wanted
    # Else the kills came too early or too late to prove anything.
    assert unfinished >= 10, (kills, completed, unfinished)


def test_finished_files_are_not_written_again(big, wanted, tmp_path):
    out, seen = tmp_path / "out", []

    def stop(done: int, total: int, file: str) -> None:
        if file == "model-experts-00002-of-00004.safetensors":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(big, out, progress=stop)
    times = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    assert len(times) == 4 and not list(out.glob("*.partial"))
    convert(big, out, progress=lambda done, total, file: seen.append((done, total, file)))
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    assert contents(out) == wanted
    # What was there counts as done from the first report on, and all of it is done at the last.
    assert seen[0][0] > sum(len(wanted[name]) for name in times)
    assert seen[-1][0] == seen[-1][1]


def test_ctrl_c_exits_with_130_and_can_be_continued(big, wanted, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(big, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list(out.glob("model-*")):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err, err
    assert (out / journal.NAME).exists() and not (out / "config.json").exists()
    subprocess.run(command(big, out), check=True, stdout=subprocess.DEVNULL)
    assert contents(out) == wanted


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 120 MB in memory."""
    if os.geteuid() or sys.platform != "linux":
        pytest.skip("mounting a small disk takes root on Linux")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", str(disk)])
    if mounted.returncode:
        pytest.skip("this machine does not allow mounting")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_the_run_goes_on(big, wanted, small_disk):
    """Someone else fills the disk while the conversion runs."""
    out, filler = small_disk / "out", small_disk / "filler"
    needed = sum(map(len, wanted.values()))
    assert needed < 110e6

    def fill(done: int, total: int, file: str) -> None:
        if done > total // 2 and not filler.exists():
            filler.write_bytes(bytes(max(shutil.disk_usage(small_disk).free - 1_000_000, 0)))

    with pytest.raises(BudgetError, match=r"the disk is full; make room for .* MB more") as caught:
        convert(big, out, progress=fill)
    assert "\n" not in str(caught.value)
    assert not list(out.glob("*.partial")) and not (out / "config.json").exists()
    done = {name for name in wanted if (out / name).exists()}
    assert done and all((out / name).read_bytes() == wanted[name] for name in done)
    with pytest.raises(BudgetError, match="more than the disk has room for"):
        convert(big, out)
    filler.unlink()
    convert(big, out)
    assert contents(out) == wanted


def test_a_disk_that_is_too_small_is_left_alone(big, small_disk):
    (small_disk / "filler").write_bytes(bytes(100_000_000))
    result = subprocess.run(command(big, small_disk / "out"), capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("mlx-k3: ") and result.stderr.count("\n") == 1
    assert os.listdir(small_disk) == ["filler"]


def test_a_torn_journal_line_costs_one_file(big, wanted, tmp_path):
    out = tmp_path / "out"

    def stop(done: int, total: int, file: str) -> None:
        if file.startswith("model-trunk-00003"):
            raise KeyboardInterrupt

    for tear in (1, 40):
        with pytest.raises(KeyboardInterrupt):
            convert(big, out, progress=stop)
        size = (out / journal.NAME).stat().st_size
        os.truncate(out / journal.NAME, size - tear)
    convert(big, out)
    assert contents(out) == wanted


def test_a_finished_file_of_the_wrong_size_is_written_again(big, wanted, tmp_path):
    out = tmp_path / "out"

    def stop(done: int, total: int, file: str) -> None:
        if file.startswith("model-trunk-00003"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(big, out, progress=stop)
    os.truncate(out / "model-experts-00001-of-00004.safetensors", 1000)
    (out / "model-trunk-00001-of-00006.safetensors").unlink()
    convert(big, out)
    assert contents(out) == wanted


def test_another_job_in_an_unfinished_folder_is_refused(big, golden, wanted, tmp_path):
    out = tmp_path / "out"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(big, out, progress=stop)
    with pytest.raises(
        CheckpointError, match="unfinished conversion with trunk q8 is here, not q4"
    ):
        convert(big, out, trunk="q4")
    with pytest.raises(CheckpointError, match="unfinished conversion with source"):
        convert(golden / "tiny-text", out)
    convert(big, out)
    assert contents(out) == wanted


def test_two_processes_cannot_write_one_folder(big, wanted, tmp_path):
    out, said = tmp_path / "out", []

    def second(done: int, total: int, file: str) -> None:
        if not said:
            said.append(subprocess.run(command(big, out), capture_output=True, text=True))

    convert(big, out, progress=second)
    (result,) = said
    assert result.returncode == 2 and "another process is converting" in result.stderr
    assert contents(out) == wanted


FAULTS = {
    "one byte short": (lambda f: os.truncate(f, f.stat().st_size - 1), "ends 1 bytes early"),
    "a mebibyte short": (
        lambda f: os.truncate(f, f.stat().st_size - 2**18),
        "ends 262,144 bytes early; download it again",
    ),
    "cut in the header": (lambda f: os.truncate(f, 1000), "inside its header"),
    "empty": (lambda f: os.truncate(f, 0), "0 bytes, too few"),
    "too long": (lambda f: f.write_bytes(f.read_bytes() + b"x"), "is 1 bytes longer"),
    "missing": (lambda f: f.unlink(), "missing; download it again"),
    "a web page": (
        lambda f: f.write_text("<!DOCTYPE html><html>" * 50),
        "is not a safetensors file",
    ),
    "a pointer": (
        lambda f: f.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is not a",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_shard_is_refused_by_name(release, tmp_path, fault):
    spoil, says = FAULTS[fault]
    shard = release / SHARD.format(3)
    spoil(shard)
    with pytest.raises(CheckpointError) as caught:
        convert(release, tmp_path / "out")
    message = str(caught.value)
    assert says in message and shard.name in message and "\n" not in message
    assert not (tmp_path / "out").exists()


def test_swapped_shards_are_refused(release, tmp_path):
    one, two = release / SHARD.format(2), release / SHARD.format(3)
    one.rename(release / "aside")
    two.rename(one)
    (release / "aside").rename(two)
    with pytest.raises(CheckpointError, match=r"places .* in .*, which does not hold it"):
        convert(release, tmp_path / "out")


def test_duplicated_and_foreign_shards_are_refused(release, tmp_path):
    foreign = release / "model-00007-of-000006.safetensors"
    shutil.copyfile(release / SHARD.format(2), foreign)
    with pytest.raises(CheckpointError, match=r"model-00007.* is not in model.safetensors.index"):
        convert(release, tmp_path / "out")
    (release / INDEX).unlink()
    with pytest.raises(CheckpointError, match="is in both"):
        convert(release, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shard_of_another_model_is_refused(release, golden, tmp_path):
    """Same names, other shapes: the index cannot tell, the configuration can."""
    other = random_release(
        tmp_path / "other", golden / "tiny-text", moe_intermediate_size=32, num_shared_experts=4
    )
    shutil.copyfile(other / SHARD.format(3), release / SHARD.format(3))
    with pytest.raises(CheckpointError, match=r"model-00003.*has shape \[32, 32\].*\[64, 32\]"):
        convert(release, tmp_path / "out")


def test_a_shard_that_changes_meanwhile_is_noticed(release, tmp_path):
    shard = release / SHARD.format(4)
    tensors = read_tensors(shard)

    def change(done: int, total: int, file: str) -> None:
        if file == "model-trunk-00002-of-00006.safetensors":
            write_tensors(shard, dict(reversed(tensors.items())))

    with pytest.raises(CheckpointError, match=r"model-00004.* changed during the conversion"):
        convert(release, tmp_path / "out", progress=change)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/tmp/outside.safetensors", "a/../../b"]
)
def test_an_index_cannot_lead_out_of_the_folder(release, tmp_path, name):
    shutil.copyfile(release / SHARD.format(1), tmp_path / "outside.safetensors")
    edit_json(
        release / INDEX,
        lambda index: {
            "weight_map": {
                key: name if file == SHARD.format(1) else file
                for key, file in index["weight_map"].items()
            }
        },
    )
    with pytest.raises(CheckpointError, match="do not trust"):
        convert(release, tmp_path / "out")


def test_a_shard_cannot_be_a_link_out_of_the_folder(release, tmp_path):
    shard = release / SHARD.format(1)
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        convert(release, tmp_path / "out")


def test_every_refusal_is_exit_code_2_and_one_line(release, tmp_path):
    os.truncate(release / SHARD.format(5), 10_000)
    result = subprocess.run(command(release, tmp_path / "out"), capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("mlx-k3: ")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_only_a_config_is_not_a_model(release, tmp_path):
    for path in release.glob("model*"):
        path.unlink()
    with pytest.raises(K3Error, match=r"no model\*.safetensors"):
        convert(release, tmp_path / "out")


def test_unreadable_output_place(release, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(K3Error, match="Not a directory"):
        convert(release, tmp_path / "file" / "out")


def test_the_journal_says_what_was_done(big, tmp_path):
    out = tmp_path / "out"

    def stop(done: int, total: int, file: str) -> None:
        if file.startswith("model-trunk-00002"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(big, out, progress=stop)
    job, *records = map(json.loads, (out / journal.NAME).read_text().splitlines())
    assert job["source"] == str(big) and job["experts"] == "copy" and job["trunk"] == "q8"
    assert [r["file"] for r in records] == ["model-trunk-00001-of-00006.safetensors"]
