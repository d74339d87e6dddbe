"""MoonViT, the vision tower of Kimi K3, and the projector to the language model's width.

Plain differentiable modules with the release's parameter names. One call takes media of one grid:
attention spans an image, or all frames of a clip, and there is nothing to mask. Long sequences go
block by block and are evaluated on the way, so that memory grows with the patches and not with
their square.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..config import VISION_PARTS, VisionConfig
from ..kernels.gelu import gelu_exact, gelu_tanh
from .layers import Linear
from .vision_attention import attention
from .vision_positions import frame_positions, grid_positions, rotate, rotations

Grid = tuple[int, int, int]
"""Frames, rows of patches, columns of patches."""

# The release gives its norms no epsilon. This is what PyTorch then takes: float32's.
NORM_EPS = 1.1920929e-07

BLOCK_PATCHES = 1024


class PatchProjection(nn.Module):
    """A convolution whose windows do not overlap: one product. ``weight [hidden, 3, p, p]``."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        numbers = 3 * config.patch_size**2
        shape = (config.vt_hidden_size, 3, config.patch_size, config.patch_size)
        self.weight = mx.random.uniform(-(numbers**-0.5), numbers**-0.5, shape)

    def __call__(self, pixels: mx.array) -> mx.array:
        """``[B, N, 3, p, p]`` -> ``[B, N, hidden]``."""
        return pixels.flatten(2) @ self.weight.flatten(1).T


class PositionEmbedding(nn.Module):
    """A learned grid, interpolated to the picture's; frames of a clip get a fixed wave each."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size = config.init_pos_emb_height, config.init_pos_emb_width
        self.frames = config.init_pos_emb_time
        self.weight = mx.random.normal((*size, config.vt_hidden_size), scale=0.02)

    def __call__(self, grid: Grid) -> mx.array:
        """``[t * rows * columns, hidden]`` float32."""
        t, rows, columns = grid
        if t > self.frames:
            raise ValueError(f"{t} frames; the tower sees up to {self.frames} together")
        y = grid_positions(self.weight, rows, columns).flatten(0, 1)
        if t > 1:
            y = (y + frame_positions(t, y.shape[-1])[:, None]).flatten(0, 1)
        return y


class PatchEmbedding(nn.Module):
    """Patches as vectors that know where they are."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.proj = PatchProjection(config)
        self.pos_emb = PositionEmbedding(config)

    def __call__(self, pixels: mx.array, grid: Grid) -> mx.array:
        """``[B, N, 3, p, p]`` -> ``[B, N, hidden]``."""
        return self.place(self.proj(pixels), grid)

    def place(self, x: mx.array, grid: Grid) -> mx.array:
        """Projected patches ``[B, N, hidden]`` with their positions."""
        return x + self.pos_emb(grid).astype(x.dtype)


class VisionMLP(nn.Module):
    """``fc1(gelu(fc0(x)))``."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.fc0 = Linear(config.vt_hidden_size, config.vt_intermediate_size)
        self.fc1 = Linear(config.vt_intermediate_size, config.vt_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc1(gelu_tanh(self.fc0(x)))


class VisionBlock(nn.Module):
    """Attention of all patches to all, then an MLP."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.heads, self.width = config.vt_num_attention_heads, config.qkv_hidden_size
        self.norm0 = nn.RMSNorm(config.vt_hidden_size, eps=NORM_EPS)
        self.norm1 = nn.RMSNorm(config.vt_hidden_size, eps=NORM_EPS)
        self.wqkv = Linear(config.vt_hidden_size, 3 * config.qkv_hidden_size)
        self.wo = Linear(config.qkv_hidden_size, config.vt_hidden_size)
        self.mlp = VisionMLP(config)

    def __call__(self, x: mx.array, turns: mx.array) -> mx.array:
        """``[B, N, hidden]`` -> the same; ``turns`` are :func:`~.vision_positions.rotations`."""
        N = x.shape[1]
        blocks = [slice(i, min(i + BLOCK_PATCHES, N)) for i in range(0, N, BLOCK_PATCHES)]
        keys, values, outputs = [], [], []
        for b in blocks:
            # Queries are made when their turn comes: they would be as much again.
            k, v = self._project(self.norm0(x[:, b]), "kv")
            keys += _settled(len(blocks), rotate(k, turns[b]))
            values += _settled(len(blocks), v)
        keys = _join(keys, axis=2)
        values = _join(values, axis=2)
        for b in blocks:
            outputs += _settled(len(blocks), self._rest(x[:, b], turns[b], keys, values))
        del keys, values
        return _join(outputs, axis=1)

    def _rest(self, x, turns, keys, values):
        """All that is left to do for a block of patches."""
        (q,) = self._project(self.norm0(x), "q")
        y = attention(rotate(q, turns), keys, values)
        x = x + self.wo(y.swapaxes(1, 2).flatten(2))
        return x + self.mlp(self.norm1(x))

    def _project(self, x, parts):
        """Queries, keys or values of all heads, each ``[B, H, N, D]`` in memory of its own."""
        for part in parts:
            start = "qkv".index(part) * self.width
            y = x @ self.wqkv.weight[start : start + self.width].T
            yield y.reshape(*y.shape[:2], self.heads, -1).swapaxes(1, 2)


class VisionEncoder(nn.Module):
    """The blocks, and a norm."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.blocks = [VisionBlock(config) for _ in range(config.vt_num_hidden_layers)]
        self.final_layernorm = nn.RMSNorm(config.vt_hidden_size, eps=NORM_EPS)

    def __call__(
        self, x: mx.array, grid: Grid, on_block: Callable[[], None] | None = None
    ) -> mx.array:
        """``[B, N, hidden]`` -> the same."""
        turns = rotations(grid, self.head_dim)
        for block in self.blocks:
            x = block(x, turns)
            if on_block is not None:
                mx.eval(x)
                on_block()
            if x.shape[1] > BLOCK_PATCHES:
                mx.clear_cache()  # Buffers of many sizes, which hardly anything would take again.
        return self.final_layernorm(x)


class VisionTower(nn.Module):
    """Patches in, groups of neighbouring patches out."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.merge = config.merge_kernel_size
        self.patch_embed = PatchEmbedding(config)
        self.encoder = VisionEncoder(config)

    def __call__(
        self, pixels: mx.array, grid: Grid, on_block: Callable[[], None] | None = None
    ) -> mx.array:
        """Media of one grid, ``[B, N, 3, p, p]`` -> features ``[B, M, 4, hidden]``.

        The patches of a group come row by row. Frames are averaged. ``on_block`` is called when a
        block has been computed, and may raise; without it, short sequences stay lazy.
        """
        return self.merged(self.encoder(self.patch_embed(pixels, grid), grid, on_block), grid)

    def merged(self, x: mx.array, grid: Grid) -> mx.array:
        """Encoded patches ``[B, N, hidden]`` in groups ``[B, M, 4, hidden]``."""
        (t, rows, columns), (high, wide) = grid, self.merge
        B, _, hidden = x.shape
        x = x.reshape(B, t, rows // high, high, columns // wide, wide, hidden)
        x = x[:, 0] if t == 1 else x.astype(mx.float32).mean(1).astype(x.dtype)
        return x.swapaxes(2, 3).reshape(B, -1, high * wide, hidden)


class Projector(nn.Module):
    """Groups of patches as vectors of the language model."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        high, wide = config.merge_kernel_size
        merged = config.vt_hidden_size * high * wide
        # The release numbers the activation between the two.
        self.proj = [
            Linear(merged, merged),
            nn.Identity(),
            Linear(merged, config.text_hidden_size),
        ]
        self.post_norm = nn.RMSNorm(config.text_hidden_size, eps=config.projector_ln_eps)

    def __call__(self, features: mx.array) -> mx.array:
        """``[B, M, 4, hidden]`` -> ``[B, M, text hidden]``."""
        first, _, last = self.proj
        return self.post_norm(last(gelu_exact(first(features.flatten(2)))))


class Vision(nn.Module):
    """Tower and projector, by the names they have in a checkpoint."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.mm_projector = Projector(config)

    def __call__(
        self, pixels: mx.array, grid: Grid, on_block: Callable[[], None] | None = None
    ) -> mx.array:
        """Media of one grid, ``[B, N, 3, p, p]`` -> vectors ``[B, M, text hidden]``."""
        return self.mm_projector(self.vision_tower(pixels, grid, on_block))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The tensors among ``weights`` that are of tower and projector.

        Some builds keep the patches' projection as MLX's convolutions have it, colours last.
        """
        weights = {k: array for k, array in weights.items() if k.startswith(VISION_PARTS)}
        name = "vision_tower.patch_embed.proj.weight"
        if name in weights and weights[name].shape[1:] == (*[self.config.patch_size] * 2, 3):
            weights[name] = weights[name].transpose(0, 3, 1, 2)
        return weights


def _settled(blocks: int, *arrays: mx.array) -> tuple[mx.array, ...]:
    """``arrays``, computed now if they are one of many parts."""
    if blocks > 1:
        mx.eval(arrays)
    return arrays


def _join(parts: list[mx.array], axis: int) -> mx.array:
    if len(parts) == 1:
        return parts[0]
    y = mx.concatenate(parts, axis=axis)
    mx.eval(y)
    return y
