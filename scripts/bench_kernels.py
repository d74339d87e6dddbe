#!/usr/bin/env python3
"""Every kernel on the device at hand, beside plain MLX, mlx-lm and what the device can do.

    python scripts/bench_kernels.py                  # K3's sizes; needs a GPU
    python scripts/bench_kernels.py --only router
    python scripts/bench_kernels.py --only layer     # a whole layer for one token
    python scripts/bench_kernels.py --tiny           # a dry run in small, on a CPU as well

What ``mlx-k3 bench`` times, with all of K3's experts, whatever the memory. Times leave out what
Python takes to ask for a step. Where torch runs on the same GPU its copy is the floor's bandwidth,
as it is faster than MLX's.
"""

import argparse
import os
import sys
import time
from statistics import median

from mlx_k3.bench import measure, report
from mlx_k3.bench.sizes import k3_sizes, tiny_sizes
from mlx_k3.kernels import backend

EXPERTS = 896
TINY_BYTES = 1 << 20


def rates(tiny: bool) -> measure.Rates:
    """What the device reaches, measured now."""
    found = measure.rates(TINY_BYTES if tiny else None)
    copy = None if tiny else torch_copy()
    return found if copy is None else found._replace(copy=copy)


def torch_copy() -> float | None:
    """Bytes a second that torch's copy reads and writes; None without torch on a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    source = torch.zeros(measure.COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(measure.ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 8)
    return 2 * measure.COPY_BYTES / median(times[1:])


def timed(only: list[str] | None, tiny: bool) -> report.Report:
    """The groups in ``only``, by default all."""
    # Errors are of float32, which some GPUs would else round to TF32 in products.
    os.environ["MLX_ENABLE_TF32"] = "0"
    found = report.Report(rates(tiny))
    sizes, rounds = (tiny_sizes(), 2) if tiny else (k3_sizes(EXPERTS), measure.ROUNDS)

    def on_done(name: str) -> None:
        print(name, file=sys.stderr)

    report.measure(found, sizes, only or report.NAMES, rounds, on_done)
    return found


def require_gpu(tiny: bool) -> None:
    """Ends the program where there is nothing to time."""
    if backend() == "reference" and not tiny:
        sys.exit("no GPU: there is nothing to time; --tiny is a dry run")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=report.NAMES, action="append", help="one group of cases")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    require_gpu(arguments.tiny)
    found = timed(arguments.only, arguments.tiny)
    print(found.json() if arguments.json else found.text())


if __name__ == "__main__":
    main()
