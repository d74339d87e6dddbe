"""One layer's Kimi Delta Attention for a few new tokens, from its projections to its output.

Owns all between the layer's input and output projections when text is generated, where one kernel
takes the place of some twenty operations. Knows nothing of prefill and of rows padded right.
"""

import mlx.core as mx

from .build import Kernel
from .gated_norm import gated_rms_norm_reference
from .kda import WIDTHS, no_mask, plain_kda
from .kda_conv import L2_EPS, kda_conv_reference
from .kda_reference import kda_log_decay

MOST_TOKENS = 8
FEW_GROUPS = 128  # about as many as a large GPU has processors

Results = tuple[mx.array, mx.array, mx.array]

_KERNEL = Kernel(
    "kda_decode",
    inputs=(
        *("qkv", "conv_in", "conv_weight", "a", "A_log", "dt_bias", "b", "g", "o_norm"),
        *("state_in", "mask"),
    ),
    outputs=("y", "conv_out", "state_out"),
)


def kda_decode(
    qkv: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    a: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    b: mx.array,
    g: mx.array,
    o_norm: mx.array,
    state: mx.array,
    *,
    lower_bound: float | None,
    eps: float,
    mask: mx.array | None = None,
) -> Results:
    """Short convolutions, gate, delta rule and gated norm for ``T`` new tokens, 1 to 8.

    Args:
        qkv: ``[B, T, 3 H D]``, projections to queries, keys and values.
        conv_state: ``[B, W - 1, 3 H D]``, the convolution's inputs before them.
        conv_weight: ``[3 H D, W]``; the last tap multiplies the current token.
        a: ``[B, T, H D]``, projection to the decay's gate.
        A_log, dt_bias: ``[H]`` and ``[H D]``, see :func:`kda_log_decay`.
        b: ``[B, T, H]``, projection to the update's strength.
        g: ``[B, T, H D]``, projection to the output's gate.
        o_norm: ``[D]``, weight of the output's norm.
        state: ``[B, H, D, D]`` float32, values by keys.
        lower_bound: strongest log decay, or None for the form without one.
        eps: of the output's norm.
        mask: ``[B, T]`` bool; tokens where it is False leave the state as it is and count as zeros
            in the convolution, whatever the other inputs hold there (left padding).

    Returns:
        The gated outputs ``[B, T, H D]`` in ``qkv``'s dtype, unspecified but finite at masked
        tokens, and the new ``conv_state`` and ``state``.
    """
    inputs = (qkv, conv_state, conv_weight, a, A_log, dt_bias, b, g, o_norm, state)
    return (_fused if has_kernel(o_norm.size) else kda_decode_reference)(
        *inputs, lower_bound=lower_bound, eps=eps, mask=mask
    )


def has_kernel(D: int) -> bool:
    """Whether heads of width ``D`` take the kernel here."""
    return _KERNEL.runs and D in WIDTHS


def kda_decode_reference(
    qkv: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    a: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    b: mx.array,
    g: mx.array,
    o_norm: mx.array,
    state: mx.array,
    *,
    lower_bound: float | None,
    eps: float,
    mask: mx.array | None = None,
) -> Results:
    """:func:`kda_decode` in plain MLX ops."""
    (B, T, _), H, D = qkv.shape, A_log.size, o_norm.size
    if mask is not None:
        a, b, g = (mx.where(mask[..., None], x, 0) for x in (a, b, g))
    q, k, v, conv_state = kda_conv_reference(qkv, conv_weight, conv_state, H, mask)
    output, state = plain_kda(
        *(q, k, v),
        kda_log_decay(a.reshape(B, T, H, D), A_log, dt_bias.reshape(H, D), lower_bound),
        mx.sigmoid(b.astype(mx.float32)),
        state,
        mask,
    )
    y = gated_rms_norm_reference(output, g.reshape(B, T, H, D), o_norm, eps)
    return y.reshape(B, T, H * D).astype(qkv.dtype), conv_state, state


def _fused(
    *inputs: mx.array, lower_bound: float | None, eps: float, mask: mx.array | None
) -> Results:
    """:func:`kda_decode` by the kernel; its array arguments in their order."""
    qkv, conv_state, conv_weight, _, A_log, _, _, _, o_norm, state = inputs
    (B, T, _), H, D = qkv.shape, A_log.size, o_norm.size
    if T > MOST_TOKENS:
        raise ValueError(f"kda_decode takes at most {MOST_TOKENS} tokens, not {T}")
    threads, rows = _tiling(B * H, D)
    y, conv_state, state = _KERNEL(
        *inputs,
        no_mask() if mask is None else mask,
        outputs=(
            ((B, T, H * D), qkv.dtype),
            (conv_state.shape, qkv.dtype),
            (state.shape, mx.float32),
        ),
        groups=(H, B, 1),
        threads=threads,
        template={
            "ROWS": rows,
            "T": qkv.dtype,
            "D": D,
            "HEADS": H,
            "N": T,
            "TAPS": conv_weight.shape[-1],
            "BOUNDED": lower_bound is not None,
            "MASKED": mask is not None,
        },
        constants={
            "SCALE": D**-0.5,
            "L2_EPS": L2_EPS,
            "NORM_EPS": eps,
            "LOWER_BOUND": lower_bound or 0.0,
        },
    )
    return y, conv_state, state


def _tiling(groups: int, D: int) -> tuple[int, int]:
    """Threads of a group, and rows of the state that a lane holds at once.

    A few groups have a GPU's processors for themselves, and ask for all of their state at once. Of
    more, small ones share a processor: some read while others compute and write.
    """
    return (4 * D, 2) if groups <= FEW_GROUPS else (2 * D, 1)
