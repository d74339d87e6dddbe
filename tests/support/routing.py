"""Routing of a trained model: what the bundled one chose while it answered."""

from pathlib import Path

import numpy as np

from mlx_k3.experts.trace import TraceWriter

# [tokens, layers, k], made by scripts/record_routing.py.
RECORDED = np.load(Path(__file__).parents[1] / "data" / "nano-routing.npy").astype(np.int64)
EXPERTS = 32


def routing(tokens: int, layers: int, experts: int = EXPERTS, k: int = 4) -> np.ndarray:
    """[tokens, layers, k] experts, ascending, as the bundled model chooses them.

    More layers than it has are its layers at other times. More experts and a larger k (multiples
    of its own) are several of its tokens side by side, each with experts of their own.
    """
    recorded, width = len(RECORDED), RECORDED.shape[1]
    copies, streams = experts // EXPERTS, k // RECORDED.shape[2]
    chosen = []
    for layer in range(layers):
        parts = []
        for stream in range(streams):
            start = 131 * (layer // width) + 577 * stream
            rows = RECORDED[(start + np.arange(tokens)) % recorded, layer % width]
            parts.append(rows * copies + stream * (copies // streams))
        chosen.append(np.sort(np.concatenate(parts, axis=1)))
    return np.stack(chosen, axis=1)


def write_decode(path: Path, choices: np.ndarray, *, expert_bytes: int = 1000) -> Path:
    """Record ``choices`` [tokens, layers, k] as a decode without reads."""
    weights = np.full((1, choices.shape[2]), 1 / choices.shape[2], np.float32)
    with TraceWriter(path, {"expert_bytes": expert_bytes, "slots": None}) as trace:
        for position, token in enumerate(choices):
            for layer, experts in enumerate(token):
                trace.route(position, layer, experts[None], weights)
    return path
