"""Per-Head Muon: every matrix of the network moves by an orthogonal step, attention head by head.

Owns which parameter learns by which rule. Muon (Jordan, 2024) replaces a matrix's momentum by the
nearest orthogonal matrix, found by a Newton-Schulz iteration; here a projection of H heads is H
matrices, so that a head's step has its own scale. Steps are scaled to the size of AdamW's
("Muon is scalable for LLM training", 2025): one learning rate serves both. Embeddings, the output
layer, gates, norms and all vectors learn by AdamW.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.optimizers import AdamW, MultiOptimizer, Muon, Optimizer
from mlx.utils import tree_flatten, tree_map_with_path

from ..config import K3Config
from ..errors import UnsupportedError

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
RMS = 0.2  # of a step before the learning rate, AdamW's usual
BETAS = [0.9, 0.95]  # AdamW's

_ATTENTION = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(\w+)\.weight")
_BY_ROWS = {"qkv_proj": 3, "q_proj": 1, "q_b_proj": 1, "f_b_proj": 1, "g_proj": 1, "g_b_proj": 1}
# Of the vision tower: into how many blocks a head falls down the rows, and along them.
_TOWER_ATTENTION = re.compile(r"(?:.*\.)?encoder\.blocks\.\d+\.(wqkv|wo)\.weight")
_TOWER_BLOCKS = {"wqkv": (3, 0), "wo": (0, 1)}
# Matrices that AdamW trains: embeddings, and gates that choose or scale.
_ADAMW_MATRIX = re.compile(
    r"(?:.*\.)?(?:embed_tokens|lm_head|mlp\.gate|self_attn\.b_proj"
    r"|patch_embed\.proj|patch_embed\.pos_emb)\.weight"
)

LearningRate = float | Callable[[mx.array], mx.array]


def make_optimizer(
    config: K3Config, learning_rate: LearningRate, weight_decay: float, kind: str = "muon"
) -> Optimizer:
    """The optimizer of a whole model.

    Args:
        config: the model's.
        learning_rate: a number, or a schedule from the step (an array) to one.
        weight_decay: of matrices; vectors and convolutions have none.
        kind: ``"muon"``, or ``"adamw"`` for AdamW throughout.

    Raises:
        UnsupportedError: another kind.
    """
    adamw = {"learning_rate": learning_rate, "betas": BETAS, "bias_correction": True}
    decayed = FlatAdamW(weight_decay=weight_decay, **adamw)
    plain = FlatAdamW(weight_decay=0, **adamw)
    if kind == "adamw":
        return MultiOptimizer([decayed, plain], [is_matrix])
    if kind != "muon":
        raise UnsupportedError(f"optimizer {kind!r} is none of muon and adamw")
    muon = PerHeadMuon(config, learning_rate, weight_decay)
    return MultiOptimizer([muon, decayed, plain], [takes_muon, is_matrix])


def is_matrix(path: str, parameter: mx.array) -> bool:
    """Whether a parameter is a matrix, or a stack of them, rather than vectors side by side."""
    return parameter.ndim >= 2 and path.endswith(".weight")


def takes_muon(path: str, parameter: mx.array) -> bool:
    """Whether Muon trains the parameter at ``path``."""
    return is_matrix(path, parameter) and not _ADAMW_MATRIX.fullmatch(path)


class FlatAdamW(AdamW):
    """AdamW over one vector of all its parameters end to end: the same numbers, in far fewer
    operations."""

    def init(self, parameters: Any) -> None:
        """State for ``parameters``."""
        super().init({"all": _flat(parameters)})

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """The updated parameters, a tree like ``gradients``."""
        names = [path for path, _ in tree_flatten(gradients)]
        old = dict(tree_flatten(parameters))
        moved = super().apply_gradients(
            {"all": _flat(gradients)}, {"all": _flat([old[path] for path in names])}
        )["all"]
        ends = list(accumulate(old[path].size for path in names))
        parts = mx.split(moved, ends[:-1]) if len(ends) > 1 else [moved]
        new = {p: x.reshape(old[p].shape) for p, x in zip(names, parts, strict=True)}
        return tree_map_with_path(lambda path, _: new[path].astype(old[path].dtype), gradients)


def _flat(tree: Any) -> mx.array:
    leaves = [array.reshape(-1).astype(mx.float32) for _, array in tree_flatten(tree)]
    return mx.concatenate(leaves) if leaves else mx.zeros(0)


class PerHeadMuon(Muon):
    """Muon with Nesterov momentum and decoupled weight decay over the matrices of ``config``.

    A block ``[rows, columns]`` moves by ``0.2 sqrt(max(rows, columns))`` times its orthogonalised
    momentum. Blocks of one shape, of whatever layer, are orthogonalised together, in bfloat16 on
    a GPU and in float32 on a CPU.
    """

    def __init__(self, config: K3Config, learning_rate: LearningRate, weight_decay: float):
        super().__init__(learning_rate, MOMENTUM, weight_decay)
        self.config = config

    def init(self, parameters: Any) -> None:
        """State for ``parameters``: the momentum of each batch of blocks."""
        super().init(self._batches(parameters))

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """The updated parameters, a tree like ``gradients``."""
        batches = self._batches(gradients)
        directions = super().apply_gradients(batches, batches)
        lr = self.learning_rate.astype(mx.float32)
        steps = self._steps(directions, lr, dict(tree_flatten(gradients)))
        keep = 1 - lr * self.weight_decay

        def move(path: str, _: mx.array, parameter: mx.array) -> mx.array:
            return (keep * parameter - steps[path]).astype(parameter.dtype)

        return tree_map_with_path(move, gradients, parameters)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        """Where a batch of blocks is to go, by Nesterov momentum; not orthogonal yet."""
        state["v"] = self.momentum * state["v"] + (1 - self.momentum) * gradient
        return self.momentum * state["v"] + (1 - self.momentum) * gradient

    def _batches(self, tree: Any) -> dict[str, mx.array]:
        """The matrices of ``tree`` as blocks, those of one shape side by side ``[N, r, c]``.

        By batches instead of one by one, a step is a few hundred operations instead of thousands,
        and starting operations is what a step of a small model costs on a GPU.
        """
        members = defaultdict(list)
        for path, matrix in tree_flatten(tree):
            blocks = _cut(matrix, *self._heads(path))
            members["{}x{}".format(*blocks.shape[1:])].append(blocks)
        return {shape: mx.concatenate(blocks) for shape, blocks in members.items()}

    def _steps(
        self, directions: dict[str, mx.array], lr: mx.array, like: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """The step of every parameter, shaped as in ``like``."""
        batches, ends = {}, defaultdict(int)
        for shape, blocks in directions.items():
            columns = blocks.shape[-1]
            batches[shape] = (lr * RMS * columns**0.5) * orthogonalize(blocks)
        steps = {}
        for path, matrix in like.items():
            down, along = self._heads(path)
            count, *block = _blocks(matrix.shape, down, along)
            shape = "{}x{}".format(*block)
            begin, ends[shape] = ends[shape], ends[shape] + count
            steps[path] = _join(batches[shape][begin : ends[shape]], matrix.shape, down, along)
        return steps

    def _heads(self, path: str) -> tuple[int, int]:
        """Into how many blocks the matrix at ``path`` falls, down its rows and along them."""
        if match := _TOWER_ATTENTION.fullmatch(path):
            heads = self.config.vision_config["vt_num_attention_heads"]
            down, along = _TOWER_BLOCKS[match[1]]
            return max(down * heads, 1), max(along * heads, 1)
        match = _ATTENTION.fullmatch(path)
        if match is None:
            return 1, 1
        is_kda = int(match[1]) in self.config.kda_layers
        heads = self.config.kda_num_heads if is_kda else self.config.num_attention_heads
        if match[2] == "o_proj":
            return 1, heads
        return heads * _BY_ROWS[match[2]] if match[2] in _BY_ROWS else 1, 1


def orthogonalize(blocks: mx.array) -> mx.array:
    """Nearly orthogonal matrices in the direction of ``blocks [N, rows, columns]``, float32.

    Singular values end between about 0.7 and 1.2; a zero block stays zero. Fast where
    ``rows <= columns``.
    """
    a, b, c = COEFFICIENTS
    x = blocks.astype(mx.float32)
    x = x / (mx.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    x = x.astype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    for _ in range(STEPS):
        square = x @ x.swapaxes(1, 2)
        x = mx.addmm(a * x, mx.addmm(b * square, square, square, alpha=c), x)
    return x.astype(mx.float32)


def _blocks(shape: tuple[int, ...], down: int, along: int) -> tuple[int, int, int]:
    """How many blocks :func:`_cut` makes of a matrix or a stack, and their shape."""
    *stack, rows, columns = shape
    if not stack:
        stack, rows, columns = [down * along], rows // down, columns // along
    return stack[0], min(rows, columns), max(rows, columns)


def _cut(matrix: mx.array, down: int, along: int) -> mx.array:
    """A matrix, or a stack of them, as blocks ``[N, rows, columns]`` with rows <= columns.

    Blocks that stand are laid down: so more of them are alike.
    """
    if matrix.ndim == 2:
        rows, columns = matrix.shape
        matrix = matrix.reshape(down, rows // down, along, columns // along)
        matrix = matrix.swapaxes(1, 2).flatten(0, 1)
    return matrix.swapaxes(1, 2) if matrix.shape[1] > matrix.shape[2] else matrix


def _join(blocks: mx.array, shape: tuple[int, ...], down: int, along: int) -> mx.array:
    """The matrix, or the stack, of ``shape`` that :func:`_cut` made ``blocks`` of."""
    if shape[-2] // down > shape[-1] // along:
        blocks = blocks.swapaxes(1, 2)
    if len(shape) == 2:
        blocks = mx.unflatten(blocks, 0, (down, along)).swapaxes(1, 2)
    return blocks.reshape(shape)
