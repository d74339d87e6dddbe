"""What the machine is said to have: parsed from what systems print, and measured here."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_k3.experts import machine

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              100000.
Pages active:                            900000.
Pages inactive:                          700000.
Pages speculative:                         5000.
Pages throttled:                              0.
Pages wired down:                        200000.
Pages purgeable:                           3000.
"Translation faults":                 123456789.
Pages copy-on-write:                    1234567.
File-backed pages:                       400000.
Anonymous pages:                        1200000.
Pages stored in compressor:                7000.
"""


def test_free_memory_on_a_mac_is_free_purgeable_and_file_backed():
    assert machine.free_in_vm_stat(VM_STAT) == (100_000 + 3_000 + 400_000) * 16384


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def write_membership(root: Path, text: str) -> None:
    write_group(root / "proc/self", cgroup=text)


def test_the_limits_of_all_groups_around_a_process_count(tmp_path):
    write_membership(tmp_path, "0::/slice/unit")
    top = tmp_path / "sys/fs/cgroup"
    stat = "anon 600\ninactive_file 300\nactive_file 7"
    write_group(top / "slice", memory__max=5000, memory__current=4000, memory__stat=stat)
    write_group(top / "slice/unit", memory__max="max", memory__current=900, memory__stat=stat)
    assert machine.control_group_limits(tmp_path) == [(5000, 3700)]


def test_the_first_version_of_control_groups(tmp_path):
    write_membership(tmp_path, "5:cpu:/\n4:hugetlb,memory:/job\n0::/")
    names = {
        "memory__usage_in_bytes": 700,
        "memory__stat": "inactive_file 1\ntotal_inactive_file 9",
    }
    top = tmp_path / "sys/fs/cgroup/memory"
    write_group(top, memory__limit_in_bytes=9223372036854771712, **names)
    write_group(top / "job", memory__limit_in_bytes=2000, **names)
    assert machine.control_group_limits(tmp_path) == [(2000, 699)]


def test_a_group_seen_from_inside_a_container(tmp_path):
    """The path is the host's; only the mounted top exists."""
    write_membership(tmp_path, "0::/docker/4f5e")
    stat = "inactive_file 0"
    top = tmp_path / "sys/fs/cgroup"
    write_group(top, memory__max=8000, memory__current=100, memory__stat=stat)
    assert machine.control_group_limits(tmp_path) == [(8000, 100)]


def test_a_system_without_control_groups(tmp_path):
    assert machine.control_group_limits(tmp_path) == []


def test_a_group_s_limit_bounds_what_there_is(monkeypatch):
    physical, free = machine.total_memory_bytes(), machine.available_memory_bytes()
    assert 0 < free < physical
    monkeypatch.setattr(machine, "control_group_limits", lambda: [(3 << 20, 1 << 20), (1 << 60, 0)])
    assert machine.total_memory_bytes() == 3 << 20
    assert machine.available_memory_bytes() == 2 << 20
    monkeypatch.setattr(machine, "control_group_limits", lambda: [(3 << 20, 4 << 20)])
    assert machine.available_memory_bytes() == 0 == machine.auto_budget_bytes()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's GPU has its own limit")
def test_auto_takes_what_is_free_and_leaves_the_system_some(monkeypatch):
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 64_000)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 20_000)
    assert machine.usable_memory_bytes() == 56_000
    assert machine.auto_budget_bytes() == 16_000
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 64_000)
    assert machine.auto_budget_bytes() == 56_000


def test_a_cuda_device_is_asked_for_its_own_memory(monkeypatch):
    if mx.metal.is_available():
        pytest.skip("a Mac has no CUDA device")
    info = {"total_memory": 150_000, "free_memory": 140_000}
    monkeypatch.setattr(machine, "_cuda", lambda: info)
    assert machine.total_memory_bytes() == 150_000
    assert machine.available_memory_bytes() == 140_000


def test_occupied_memory_is_what_was_touched():
    """In a process of its own: in this one, other tests' memory may be given back meanwhile."""
    script = """if True:
        import numpy as np
        from mlx_k3.experts import machine
        before = machine.rss_bytes()
        block = np.ones(64 << 20, np.uint8)
        print(machine.rss_bytes() - before, machine.peak_rss_bytes() - before)
    """
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    grown, peak = map(int, run.stdout.split())
    assert 60 << 20 < grown < 80 << 20
    assert peak >= 60 << 20


def test_peaks_are_counted_in_the_system_s_unit(monkeypatch):
    class Usage:
        ru_maxrss = 5000

    monkeypatch.setattr(machine.resource, "getrusage", lambda _: Usage)
    monkeypatch.setattr(machine.sys, "platform", "linux")
    assert machine.peak_rss_bytes() == 5000 * 1024
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.peak_rss_bytes() == 5000


@pytest.fixture
def metal(monkeypatch) -> list[int]:
    """A Mac whose GPU may hold 1000 bytes and has 7 wired; the limits that were set."""
    limits = [7]

    def set_wired_limit(nbytes: int) -> int:
        limits.append(nbytes)
        return limits[-2]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return limits


def test_wiring_is_undone(metal):
    with machine.wired(600):
        assert metal == [7, 600]
    assert metal == [7, 600, 7]


def test_wiring_is_undone_when_something_fails(metal):
    with pytest.raises(KeyboardInterrupt), machine.wired(5000):
        assert metal == [7, 1000]  # no more than the GPU may hold
        raise KeyboardInterrupt
    assert metal == [7, 1000, 7]


def test_wiring_does_nothing_without_metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("called"))
    with machine.wired(600):
        pass
