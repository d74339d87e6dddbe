"""What a trace says: hit rates, bytes a token, waiting, reuse, and what other pools would do.

Owns the figures, as one dictionary that JSON can hold. Prints and draws nothing.
"""

import signal
from collections.abc import Iterable
from multiprocessing import get_context
from typing import Any

import numpy as np

from .policy import POLICIES
from .simulate import (
    Requests,
    decode_requests,
    distinct,
    optimal_hits,
    simulate,
    stack_distances,
)
from .trace import KINDS, Trace

POOL_SIZES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""In working sets: the experts that one token needs."""
OPTIMAL = "optimal"
PERCENTILES = (10, 25, 50, 75, 90, 99)

# Simulating so many accesses takes well under a minute on two slow cores: 500 tokens of Kimi K3.
_ACCESSES = 750_000
# Less work than starting processes.
_FEW_STEPS = 2_000_000


def report(trace: Trace, tokens: int | None = None, processes: int = 1) -> dict[str, Any]:
    """All figures. Simulates the last ``tokens`` of decode, by default as many as take seconds.

    With several ``processes`` the caller's main module must be importable without effect.
    """
    requests = decode_requests(trace)
    if tokens is None:
        tokens = max(_ACCESSES // max(requests.working_set, 1), 1)
    simulated = requests.last_tokens(tokens)
    return {
        "model": trace.header,
        "complete": trace.closed,
        "prefill": measure(trace, decode=False),
        "decode": measure(trace, decode=True),
        "working_set": {
            "experts": requests.working_set,
            "bytes": requests.working_set * trace.header["expert_bytes"],
        },
        "reuse": reuse(requests),
        "simulation": {
            "tokens": simulated.tokens,
            "pools": simulate_pools(simulated, trace.header, processes),
        },
    }


def measure(trace: Trace, *, decode: bool) -> dict[str, Any]:
    """What happened in one phase, as recorded. A step of several tokens is prefill.

    A hit is a byte that was needed and not read: neither when asked for nor ahead of time.
    """
    expert_bytes = trace.header["expert_bytes"]
    is_decode = trace.calls["tokens"] == 1
    phase = is_decode == decode
    tokens = _tokens(trace, phase)
    needs = _needs(trace)
    useful = _useful_prefetches(trace, needs)
    mine = _in_phase(trace.reads["call"], phase)
    nbytes, kind = trace.reads["nbytes"], trace.reads["kind"]

    def total(what: str) -> int:
        return int(nbytes[mine & (kind == KINDS.index(what))].sum())

    dropped = int(np.count_nonzero(mine & (kind == KINDS.index("drop"))))
    needed_bytes = (int(np.count_nonzero(phase[needs >> 16])) - dropped) * expert_bytes
    useful_bytes = int(nbytes[mine & useful].sum())
    demand_bytes, prefetch_bytes = total("demand"), total("prefetch")
    read_bytes = demand_bytes + prefetch_bytes
    seconds, busy = _seconds(trace, is_decode, phase), _busy_seconds(trace.reads[mine])
    stalls = trace.stalls["seconds"][_in_phase(trace.stalls["call"], phase)]
    stall_seconds = float(stalls.sum(dtype=np.float64))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": _ratio(tokens, seconds),
        "needed_bytes": needed_bytes,
        "read_bytes": read_bytes,
        "demand_bytes": demand_bytes,
        "prefetch_bytes": prefetch_bytes,
        "useful_prefetch_bytes": useful_bytes,
        "dropped_experts": dropped,
        "hit_rate": _ratio(needed_bytes - demand_bytes - useful_bytes, needed_bytes),
        "needed_bytes_per_token": _ratio(needed_bytes, tokens),
        "read_bytes_per_token": _ratio(read_bytes, tokens),
        "read_bytes_per_second": _ratio(read_bytes, busy),
        "stall_seconds": stall_seconds,
        "stall_share": _ratio(stall_seconds, seconds),
    }


def reuse(requests: Requests) -> dict[str, Any]:
    """How many other experts are used between two uses of one; an LRU pool must hold as many."""
    distances = stack_distances(requests.experts)
    again = distances[distances >= 0]
    return {
        "accesses": len(distances),
        "experts": len(requests.names),
        "first_use_share": _ratio(len(distances) - len(again), len(distances)),
        "distances": {
            f"p{p}": int(np.percentile(again, p, method="inverted_cdf")) if len(again) else None
            for p in PERCENTILES
        },
    }


def simulate_pools(
    requests: Requests, header: dict[str, Any], processes: int = 1
) -> list[dict[str, Any]]:
    """Hit rates of every policy and of the optimum, from an empty pool, by pool size.

    Sizes are :data:`POOL_SIZES`, as far as they hold what one layer needs, and the recorded one.
    """
    if not requests.tokens:
        return []
    sizes = {round(size * requests.working_set) for size in POOL_SIZES} | {header.get("slots")}
    sizes = sorted(n for n in sizes if n is not None and n >= requests.largest_call)
    names = [*POLICIES, OPTIMAL]
    jobs = [(requests, slots, name) for slots in sizes for name in names]
    hits = iter(_run(jobs, processes))
    return [
        {
            "working_sets": slots / requests.working_set,
            "slots": slots,
            "pool_bytes": slots * header["expert_bytes"],
            "hit_rate": {name: next(hits) / len(requests.experts) for name in names},
        }
        for slots in sizes
    ]


def _run(jobs: list[tuple[Requests, int, str]], processes: int) -> Iterable[int]:
    steps = sum(len(requests.experts) for requests, _, _ in jobs)
    if processes == 1 or steps < _FEW_STEPS:
        return [_hits(*job) for job in jobs]
    # Ctrl-C is the parent's to handle; leaving the block ends the others.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with get_context("spawn").Pool(min(processes, len(jobs)), signal.signal, ignore) as pool:
        return pool.starmap(_hits, jobs, chunksize=1)


def _hits(requests: Requests, slots: int, name: str) -> int:
    if name == OPTIMAL:
        return optimal_hits(requests, slots)
    return simulate(requests, slots, POLICIES[name]()).hits


def _needs(trace: Trace) -> np.ndarray:
    """Each expert that each call needs, once: call << 16 | expert, ascending."""
    calls = np.repeat(np.arange(len(trace.calls)), np.diff(trace.offsets))
    return distinct(calls << 16 | trace.experts)


def _useful_prefetches(trace: Trace, needs: np.ndarray) -> np.ndarray:
    """[reads] bool: read ahead, and used before the same expert was read again."""
    useful = np.zeros(len(trace.reads), bool)
    if not np.any(trace.reads["kind"] == KINDS.index("prefetch")):
        return useful
    # Uses and reads as expert, then call: sorted, an expert's stand together in their order.
    layers = trace.calls["layer"][needs >> 16].astype(np.int64)
    uses = np.sort((layers << 16 | needs & 0xFFFF) << 32 | needs >> 16)
    real = np.flatnonzero(trace.reads["kind"] <= KINDS.index("prefetch"))
    reads = trace.reads[real]
    keys = reads["layer"].astype(np.int64) << 16 | reads["expert"]
    order = np.argsort(keys, kind="stable")
    moments = (keys << 32 | np.maximum(reads["call"], 0))[order]
    never = np.iinfo(np.int64).max
    next_use = np.append(uses, never)[np.searchsorted(uses, moments)]
    next_read = np.append(moments[1:], never)
    used = (next_use >> 32 == keys[order]) & (next_use < next_read)
    useful[real[order]] = used & (reads["kind"][order] == KINDS.index("prefetch"))
    return useful


def _in_phase(calls: np.ndarray, phase: np.ndarray) -> np.ndarray:
    """[events] bool: recorded during a call of the phase."""
    return phase[np.maximum(calls, 0)] if len(phase) else np.zeros(len(calls), bool)


def _tokens(trace: Trace, phase: np.ndarray) -> int:
    """Tokens that went through a layer; the one with the most, for the last may be unfinished."""
    calls = trace.calls[phase]
    return int(np.bincount(calls["layer"], weights=calls["tokens"]).max(initial=0))


def _seconds(trace: Trace, is_decode: np.ndarray, phase: np.ndarray) -> float:
    """Time from each call of the phase to the next call.

    After a decode a prefill begins when someone has typed something: that is no work.
    """
    idle = is_decode[:-1] & ~is_decode[1:]
    return float(np.diff(trace.calls["time"])[phase[:-1] & ~idle].sum())


def _busy_seconds(reads: np.ndarray) -> float:
    """How long at least one read was under way."""
    reads = reads[reads["seconds"] > 0]
    reads = reads[np.argsort(reads["start"], kind="stable")]
    starts, ends = reads["start"], np.maximum.accumulate(reads["start"] + reads["seconds"])
    begun = np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))
    return float(np.maximum(ends - begun, 0).sum())


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
