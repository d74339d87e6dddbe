"""How long a step takes, how far its results are off, and what the device can do at best.

Steps depend on each other and are evaluated together, so that nothing overlaps.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import mlx.core as mx

from ..kernels import without_gradients
from .case import State, nbytes

ROUNDS = 9
MOST_SECONDS = 2.0  # for a figure, after the first steps; one chain is always timed
COPY_BYTES = 1 << 30
# Of the states of a chain, which may all be in memory; a chain of four is always taken.
CHAIN_BYTES = 4 << 30


class Timing(NamedTuple):
    """Of a step, medians: all of it, and without the time Python takes to ask for it.

    On a CPU both are all of it, as some of the work is done while it is asked for.
    """

    seconds: float
    evaluated_seconds: float


class Rates(NamedTuple):
    """What the device reaches at best."""

    copy: float  # bytes read and written a second
    flops: float  # of a large matrix product


def timing(step: Callable[..., State], state: State, chain: int, rounds: int = ROUNDS) -> Timing:
    """The medians over ``rounds`` chains of ``chain`` steps; fewer of both where steps are slow.

    An evaluation costs some time by itself, which a chain's steps share: the longer, the better.
    """
    mx.eval(state)
    fits = CHAIN_BYTES // max(1, nbytes(*state))
    chain = min(chain, max(4, fits))
    _chain(step, state, 1)  # compiles
    one = _chain(step, state, 1).seconds
    chain = max(1, min(chain, int(MOST_SECONDS / 4 / one)))
    end = time.perf_counter() + MOST_SECONDS
    taken = [_chain(step, state, chain)]
    while len(taken) < rounds and time.perf_counter() < end:
        taken.append(_chain(step, state, chain))
    return Timing(*(median(times) / chain for times in zip(*taken, strict=True)))


def _chain(step: Callable[..., State], state: State, chain: int) -> Timing:
    begin = time.perf_counter()
    with without_gradients():
        for _ in range(chain):
            state = step(*state)
    asked = time.perf_counter()
    mx.eval(state)
    end = time.perf_counter()
    on_cpu = mx.default_device() == mx.cpu
    return Timing(end - begin, end - (begin if on_cpu else asked))


def error(got: Sequence[mx.array], want: Sequence[mx.array]) -> float:
    """The largest error of any array, of that array's largest value; NaN if there is one."""
    errors = []
    for x, y in zip(got, want, strict=True):
        x, y = x.astype(mx.float32), y.astype(mx.float32)
        scale = mx.maximum(mx.abs(y).max(), mx.finfo(mx.float32).smallest_normal)
        errors.append(mx.abs(x - y).max() / scale)
    return mx.stack(errors).max().item()


def rates(copy_bytes: int | None = None) -> Rates:
    """Measured now: MLX's copy of ``copy_bytes``, and its product of square matrices.

    Tiny arrays tell nothing, and are for a dry run.
    """
    gpu = mx.default_device().type == mx.gpu
    if copy_bytes is None:
        copy_bytes = COPY_BYTES if gpu else COPY_BYTES // 4
    size = copy_bytes // 4
    x = mx.zeros((size,), mx.float32)
    seconds = timing(lambda x: (x + 1,), (x,), 4, 5).evaluated_seconds
    N, dtype = (8192, mx.bfloat16) if gpu else (1024, mx.float32)
    a, b = (mx.random.normal((N, N)).astype(dtype) for _ in range(2))
    b = b * N**-0.5  # so that products of products stay as large as they are
    mx.eval(a, b)
    product = timing(lambda a: (a @ b,), (a,), 2, 5).evaluated_seconds
    return Rates(2 * x.nbytes / seconds, 2 * N**3 / product)
