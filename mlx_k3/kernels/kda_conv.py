"""What KDA's delta rule takes as queries, keys and values, from their projections.

Owns the convolution with the norm that follows it, one kernel on a GPU. Knows nothing of gates.
"""

import mlx.core as mx

from .build import SIMD, Kernel
from .gradient import differentiable
from .kda import WIDTHS, no_mask
from .kda_reference import l2norm
from .short_conv import short_conv

L2_EPS = 1e-6
TOKENS = 32  # of a group

Heads = tuple[mx.array, mx.array, mx.array]

_KERNEL = Kernel(
    "kda_prefill_conv",
    inputs=("qkv", "conv_in", "conv_weight", "mask"),
    outputs=("q", "k", "v"),
)


def kda_conv(
    qkv: mx.array,
    weight: mx.array,
    state: mx.array | None,
    num_heads: int,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Short convolutions with SiLU, then the L2 norm of queries and keys.

    Args:
        qkv: ``[B, T, 3 H D]``, projections to queries, keys and values.
        weight: ``[3 H D, W]``; the last tap multiplies the current token.
        state, mask, lengths: those of :func:`short_conv`.
        num_heads: ``H``.

    Returns:
        Queries (of length ``D ** -0.5``), keys (of length 1) and values, ``[B, T, H, D]`` float32,
        or in ``qkv``'s dtype where the kernel runs; and the new ``state`` of the convolution.
    """
    B, _, C = qkv.shape
    if not _KERNEL.runs or C // (3 * num_heads) not in WIDTHS:
        return kda_conv_reference(qkv, weight, state, num_heads, mask, lengths)
    if state is None:
        state = mx.zeros((B, weight.shape[-1] - 1, C), qkv.dtype)

    def by_kernel(*inputs):
        return _by_kernel(*inputs, num_heads, mask)

    def by_plain_ops(*inputs):
        heads = kda_conv_reference(*inputs, num_heads, mask)[:3]
        return [x.astype(qkv.dtype) for x in heads]

    heads = differentiable(by_kernel, by_plain_ops)(qkv, weight, state)
    return *heads, _next_state(qkv, state, mask, lengths)


def kda_conv_reference(
    qkv: mx.array,
    weight: mx.array,
    state: mx.array | None,
    num_heads: int,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """:func:`kda_conv` in plain MLX ops."""
    (B, T, C), H = qkv.shape, num_heads
    x, state = short_conv(qkv, weight, state, mask, lengths)
    x = x.reshape(B, T, 3, H, C // (3 * H))
    qk = l2norm(x[:, :, :2], L2_EPS)
    return qk[:, :, 0] * x.shape[-1] ** -0.5, qk[:, :, 1], x[:, :, 2], state


def _by_kernel(qkv, weight, state, H, mask) -> list[mx.array]:
    B, T, C = qkv.shape
    D = C // (3 * H)
    return _KERNEL(
        *(qkv, state, weight, no_mask() if mask is None else mask),
        outputs=[((B, T, H, D), qkv.dtype)] * 3,
        groups=(-(-T // TOKENS), H, B),
        threads=3 * SIMD,
        template={
            "W": qkv.dtype,
            "D": D,
            "HEADS": H,
            "TAPS": weight.shape[-1],
            "MASKED": mask is not None,
        },
        constants={"SCALE": D**-0.5, "L2_EPS": L2_EPS},
    )


def _next_state(x, state, mask, lengths) -> mx.array:
    """The last inputs before the end of each row, without a copy of all of them."""
    T, size = x.shape[1], state.shape[1]
    if lengths is None:
        if mask is not None:
            x = mx.where(mask[:, -size:, None], x[:, -size:], 0)
        # A copy: a view would keep the whole prefill's inputs alive.
        last = x[:, -size:]
        if size > T:
            last = mx.concatenate([state[:, T:].astype(x.dtype), last], axis=1)
        return mx.contiguous(last)
    end = mx.clip(lengths, 0, T)
    at = mx.broadcast_to(end[:, None] + mx.arange(size), state.shape[:2])  # from the state's first
    in_state = mx.minimum(at, size - 1)[..., None]
    in_x = mx.maximum(at - size, 0)
    new = mx.take_along_axis(x, in_x[..., None], axis=1)
    if mask is not None:
        new = mx.where(mx.take_along_axis(mask, in_x, axis=1)[..., None], new, 0)
    old = mx.take_along_axis(state, in_state, axis=1)
    return mx.where(at[..., None] < size, old, new).astype(x.dtype)
