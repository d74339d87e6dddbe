"""Where patches are, in the vision tower: the learned grid, frames, and rotations of heads."""

import mlx.core as mx
import numpy as np

BASE = 10000.0


def grid_positions(weight: mx.array, rows: int, columns: int) -> mx.array:
    """A learned grid ``[H, W, hidden]`` stretched to ``[rows, columns, hidden]``, float32.

    Bilinear between the centres of the cells, without smoothing where the grid shrinks.
    """
    y = weight.astype(mx.float32)
    for axis, length in enumerate((rows, columns)):
        low, high, part = _neighbours(y.shape[axis], length)
        if y.shape[axis] == length:
            continue
        part = part.reshape(-1, *[1] * (2 - axis))
        y = mx.take(y, low, axis) * (1 - part) + mx.take(y, high, axis) * part
    return y


def _neighbours(cells: int, length: int) -> tuple[mx.array, mx.array, mx.array]:
    """For each of ``length`` places the two nearest of ``cells``, and the share of the second."""
    place = (np.arange(length) + 0.5) * (cells / length) - 0.5
    place = np.clip(place, 0, cells - 1)
    low = np.floor(place).astype(np.int32)
    high = np.minimum(low + 1, cells - 1)
    return mx.array(low), mx.array(high), mx.array((place - low).astype(np.float32))


def frame_positions(frames: int, hidden: int) -> mx.array:
    """What the frames of a clip are told apart by: sines, then cosines, ``[frames, hidden]``."""
    half = hidden // 2
    angles = np.outer(np.arange(frames), BASE ** -(np.arange(half) / half))
    return mx.array(np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32))


def rotations(grid: tuple[int, int, int], head_dim: int) -> mx.array:
    """Cosine and sine for each patch and pair of a head's numbers, ``[N, D / 2, 2]`` float32.

    Even pairs turn with the column, odd ones with the row, two and two at the same speed; every
    frame alike.
    """
    t, rows, columns = grid
    speeds = BASE ** -(np.arange(0, head_dim, 4) / head_dim)
    angles = np.empty((rows, columns, head_dim // 4, 2))
    angles[..., 0] = np.arange(columns)[:, None] * speeds
    angles[..., 1] = np.arange(rows)[:, None, None] * speeds
    angles = np.tile(angles.reshape(-1, head_dim // 2), (t, 1))
    return mx.array(np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32))


def rotate(x: mx.array, turns: mx.array) -> mx.array:
    """Neighbouring numbers of ``x [B, H, N, D]`` turned by their pair's angle, in float32."""
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = turns[..., 0], turns[..., 1]
    y = mx.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return y.flatten(-2).astype(x.dtype)
