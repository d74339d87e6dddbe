"""The router's choice: which experts a token goes to, and with what weight."""

import mlx.core as mx


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
    logits = logits.astype(mx.float32)
    scores = mx.softmax(logits, axis=-1) if activation == "softmax" else mx.sigmoid(logits)
    choice = scores + correction_bias.astype(mx.float32)
    if n_group > 1:
        choice = _mask_groups(choice, n_group, topk_group)
    indices = mx.argpartition(-choice, kth=top_k - 1, axis=-1)[..., :top_k]
    indices = mx.stop_gradient(indices)
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return indices, weights if scale == 1 else weights * scale


def _mask_groups(choice: mx.array, n_group: int, topk_group: int) -> mx.array:
    """Minus infinity for the experts of all but the best groups."""
    grouped = mx.unflatten(choice, -1, (n_group, -1))
    strength = mx.topk(grouped, 2, axis=-1).sum(-1)
    refused = mx.argpartition(strength, kth=n_group - topk_group - 1, axis=-1)
    refused = refused[..., : n_group - topk_group, None]
    grouped = mx.put_along_axis(grouped, refused, mx.array(-mx.inf), axis=-2)
    return grouped.flatten(-2)
