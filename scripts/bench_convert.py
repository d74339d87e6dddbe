#!/usr/bin/env python3
"""Measure a conversion: speed of the experts against `cp` of the same bytes, and peak memory.

Copies the shards that hold experts with `cp`, converts, copies again; each side starts with its
source out of the page cache and ends with the data on the disk. Needs room for two copies.

    python scripts/make_wide_checkpoint.py /tmp/wide --moe-layers 1
    python scripts/bench_convert.py /tmp/wide /tmp/bench
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mlx_k3.checkpoint.extents import open_experts
from mlx_k3.convert.plan import make_plan
from mlx_k3.convert.source import FolderSource
from mlx_k3.convert.stream import convert


def forget(folder: Path) -> None:
    """Put the files of ``folder`` out of the page cache, where the system lets us."""
    os.sync()
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def copy_rate(source: Path, names: list[str], out: Path) -> float:
    """Bytes a second of `cp`, the data on the disk at the end."""
    out.mkdir()
    forget(source)
    start, nbytes = time.perf_counter(), 0
    for name in names:
        subprocess.run(["cp", str(source / name), str(out / name)], check=True)
        fd = os.open(out / name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        nbytes += (out / name).stat().st_size
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return nbytes / seconds


def experts_rate(source: Path, out: Path, trunk: str) -> tuple[float, float, dict]:
    """Bytes a second over the expert files, seconds in all, and the conversion's report."""
    forget(source)
    clock: list[tuple[float, str]] = []
    sizes = {}

    def note(done: int, total: int, file: str) -> None:
        if not clock or clock[-1][1] != file:
            clock.append((time.perf_counter(), file))

    start = time.perf_counter()
    report = convert(source, out, trunk=trunk, progress=note)
    end = time.perf_counter()
    sizes = {path.name: path.stat().st_size for path in out.glob("model-experts-*")}
    # A file ends when the next one begins: that includes bringing it to the disk.
    ends = [moment for moment, _ in clock[1:]] + [end]
    spans = {file: stop - begin for (begin, file), stop in zip(clock, ends, strict=True)}
    return sum(sizes.values()) / sum(spans[name] for name in sizes), end - start, report


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a release folder with MXFP4 experts")
    parser.add_argument("scratch", type=Path, help="a folder to create on the same disk")
    parser.add_argument("--trunk", default="q8")
    args = parser.parse_args()
    args.scratch.mkdir()
    names = make_plan(FolderSource(args.source)).expert_shards

    before = copy_rate(args.source, names, args.scratch / "cp")
    rate, seconds, report = experts_rate(args.source, args.scratch / "out", args.trunk)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shutil.rmtree(args.scratch / "out")
    after = copy_rate(args.source, names, args.scratch / "cp")

    start = time.perf_counter()
    convert(args.source, args.scratch / "left", trunk=args.trunk, experts="reference")
    reference = time.perf_counter() - start
    start = time.perf_counter()
    open_experts(args.scratch / "left")
    opened = time.perf_counter() - start
    shutil.rmtree(args.scratch)
    print(
        json.dumps(
            {
                "cp_bytes_per_second": [round(before), round(after)],
                "experts_bytes_per_second": round(rate),
                "share_of_cp": round(rate / ((before + after) / 2), 3),
                "seconds": round(seconds, 1),
                "written_bytes": report["written_bytes"],
                "peak_rss_bytes": peak * (1 if sys.platform == "darwin" else 1024),
                "reference_seconds": round(reference, 1),
                "open_reference_seconds": round(opened, 3),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
