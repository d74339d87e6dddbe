"""Load balance: the router's selection bias, set so that every expert gets its share.

Owns what becomes of ``e_score_correction_bias``, which no gradient trains: Quantile Balancing
("MoE: balancing via optimal allocation", Jianlin Su, 2026) and, to compare with, DeepSeek-V3's
sign update. The bias takes part in the choice of experts only, never in their weights. All of it
is plain MLX ops without a look at the values: it may stand inside ``mx.compile``.
"""

import mlx.core as mx


def quantile_bias(
    scores: mx.array, bias: mx.array, top_k: int, rounds: int = 1, mask: mx.array | None = None
) -> mx.array:
    """The bias with which each of E experts is chosen by its share ``top_k / E`` of N tokens.

    Giving every token its best experts while none gets more than its share is a linear program.
    Its prices are set in turn: a token's is what the first expert it leaves out is worth to it,

        a_i = halfway between the k-th and the (k+1)-th largest of s_i + b,

    an expert's is what the first token it leaves out would pay,

        b_j = -(the quantile 1 - k/E over tokens i of s_ij - a_i).

    Args:
        scores: ``[..., N, E]`` float32, the router's, before the bias; leading axes are layers.
        bias: ``[..., E]``, where to start from.
        top_k: experts a token, fewer than E, chosen among all E.
        rounds: how often both prices are set.
        mask: ``[N]`` bool, False for tokens that do not count (padding); two at least do.

    Returns:
        ``[..., E]`` float32 with mean 0.
    """
    N, E = scores.shape[-2:]
    counted = mx.array(N) if mask is None else mask.sum()
    share = mx.clip(mx.round(counted * (top_k / E)).astype(mx.int32), 1, counted - 1)
    scores = mx.stop_gradient(scores.astype(mx.float32))
    bias = bias.astype(mx.float32)
    for _ in range(rounds):
        token_price = _between(scores + bias[..., None, :], top_k)
        worth = (scores - token_price[..., None]).swapaxes(-1, -2)
        if mask is not None:
            worth = mx.where(mask, worth, -mx.inf)
        bias = -_between(worth, share)
    return bias - bias.mean(-1, keepdims=True)


def sign_bias(load: mx.array, bias: mx.array, rate: float) -> mx.array:
    """DeepSeek-V3's update: ``rate`` up for experts below the mean load, down for those above.

    load and bias ``[..., E]``; returns ``[..., E]``.
    """
    return bias + rate * mx.sign(load.mean(-1, keepdims=True) - load)


def expert_load(
    scores: mx.array, bias: mx.array, top_k: int, mask: mx.array | None = None
) -> mx.array:
    """The share of tokens that choose each expert.

    Args:
        scores: ``[N, E]``, the router's, before the bias.
        bias: ``[E]``.
        top_k: experts a token.
        mask: ``[N]`` bool, False for tokens that do not count.

    Returns:
        ``[E]`` float32 with sum ``top_k``.
    """
    N, E = scores.shape
    chosen = mx.argpartition(-(scores + bias), kth=top_k - 1, axis=-1)[:, :top_k]
    counts = mx.ones(N) if mask is None else mask.astype(mx.float32)
    return mx.zeros(E).at[chosen].add(counts[:, None]) / counts.sum()


def max_over_mean(load: mx.array) -> mx.array:
    """The largest load in units of the mean: 1 is perfect balance. ``[..., E]`` -> ``[...]``."""
    return load.max(-1) / load.mean(-1)


def _between(x: mx.array, n: int | mx.array) -> mx.array:
    """Halfway between the n-th and the (n+1)-th largest of the last axis."""
    x = mx.sort(x, axis=-1)
    above = x.shape[-1] - mx.array(n)
    return (mx.take(x, above, axis=-1) + mx.take(x, above - 1, axis=-1)) / 2
