"""The router's choice: which experts a token goes to, and with what weight."""

from functools import cache

import mlx.core as mx

from .build import Kernel
from .gradient import with_vjp

MOST_EXPERTS = 1024
MOST_CHOSEN = 32
THREADS = 128

_KERNEL = Kernel("router", inputs=("logits", "bias"), outputs=("indices", "weights"))


def route(
    logits: mx.array,
    correction_bias: mx.array,
    top_k: int,
    *,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[mx.array, mx.array]:
    """Choose ``top_k`` of E experts.

    The bias takes part in the choice only; the weights are the unbiased scores. With groups, the
    experts of the ``topk_group`` groups whose two best biased scores sum highest are eligible.
    On a GPU, a sigmoid router without groups is one kernel.

    Args:
        logits: ``[..., E]``.
        correction_bias: ``[E]``.
        top_k: experts a token.
        activation: ``"sigmoid"`` or ``"softmax"``.
        renormalize: divide the weights by their sum (plus 1e-20).
        scale: factor on the weights (``routed_scaling_factor``).
        n_group, topk_group: groups of experts, and how many of them stay eligible.

    Returns:
        Indices ``[..., top_k]`` uint32 in no particular order, weights ``[..., top_k]`` float32.
    """
    sizes_fit = top_k <= MOST_CHOSEN and logits.shape[-1] <= MOST_EXPERTS
    if _KERNEL.runs and activation == "sigmoid" and n_group == 1 and sizes_fit:
        return _by_kernel(top_k, renormalize, scale)(logits, correction_bias)
    scores = _scores(logits, activation)
    choice = scores + correction_bias.astype(mx.float32)
    if n_group > 1:
        choice = _mask_groups(choice, n_group, topk_group)
    indices = mx.argpartition(-choice, kth=top_k - 1, axis=-1)[..., :top_k]
    indices = mx.stop_gradient(indices)
    return indices, _weigh(scores, indices, renormalize, scale)


def _scores(logits: mx.array, activation: str) -> mx.array:
    logits = logits.astype(mx.float32)
    return mx.softmax(logits, axis=-1) if activation == "softmax" else mx.sigmoid(logits)


def _weigh(scores: mx.array, indices: mx.array, renormalize: bool, scale: float) -> mx.array:
    """The weights of the chosen experts."""
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights if scale == 1 else weights * scale


def _mask_groups(choice: mx.array, n_group: int, topk_group: int) -> mx.array:
    """Minus infinity for the experts of all but the best groups."""
    grouped = mx.unflatten(choice, -1, (n_group, -1))
    strength = mx.topk(grouped, 2, axis=-1).sum(-1)
    refused = mx.argpartition(strength, kth=n_group - topk_group - 1, axis=-1)
    refused = refused[..., : n_group - topk_group, None]
    grouped = mx.put_along_axis(grouped, refused, mx.array(-mx.inf), axis=-2)
    return grouped.flatten(-2)


@cache
def _by_kernel(top_k: int, renormalize: bool, scale: float):
    def kernel(logits: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
        *shape, E = logits.shape
        N = logits.size // E
        indices, weights = _KERNEL(
            logits,
            bias,
            outputs=[((*shape, top_k), mx.uint32), ((*shape, top_k), mx.float32)],
            groups=(-(-N * 32 // THREADS), 1, 1),
            threads=THREADS,
            template={"E": E, "TOP_K": top_k, "NORMALISE": renormalize},
            constants={"SCALE": scale},
        )
        return indices, weights

    def vjp(primals, cotangents, outputs):
        def weights(logits: mx.array) -> mx.array:
            return _weigh(_scores(logits, "sigmoid"), outputs[0], renormalize, scale)

        return *mx.vjp(weights, [primals[0]], [cotangents[1]])[1], mx.zeros_like(primals[1])

    return with_vjp(kernel, vjp)
