"""What this machine has: memory, how much of it is free, and how much a GPU may hold.

Knows nothing about models. MLX is imported only when it is asked about a GPU.
"""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "metal", "cuda"]

# What macOS lets a GPU hold by default, as a share of the memory; the rest is the system's.
GPU_SHARE = 3 / 4
# Kept for the system where no GPU limit says how much: programs, file tables, read buffers.
SYSTEM_SHARE = 1 / 8

_VM_PAGES = re.compile(r"^(Pages free|Pages purgeable|File-backed pages):\s+(\d+)\.$", re.MULTILINE)
_VM_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
# Limits in a control group without one: version 1 writes a huge number, version 2 a word.
_NO_LIMIT = 1 << 60


def device() -> Device:
    """Where MLX computes by default."""
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def total_memory_bytes() -> int:
    """The memory a process can have here: all there is, or its control group's limit.

    With a CUDA device as the default, that device's memory.
    """
    if (info := _cuda()) is not None:
        return info["total_memory"]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in control_group_limits())])


def available_memory_bytes() -> int:
    """The memory that can be taken now without pushing anything else out.

    macOS: free, purgeable and file-backed pages. Linux: ``MemAvailable``, less where a control
    group leaves less. CUDA: the device's free memory.
    """
    if (info := _cuda()) is not None:
        return info["free_memory"]
    if sys.platform == "darwin":
        shown = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True)
        return free_in_vm_stat(shown.stdout)
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    free = int(re.search(r"MemAvailable:\s+(\d+) kB", meminfo)[1]) * 1024
    return min([free, *(max(limit - used, 0) for limit, used in control_group_limits())])


def usable_memory_bytes() -> int:
    """The most a model should take of this machine, however much is free at the moment.

    On a Mac what the GPU may hold; elsewhere all but an eighth.
    """
    total = total_memory_bytes()
    limit = _metal_limit_bytes()
    return int(total * (1 - SYSTEM_SHARE)) if limit is None else min(limit, total)


def auto_budget_bytes() -> int:
    """``auto``: what is free now, less a sixteenth of the memory, and never more than usable."""
    spare = available_memory_bytes() - total_memory_bytes() // 16
    return max(min(spare, usable_memory_bytes()), 0)


def rss_bytes() -> int:
    """Memory this process occupies now."""
    if sys.platform == "darwin":
        shown = ["/bin/ps", "-o", "rss=", "-p", str(os.getpid())]
        return int(subprocess.run(shown, capture_output=True, text=True, check=True).stdout) * 1024
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """The most memory this process has ever occupied."""
    # macOS counts bytes, Linux KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def wired(nbytes: int) -> Iterator[None]:
    """Keep up to ``nbytes`` of arrays from being paged out meanwhile; restores what was before.

    Only Metal can; elsewhere nothing happens.
    """
    import mlx.core as mx

    if not mx.metal.is_available():
        yield
        return
    # MLX refuses more than the GPU may hold.
    limit = mx.device_info()["max_recommended_working_set_size"]
    before = mx.set_wired_limit(min(nbytes, limit))
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)


def free_in_vm_stat(text: str) -> int:
    """Bytes that macOS can hand out at once, from what ``vm_stat`` prints."""
    pages = sum(int(count) for _, count in _VM_PAGES.findall(text))
    return pages * int(_VM_PAGE_SIZE.search(text)[1])


def control_group_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """``(limit, used)`` in bytes of every control group around this process that has a limit.

    Cached file pages do not count as used: the kernel drops them first.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []  # not Linux
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may start outside of what is mounted: then only the top is.
        folder = mount / path.lstrip("/")
        while True:
            if (limits := _control_group(folder, *names)) is not None:
                found.append(limits)
            if folder == mount:
                break
            folder = folder.parent
    return found


def _control_group(folder: Path, limit_file: str, used_file: str) -> tuple[int, int] | None:
    try:
        limit = (folder / limit_file).read_text(encoding="ascii").strip()
        used = int((folder / used_file).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if limit == "max" or int(limit) >= _NO_LIMIT:
        return None
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return int(limit), max(used - (int(cached[1]) if cached else 0), 0)


def _cuda() -> dict[str, int] | None:
    """The default device's facts if it is a CUDA device."""
    if sys.platform == "darwin":
        return None
    import mlx.core as mx

    return mx.device_info() if mx.default_device().type == mx.gpu else None


def _metal_limit_bytes() -> int | None:
    """What the GPU of this Mac may hold: as set by ``iogpu.wired_limit_mb``, or the default."""
    if sys.platform != "darwin":
        return None
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    megabytes = shown.stdout.strip()
    if megabytes.isdecimal() and int(megabytes):
        return int(megabytes) << 20
    return mx.device_info()["max_recommended_working_set_size"]
