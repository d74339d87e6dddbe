"""The chosen experts of a few tokens, from packed MXFP4: two kernels for a whole expert layer.

MLX's gathered products reach about a quarter of a large GPU's memory bandwidth when each expert has
a token or two. Owns that case. Knows nothing of where experts come from.
"""

from typing import NamedTuple

import mlx.core as mx

from .build import SOURCE, Kernel
from .mxfp8 import mxfp8_round
from .situ import situ

MOST_TOKENS = 64  # up to which the kernels are used; each reads an expert anew for every token
LANES = 32  # of a simd group


class Tiling(NamedTuple):
    """How a kernel shares its rows; how these were chosen stands in the kernel's file."""

    rows: int  # of a lane
    span: int  # lanes that share a row
    simds: int  # simd groups of a group

    @property
    def simd_rows(self) -> int:
        """Rows of a simd group."""
        return self.rows * LANES // self.span


GATE_UP = Tiling(rows=6, span=8, simds=8)
DOWN = Tiling(rows=7, span=16, simds=8)

_MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


class Packed(NamedTuple):
    """A stack of MXFP4 matrices: uint32 ``[E, out, in/8]`` and uint8 ``[E, out, in/32]``."""

    weight: mx.array
    scales: mx.array


class _ExpertKernel(Kernel):
    """A kernel with the helpers of ``mxfp4_rows.h``."""

    def parts(self) -> tuple[str, str]:
        helpers, body = super().parts()
        return (SOURCE / "mxfp4_rows.h").read_text(encoding="utf-8") + helpers, body


_GATE_UP = _ExpertKernel(
    "mxfp4_gate_up",
    inputs=("z", "indices", "gate", "gate_scales", "up", "up_scales"),
    outputs=("h",),
    needs=("mxfp4",),
)
_DOWN = _ExpertKernel(
    "mxfp4_down",
    inputs=("h", "indices", "weights", "down", "down_scales"),
    outputs=("y",),
    needs=("mxfp4",),
)


def mxfp4_experts(
    z: mx.array,
    indices: mx.array,
    weights: mx.array,
    gate: Packed,
    up: Packed,
    down: Packed,
    *,
    beta: float,
    linear_beta: float | None,
    mxfp8: bool = False,
) -> mx.array:
    """``sum_j weights_j down_j situ(gate_j z, up_j z)`` over each token's experts.

    Products and sums are in float32, whatever ``z`` is. A CPU takes the plain form, which unpacks
    every chosen expert: it is right, and slow.

    Args:
        z: ``[..., D]``, what the experts read.
        indices: ``[..., k]``, the chosen experts.
        weights: ``[..., k]``.
        gate, up: ``[E, H, D]`` packed.
        down: ``[E, D, H]`` packed.
        beta, linear_beta: see :func:`situ`.
        mxfp8: round what the products read, ``z`` and the activations, to MXFP8.

    Returns:
        ``[..., D]`` in ``z``'s dtype.
    """
    form = _by_kernels if _run_here() else mxfp4_experts_reference
    how = {"beta": beta, "linear_beta": linear_beta, "mxfp8": mxfp8}
    return form(z, indices, weights, gate, up, down, **how)


def mxfp4_experts_pay(tokens: int) -> bool:
    """Whether :func:`mxfp4_experts` is the fast way for so many tokens."""
    return _run_here() and tokens <= MOST_TOKENS


def _run_here() -> bool:
    return _GATE_UP.runs and _DOWN.runs


def mxfp4_experts_reference(
    z: mx.array,
    indices: mx.array,
    weights: mx.array,
    gate: Packed,
    up: Packed,
    down: Packed,
    *,
    beta: float,
    linear_beta: float | None,
    mxfp8: bool = False,
) -> mx.array:
    """:func:`mxfp4_experts` in plain MLX ops."""
    x = z[..., None, :].astype(mx.float32)
    if mxfp8:
        x = mxfp8_round(x)
    h = situ(_products(x, gate, indices), _products(x, up, indices), beta, linear_beta)
    h = h.astype(_between(z.dtype)).astype(mx.float32)
    if mxfp8:
        h = mxfp8_round(h)
    y = _products(h, down, indices)
    return (weights.astype(mx.float32)[..., None, :] @ y).squeeze(-2).astype(z.dtype)


def _products(x: mx.array, stack: Packed, indices: mx.array) -> mx.array:
    """The chosen matrices times ``x [..., 1 or k, in]`` float32: ``[..., k, out]``."""
    chosen = (part[indices] for part in stack)
    matrices = mx.dequantize(*chosen, dtype=mx.float32, **_MXFP4)
    return (matrices @ x[..., None]).squeeze(-1)


def _between(dtype: mx.Dtype) -> mx.Dtype:
    """In what the activations go from one kernel to the other: what float16 lacks is range."""
    return mx.bfloat16 if dtype == mx.bfloat16 else mx.float32


def _by_kernels(
    z: mx.array,
    indices: mx.array,
    weights: mx.array,
    gate: Packed,
    up: Packed,
    down: Packed,
    *,
    beta: float,
    linear_beta: float | None,
    mxfp8: bool,
) -> mx.array:
    k, D, H = indices.shape[-1], z.shape[-1], gate.weight.shape[1]
    indices, pairs = indices.astype(mx.uint32), indices.size
    shared = {"T": z.dtype, "H": _between(z.dtype), "OUTER": D, "INNER": H, "K": k, "MXFP8": mxfp8}
    (h,) = _GATE_UP(
        z,
        indices,
        *gate,
        *up,
        outputs=[((pairs, H), _between(z.dtype))],
        groups=(pairs, -(-H // (GATE_UP.simd_rows * GATE_UP.simds)), 1),
        threads=LANES * GATE_UP.simds,
        template=shared
        | {"ROWS": GATE_UP.rows, "SPAN": GATE_UP.span, "LINEAR": linear_beta is not None},
        constants={"BETA": beta, "LINEAR_BETA": linear_beta or 1.0},
    )
    (y,) = _DOWN(
        h,
        indices,
        weights.astype(mx.float32),
        *down,
        outputs=[(z.shape, z.dtype)],
        groups=(pairs // k, -(-D // DOWN.simd_rows), 1),
        threads=LANES * min(k, DOWN.simds),
        template=shared | {"ROWS": DOWN.rows, "SPAN": DOWN.span},
    )
    return y
