"""The residual stream: plain addition, or Attention Residuals over blocks of layers."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels import attention_residual, residual_step
from ..kernels.attention_residual import has_kernel
from .blocks import BLOCK_TOKENS, in_blocks


class ResidualStream:
    """The running sum of one forward pass, and the sums it went through before.

    Plain residuals are the case without blocks: what is read is then the running sum.
    """

    def __init__(self, embedding: mx.array, eps: float, blocks: mx.array | None = None):
        self._sum: mx.array | None = embedding  # None where a block begins
        self._update: mx.array | None = None  # given by a sublayer, not yet part of the sum
        self._eps = eps
        self._blocks = blocks  # [..., M, D]

    @property
    def parts(self) -> tuple[mx.array | None, mx.array | None]:
        """The sum and what a sublayer gave to it since; what is None counts as zero."""
        return self._sum, self._update

    @property
    def current(self) -> mx.array:
        """The running sum."""
        if self._update is not None:
            self._sum = self._update if self._sum is None else self._sum + self._update
            self._update = None
        return self._sum

    def read(self, weight: mx.array | None, norm: nn.RMSNorm) -> mx.array:
        """What a sublayer reads: the blocks and the running sum, mixed by ``weight [D]``, normed.

        On a GPU, adding, mixing and normalising are one step for up to a block of tokens.
        """
        if self._blocks is None or weight is None:
            return norm(self.current)
        if self._is_one_step(norm):
            arrays = self._blocks, self._sum, self._update, weight, norm.weight
            normed, self._sum = residual_step(*arrays, self._eps)
            self._update = None
            return normed
        return norm(
            in_blocks(
                lambda candidates: attention_residual(candidates, weight, self._eps),
                self._with_current(),
            )
        )

    def start_block(self) -> None:
        """Keep the running sum as a finished block; the next :meth:`add` begins a new sum."""
        self._blocks, self._sum = self._with_current(), None

    def add(self, y: mx.array) -> None:
        """Add a sublayer's output to the running sum."""
        if self._update is not None:
            self._sum = self.current
        self._update = y

    def _is_one_step(self, norm: nn.RMSNorm) -> bool:
        if self._sum is None or self._update is None or norm.eps != self._eps:
            return False
        return self._sum.shape[1] <= BLOCK_TOKENS and has_kernel(*self._blocks.shape[-2:])

    def _with_current(self) -> mx.array:
        current = self.current[..., None, :]
        if self._blocks is None:
            return current
        return mx.concatenate([self._blocks, current], axis=-2)
