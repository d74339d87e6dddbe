"""The vision tower in float64 numpy: one patch, one head and one pair at a time where it can be.

Written from the tower's description, for small sizes; shares nothing with the package.
"""

import math

import numpy as np

EPS = 2.0**-23  # float32's


def vectors(weights: dict[str, np.ndarray], pixels: np.ndarray, grid, heads: int) -> np.ndarray:
    """``[M, text hidden]`` of one medium; ``weights`` by the names of a checkpoint."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    t, rows, columns = grid
    projection = w["vision_tower.patch_embed.proj.weight"]
    x = np.einsum("ncij,hcij->nh", pixels.astype(np.float64), projection)
    x = x + _positions(w["vision_tower.patch_embed.pos_emb.weight"], t, rows, columns)
    blocks = {name.split(".")[3] for name in w if ".blocks." in name}
    for i in range(len(blocks)):
        x = _block(
            {k: w[f"vision_tower.encoder.blocks.{i}.{k}.weight"] for k in _PARTS}, x, grid, heads
        )
    x = _norm(x, w["vision_tower.encoder.final_layernorm.weight"], EPS)
    x = x.reshape(t, rows, columns, -1).mean(0)
    y = []
    for row in range(0, rows, 2):
        for column in range(0, columns, 2):
            group = x[row : row + 2, column : column + 2].reshape(-1)
            y.append(
                w["mm_projector.proj.2.weight"] @ _gelu(w["mm_projector.proj.0.weight"] @ group)
            )
    return _norm(np.array(y), w["mm_projector.post_norm.weight"], 1e-5)


_PARTS = ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")


def _positions(grid: np.ndarray, t: int, rows: int, columns: int) -> np.ndarray:
    height, width, hidden = grid.shape
    places = np.empty((rows, columns, hidden))
    for row in range(rows):
        for column in range(columns):
            places[row, column] = sum(
                share * grid[i, j] * part
                for i, share in _near(row, rows, height)
                for j, part in _near(column, columns, width)
            )
    y = np.repeat(places.reshape(1, -1, hidden), t, axis=0)
    if t > 1:
        for frame in range(t):
            for i in range(hidden // 2):
                angle = frame / 10000 ** (i / (hidden // 2))
                y[frame, :, i] += math.sin(angle)
                y[frame, :, hidden // 2 + i] += math.cos(angle)
    return y.reshape(-1, hidden)


def _near(place: int, length: int, cells: int) -> list[tuple[int, float]]:
    """The two cells whose centres are next to the place's centre, and their shares."""
    at = min(max((place + 0.5) * cells / length - 0.5, 0), cells - 1)
    low = math.floor(at)
    return [(low, 1 - (at - low)), (min(low + 1, cells - 1), at - low)]


def _block(w: dict[str, np.ndarray], x: np.ndarray, grid, heads: int) -> np.ndarray:
    t, rows, columns = grid
    q, k, v = np.split(_norm(x, w["norm0"], EPS) @ w["wqkv"].T, 3, axis=1)
    D = q.shape[1] // heads
    out = np.empty_like(q)
    for head in range(heads):
        part = slice(head * D, (head + 1) * D)
        a, b = (_turn(y[:, part], t, rows, columns) for y in (q, k))
        scores = a @ b.T / math.sqrt(D)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, part] = weights / weights.sum(1, keepdims=True) @ v[:, part]
    x = x + out @ w["wo"].T
    inner = _norm(x, w["norm1"], EPS) @ w["mlp.fc0"].T
    inner = inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))) / 2
    return x + inner @ w["mlp.fc1"].T


def _turn(x: np.ndarray, t: int, rows: int, columns: int) -> np.ndarray:
    y, D = np.empty_like(x), x.shape[1]
    for n in range(len(x)):
        row, column = n % (rows * columns) // columns, n % columns
        for pair in range(D // 2):
            speed = 10000 ** -(4 * (pair // 2) / D)
            angle = speed * (column if pair % 2 == 0 else row)
            number = complex(x[n, 2 * pair], x[n, 2 * pair + 1])
            number *= complex(math.cos(angle), math.sin(angle))
            y[n, 2 * pair], y[n, 2 * pair + 1] = number.real, number.imag
    return y


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
