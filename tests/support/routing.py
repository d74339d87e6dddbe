"""Traces without a model: routing that is skewed, remembers a little, and differs by layer."""

from pathlib import Path

import numpy as np

from mlx_k3.experts.trace import TraceWriter


def routing(
    tokens: int, layers: int, experts: int, k: int, *, stay: float = 0.4, seed: int = 0
) -> np.ndarray:
    """[tokens, layers, k] experts, ascending.

    Each layer has its own Zipf-like favourites; a token keeps about ``stay`` of what the token
    before chose and draws the rest.
    """
    rng = np.random.default_rng(seed)
    ranks = np.stack([rng.permutation(experts) for _ in range(layers)])
    favour = -0.6 * np.log1p(ranks)
    chosen = np.zeros((layers, experts))
    result = np.empty((tokens, layers, k), np.int64)
    for token in range(tokens):
        # The k largest of log p + Gumbel noise are k draws without replacement.
        noise = rng.gumbel(size=(layers, experts))
        kept = chosen * (rng.random((layers, experts)) < stay) * 100
        result[token] = np.sort(np.argpartition(favour + noise + kept, -k)[:, -k:])
        chosen[:] = 0
        np.put_along_axis(chosen, result[token], 1, axis=1)
    return result


def write_decode(path: Path, choices: np.ndarray, *, expert_bytes: int = 1000) -> Path:
    """Record ``choices`` [tokens, layers, k] as a decode without reads."""
    weights = np.full((1, choices.shape[2]), 1 / choices.shape[2], np.float32)
    with TraceWriter(path, {"expert_bytes": expert_bytes, "slots": None}) as trace:
        for position, token in enumerate(choices):
            for layer, experts in enumerate(token):
                trace.route(position, layer, experts[None], weights)
    return path
