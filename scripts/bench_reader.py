#!/usr/bin/env python3
"""How fast experts come from a disk into slots, beside a bare reader and fio on the same files.

Writes files of experts of K3's size (or takes those of an earlier run), then reads them in random
order, each once, so that no cache can help, direct, with the same threads and block sizes:

  reader   the package's reader into the slots of a pool, never fewer tickets than threads
  layer    the same, 16 experts at once, waiting for all: what decoding does
  bare     threads that do nothing but preadv, into memory of their own
  fio      psync jobs, where fio is installed

in two forms: `copy` (six aligned stacks in a file, six reads an expert) and `reference` (an expert
in one piece at an odd offset, as in the release's shards).

  scripts/bench_reader.py --folder /data/bench --experts 120
  scripts/bench_reader.py --folder /dev/shm/bench --experts 60 --json reader.json
"""

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

from mlx_k3.checkpoint.extents import Extent, Piece, merge
from mlx_k3.experts.disk import ALIGNMENT, BLOCK_BYTES, Block, Disk, cut
from mlx_k3.experts.policy import LRU
from mlx_k3.experts.reader import ExpertReader
from mlx_k3.experts.slots import SlotPool

PIECES = tuple(
    Piece(f"{name}_proj.{part}", dtype, (rows, columns // per))
    for name, rows, columns in (("gate", 3072, 3584), ("up", 3072, 3584), ("down", 3584, 3072))
    for part, dtype, per in (("weight", "U32", 8), ("scales", "U8", 32))
)
EXPERT_BYTES = sum(piece.nbytes for piece in PIECES)
ACTIVE = 16
DATA_START = {"copy": 16384, "reference": 12345}
Extents = list[tuple[Extent, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the files are written")
    parser.add_argument("--experts", type=int, default=60, help="in each of the two files")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="medians are taken over these")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = [measure(form, args) for form in DATA_START]
    if not args.keep:
        shutil.rmtree(args.folder)
    print(
        f"{'form':10} {'mode':9} {'reader':>7} {'layer':>7} {'bare':>7} {'fio':>7}  GB/s, medians"
    )
    for r in results:
        figures = " ".join(
            f"{r[name]:7.2f}" if r[name] else f"{'-':>7}"
            for name in ("reader", "layer", "bare", "fio")
        )
        ratios = f"{r['to_bare']:.0%} of bare"
        if r["fio"]:
            ratios += f", {r['to_fio']:.0%} of fio"
        print(f"{r['form']:10} {r['mode']:9} {figures}  {ratios}")
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "results": results}, indent=1))


def measure(form: str, args: argparse.Namespace) -> dict:
    """GB/s of every way to read the experts stored in ``form``."""
    path = args.folder / f"experts-{form}.bin"
    extents = write(path, form, args.experts)
    pool = SlotPool(PIECES, 2 * ACTIVE, LRU())
    # As large as the slots, so that none of the ways is faster for staying in the CPU's cache.
    memory = memoryview(mmap.mmap(-1, max(pool.nbytes, args.threads * 2 * BLOCK_BYTES)))
    memory[:: mmap.PAGESIZE] = bytes(len(memory[:: mmap.PAGESIZE]))
    with ExpertReader(args.threads) as reader:
        ways = {
            "reader": lambda: by_reader(reader, pool, extents, 1, args.threads),
            "layer": lambda: by_reader(reader, pool, extents, ACTIVE, 1),
            "bare": lambda: by_bare_threads(pool, memory, extents, args.threads, direct),
            "fio": lambda: by_fio(path, form, args.threads, direct),
        }
        if not shutil.which("fio"):
            del ways["fio"]
        direct = reader.mode(str(path)) == "direct"
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            # Neighbours in time are compared, so that what else the machine does hits all alike.
            for way in random.sample(list(ways), len(ways)):
                forget(path)
                rates[way].append(ways[way]())
    medians = {
        way: statistics.median(rates[way]) if way in rates else None
        for way in ("reader", "layer", "bare", "fio")
    }

    def ratio(other: str) -> float | None:
        pairs = zip(rates["reader"], rates.get(other, ()), strict=False)
        return statistics.median([ours / theirs for ours, theirs in pairs] or [0]) or None

    return {
        "form": form,
        "mode": "direct" if direct else "buffered",
        **medians,
        "to_bare": ratio("bare"),
        "to_fio": ratio("fio"),
        "rounds": rates,
    }


def write(path: Path, form: str, experts: int) -> Extents:
    """A file of random bytes, and where each expert's pieces lie in it."""
    start = DATA_START[form]
    nbytes = start + experts * EXPERT_BYTES
    if not path.exists() or path.stat().st_size != nbytes:
        block = np.random.default_rng(0).bytes(64 * 2**20)
        with open(path, "wb") as file:
            for offset in range(0, nbytes, len(block)):
                file.write(block[: nbytes - offset])
            file.flush()
            os.fsync(file.fileno())
    sizes = [piece.nbytes for piece in PIECES]
    before = [sum(sizes[:i]) for i in range(len(sizes))]
    if form == "reference":
        first, step = [start + n for n in before], [EXPERT_BYTES] * len(sizes)
    else:
        first, step = [start + n * experts for n in before], sizes
    return [
        tuple(Extent(str(path), first[i] + expert * step[i], size) for i, size in enumerate(sizes))
        for expert in range(experts)
    ]


def forget(path: Path) -> None:
    """Drop the file from the system's cache, for what reads through it."""
    fd = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def by_reader(
    reader: ExpertReader, pool: SlotPool, extents: Extents, size: int, depth: int
) -> float:
    """``depth`` tickets of ``size`` experts each are under way at any time."""
    order = random.sample(range(len(extents)), len(extents) // size * size)
    buffers = [pool.buffers(slot) for slot in range(len(pool))]
    flying: deque = deque()
    begun = time.perf_counter()
    for i in range(0, len(order), size):
        runs = [
            (run.path, run.offset, [buffers[(i + j) % len(pool)][piece] for piece in run.pieces])
            for j, expert in enumerate(order[i : i + size])
            for run in merge(extents[expert])
        ]
        flying.append(reader.submit(runs))
        if len(flying) == depth:
            flying.popleft().wait()
    for ticket in flying:
        ticket.wait()
    return len(order) * EXPERT_BYTES / (time.perf_counter() - begun) / 1e9


def by_bare_threads(
    pool: SlotPool, memory: memoryview, extents: Extents, threads: int, direct: bool
) -> float:
    """The same blocks of the same files, each thread into its own share of ``memory``."""
    room = len(memory) // threads // ALIGNMENT * ALIGNMENT
    order = random.sample(range(len(extents)), len(extents))
    buffers = pool.buffers(0)
    blocks: list[Block] = [
        block
        for expert in order
        for run in merge(extents[expert])
        for block in cut(run.path, run.offset, [buffers[piece] for piece in run.pieces])
    ]
    fd = Disk().open(blocks[0].path, direct)

    def work(first: int) -> None:
        at = first * room
        for block in blocks[first::threads]:
            start = block.offset // ALIGNMENT * ALIGNMENT
            end = -(-(block.offset + block.nbytes) // ALIGNMENT) * ALIGNMENT
            if at + end - start > (first + 1) * room:
                at = first * room
            os.preadv(fd, [memory[at : at + end - start]], start)
            at += end - start

    workers = [threading.Thread(target=work, args=[i]) for i in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begun
    os.close(fd)
    return sum(block.nbytes for block in blocks) / seconds / 1e9


def by_fio(path: Path, form: str, threads: int, direct: bool) -> float:
    """Random reads of the same sizes by as many jobs, each with one read under way."""
    weight, scales = PIECES[0].nbytes, PIECES[1].nbytes
    sizes = f"--bssplit={weight}/50:{scales}/50" if form == "copy" else f"--bs={EXPERT_BYTES // 3}"
    command = ["fio", "--name=experts", f"--filename={path}", "--rw=randread", "--norandommap"]
    command += ["--ioengine=psync", "--thread", f"--numjobs={threads}", f"--direct={direct:d}"]
    command += [sizes, "--blockalign=4096", "--group_reporting", "--output-format=json"]
    command += [f"--io_size={path.stat().st_size // threads}", "--randrepeat=0"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)["jobs"][0]["read"]["bw_bytes"] / 1e9


if __name__ == "__main__":
    main()
