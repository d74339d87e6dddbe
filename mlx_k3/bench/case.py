"""What a case is: a step from one state to the next, and what that moves and computes at least."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

State = Sequence[mx.array]

CHAIN = 128  # steps that are evaluated at once
PREFILL_CHAIN = 16
EPS = 1e-5  # of all norms
# Of the output's scale. Inputs of 16 bits are rounded once more here and there.
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    operation: str
    name: str
    kernels: tuple[str, ...]  # what it runs on a GPU
    state: State
    step: Callable[..., State]  # the next state
    least_bytes: int  # a step reads and writes
    tolerance: float
    flops: int = 0  # of a step's products
    chain: int = CHAIN
    inputs: Mapping[str, mx.array] = field(default_factory=dict)  # what stays, for other programs
    twin: Callable[..., State] | None = None  # where plain MLX rounds more than the reference does


def normal(dtype: mx.Dtype, *shape: int) -> mx.array:
    """Random numbers."""
    return mx.random.normal(shape).astype(dtype)


def nbytes(*arrays: mx.array) -> int:
    """Bytes of all ``arrays``."""
    return sum(x.nbytes for x in arrays)


def of_tokens(count: int) -> str:
    """``count`` tokens, in words."""
    return f"{count} token{'s' if count > 1 else ''}"
