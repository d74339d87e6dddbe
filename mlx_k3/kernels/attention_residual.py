"""Attention Residuals: a softmax over earlier residual sums, per token."""

from functools import cache

import mlx.core as mx

from .build import Kernel
from .gradient import differentiable

MOST_CANDIDATES = 31  # one for each lane of a simd group, less one
LEAST_WIDTH = 8
FEW_TOKENS = 256  # up to so many, a token has all the threads a group can have

_KERNEL = Kernel(
    "attention_residual",
    inputs=("blocks", "last", "update", "weight", "norm"),
    outputs=("y", "sum"),
)


def attention_residual(candidates: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Mix residual sums (Attention Residuals report, block form).

    Each candidate ``v`` scores ``rms_norm(v) . weight``; the softmax of the scores weighs the
    candidates as they are, un-normalised. All in float32.

    Args:
        candidates: ``[..., M, D]``, the finished blocks and, last, the running sum.
        weight: ``[D]`` float32, the norm's gain times the projection.
        eps: of the norm.

    Returns:
        ``[..., D]`` in ``candidates``' dtype.
    """
    if not has_kernel(*candidates.shape[-2:]):
        return attention_residual_reference(candidates, weight, eps)
    return _mix(eps)(candidates, weight)


def residual_step(
    blocks: mx.array,
    last: mx.array,
    update: mx.array,
    weight: mx.array,
    norm: mx.array,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """Add to the running sum, mix it with the blocks, and normalise: what a sublayer reads.

    Args:
        blocks: ``[..., M, D]``, the finished blocks.
        last: ``[..., D]``, the running sum.
        update: ``[..., D]``, what the sublayer before gave.
        weight: ``[D]`` float32, as in :func:`attention_residual`.
        norm: ``[D]``, weight of the RMS norm behind the mix.
        eps: of both norms.

    Returns:
        The normalised mix of ``blocks`` and ``last + update``, and ``last + update``, both
        ``[..., D]`` in ``blocks``' dtype.
    """
    if not has_kernel(*blocks.shape[-2:]):
        return residual_step_reference(blocks, last, update, weight, norm, eps)
    return _step(eps)(blocks, last, update, weight, norm)


def attention_residual_reference(candidates: mx.array, weight: mx.array, eps: float) -> mx.array:
    """:func:`attention_residual` in plain MLX ops."""
    v = candidates.astype(mx.float32)
    square = (v * v).mean(-1, keepdims=True)
    scores = (v @ weight[:, None]) * mx.rsqrt(square + eps)
    shares = mx.softmax(scores, axis=-2).swapaxes(-1, -2)
    return (shares @ v).squeeze(-2).astype(candidates.dtype)


def residual_step_reference(
    blocks: mx.array,
    last: mx.array,
    update: mx.array,
    weight: mx.array,
    norm: mx.array,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """:func:`residual_step` in plain MLX ops."""
    total = last + update
    candidates = mx.concatenate([blocks, total[..., None, :]], axis=-2)
    mixed = attention_residual_reference(candidates, weight, eps)
    return mx.fast.rms_norm(mixed, norm, eps), total


def has_kernel(M: int, D: int) -> bool:
    """Whether ``M`` arrays of width ``D`` are mixed by the kernel here."""
    return _KERNEL.runs and M <= MOST_CANDIDATES and D >= LEAST_WIDTH


@cache
def _mix(eps: float):
    def kernel(candidates: mx.array, weight: mx.array) -> mx.array:
        # Without a running sum and a norm, other arrays stand in for them unread.
        return _run(candidates, candidates, candidates, weight, weight, eps, step=False)[0]

    def reference(candidates: mx.array, weight: mx.array) -> mx.array:
        return attention_residual_reference(candidates, weight, eps)

    return differentiable(kernel, reference)


@cache
def _step(eps: float):
    def kernel(*arrays: mx.array) -> list[mx.array]:
        return _run(*arrays, eps, step=True)

    def reference(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return residual_step_reference(*arrays, eps)

    return differentiable(kernel, reference)


def _run(blocks, last, update, weight, norm, eps, *, step) -> list[mx.array]:
    *shape, M, D = blocks.shape
    N = blocks.size // (M * D)
    vectors = D // 4 if D % 4 == 0 else D
    most_threads = 1024 if N <= FEW_TOKENS else 256
    each = -(-vectors // most_threads)
    y, total = _KERNEL(
        blocks,
        last.astype(blocks.dtype),
        update.astype(blocks.dtype),
        weight,
        norm,
        outputs=[((*shape, D), blocks.dtype), ((*shape, D) if step else (1,), blocks.dtype)],
        groups=(N, 1, 1),
        threads=-(-vectors // (each * 32)) * 32,
        template={"T": blocks.dtype, "D": D, "STEP": step},
        constants={"EPS": eps},
    )
    return [y, total]
