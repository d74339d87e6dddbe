"""A case becomes a result: its time by each path, its error, and the floors beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .. import kernels
from ..errors import KernelError
from ..kernels.verdicts import all_trusted
from .case import Case
from .measure import ROUNDS, Rates, Timing, error, timing
from .peers import mlx_lm_step

MICRO = 1e6


@dataclass(frozen=True)
class Result:
    """Microseconds of a step; None where there is nothing to time.

    The ``..._us`` include the time Python takes to ask for a step, the ``..._evaluated_us`` do not.
    The floors are the least bytes over the bandwidth of a copy, and the products over the rate of
    a large one.
    """

    name: str
    kernels: tuple[str, ...]
    kernel_us: float | None
    kernel_evaluated_us: float | None
    reference_us: float | None
    reference_evaluated_us: float | None
    mlx_lm_us: float | None
    mlx_lm_evaluated_us: float | None
    bytes_floor_us: float
    flops_floor_us: float
    error: float | None  # of the kernel, of the output's scale
    tolerance: float
    problem: str | None = None  # why it could not be run

    @property
    def floor_us(self) -> float:
        """The larger of the two floors."""
        return max(self.bytes_floor_us, self.flops_floor_us)

    @property
    def bandwidth_share(self) -> float | None:
        """The kernel's bytes a second, of a copy's."""
        if self.kernel_evaluated_us is None:
            return None
        return self.bytes_floor_us / self.kernel_evaluated_us

    @property
    def fault(self) -> str | None:
        """What is wrong with the kernel, if anything."""
        if self.problem is not None:
            return self.problem
        if self.error is None or self.error <= self.tolerance:
            return None
        return f"off by {self.error:.1e}, more than {self.tolerance:.0e}"  # NaN comes here


def try_kernel(case: Case, rates: Rates, *, rounds: int = 3) -> Result:
    """``case`` by its kernel alone, with its error; a kernel that does not run is a result, too."""
    with all_trusted():
        try:
            return _result(case, rates, rounds, error=error_of(case), kernel=_timed(case, rounds))
        except KernelError as e:
            return _result(case, rates, rounds, problem=str(e))


def run(case: Case, rates: Rates, *, rounds: int = ROUNDS) -> Result:
    """``case`` by its kernel where there is a GPU, by the reference, and as mlx-lm does it.

    A kernel that doctor refused is timed nevertheless.
    """
    kernel = problem = wrong = None
    if kernels.backend() != "reference":
        with all_trusted():
            try:
                wrong, kernel = error_of(case), _timed(case, rounds)
            except KernelError as e:
                problem = str(e)
    with kernels.using("reference"):
        reference = _timed(case, rounds)
    step = mlx_lm_step(case)
    peer = None if step is None else timing(step, case.state, case.chain, rounds)
    return _result(
        case,
        rates,
        rounds,
        kernel=kernel,
        reference=reference,
        peer=peer,
        error=wrong,
        problem=problem,
    )


def error_of(case: Case) -> float:
    """How far the kernel's next state is from the reference's."""
    got = case.step(*case.state)
    mx.eval(got)
    with kernels.using("reference"):
        want = (case.twin or case.step)(*case.state)
        mx.eval(want)
    return error(got, want)


def _timed(case: Case, rounds: int) -> Timing:
    return timing(case.step, case.state, case.chain, rounds)


def _result(
    case: Case,
    rates: Rates,
    rounds: int,
    *,
    kernel: Timing | None = None,
    reference: Timing | None = None,
    peer: Timing | None = None,
    error: float | None = None,
    problem: str | None = None,
) -> Result:
    def us(time: Timing | None) -> tuple[float | None, float | None]:
        if time is None:
            return None, None
        return round(time.seconds * MICRO, 3), round(time.evaluated_seconds * MICRO, 3)

    return Result(
        case.name,
        case.kernels,
        *us(kernel),
        *us(reference),
        *us(peer),
        round(case.least_bytes / rates.copy * MICRO, 3),
        round(case.flops / rates.flops * MICRO, 3),
        error,
        case.tolerance,
        problem,
    )


def table(results: Sequence[Result]) -> str:
    """Markdown: times without Python's part, our kernel's with it too, and the larger floor."""
    heads = ("step", "kernel", "with Python", "plain MLX", "mlx-lm", "floor", "share", "error")
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for r in results:
        share = "" if r.kernel_evaluated_us is None else f"{r.floor_us / r.kernel_evaluated_us:.0%}"
        cells = (
            r.name,
            r.problem or _us(r.kernel_evaluated_us),
            _us(r.kernel_us),
            _us(r.reference_evaluated_us),
            _us(r.mlx_lm_evaluated_us),
            _us(r.floor_us),
            share,
            "" if r.error is None else f"{r.error:.0e}" + (" WRONG" if r.fault else ""),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _us(time_us: float | None) -> str:
    if time_us is None:
        return ""
    if time_us >= 1e6:
        return f"{time_us / 1e6:.2f} s"
    return f"{time_us:.1f} us" if time_us < 1000 else f"{time_us / 1000:.3g} ms"
