"""Routing of a trained model: what the bundled one chose while it answered."""

from pathlib import Path

import numpy as np

from mlx_k3.experts.trace import TraceWriter

# [tokens, layers, k], made by scripts/record_routing.py.
RECORDED = np.load(Path(__file__).parents[1] / "data" / "nano-routing.npy").astype(np.int64)
EXPERTS = int(RECORDED.max()) + 1


def routing(tokens: int, layers: int, experts: int = EXPERTS, k: int = 4) -> np.ndarray:
    """[tokens, layers, k] experts, ascending, as the bundled model chooses them.

    More layers than it has are its layers at other times. A larger k is several of its tokens side
    by side, each with experts of their own. Where there are more experts than the recorded ones, a
    recorded one stands for several: which of them is chosen follows from what the same token chose
    in the next layer. So an expert comes back where both choices do, and none is idle. Where there
    are fewer, several recorded ones are one.
    """
    width, most = RECORDED.shape[1:]
    streams = -(-k // most)
    bounds = [stream * experts // streams for stream in range(streams + 1)]
    chosen = []
    for layer in range(layers):
        parts = []
        for stream in range(streams):
            start = 131 * (layer // width) + 577 * stream
            at = (start + np.arange(tokens)) % len(RECORDED)
            own, beside = (RECORDED[at, (layer + i) % width] for i in range(2))
            columns = min(most, k - most * stream)
            span = bounds[stream + 1] - bounds[stream]
            parts.append(bounds[stream] + _mapped(own, beside, span, columns))
        chosen.append(np.sort(np.concatenate(parts, axis=1)))
    return np.stack(chosen, axis=1)


def _mapped(own: np.ndarray, beside: np.ndarray, span: int, columns: int) -> np.ndarray:
    """``columns`` different ones of ``span`` experts for each row of ``own``."""
    # Which columns go where there are too many must not favour the first experts.
    first = own.sum(axis=1, keepdims=True)
    kept = (first + np.arange(columns)) % own.shape[1]
    own, beside = (np.take_along_axis(rows, kept, axis=1) for rows in (own, beside))
    low, high = own * span // EXPERTS, (own + 1) * span // EXPERTS
    chosen = low + beside % np.maximum(high - low, 1)
    for column in range(1, columns):
        taken = chosen[:, :column]
        while (clash := (taken == chosen[:, column, None]).any(axis=1)).any():
            chosen[clash, column] = (chosen[clash, column] + 1) % span
    return chosen


def write_decode(path: Path, choices: np.ndarray, *, expert_bytes: int = 1000) -> Path:
    """Record ``choices`` [tokens, layers, k] as a decode without reads."""
    weights = np.full((1, choices.shape[2]), 1 / choices.shape[2], np.float32)
    with TraceWriter(path, {"expert_bytes": expert_bytes, "slots": None}) as trace:
        for position, token in enumerate(choices):
            for layer, experts in enumerate(token):
                trace.route(position, layer, experts[None], weights)
    return path
