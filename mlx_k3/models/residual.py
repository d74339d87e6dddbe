"""The residual stream: plain addition, or Attention Residuals over blocks of layers."""

import mlx.core as mx

from ..kernels import attention_residual
from .blocks import in_blocks


class ResidualStream:
    """The running sum of one forward pass, and the sums it went through before.

    Plain residuals are the case without blocks: :meth:`mix` then returns the running sum.
    """

    def __init__(self, embedding: mx.array, eps: float):
        self.current = embedding
        self._eps = eps
        self._blocks: mx.array | None = None  # [..., M, D]
        self._restart = False

    def mix(self, weight: mx.array | None) -> mx.array:
        """What a sublayer reads: the blocks and the running sum, mixed by ``weight [D]``."""
        if self._blocks is None or weight is None:
            return self.current
        return in_blocks(
            lambda candidates: attention_residual(candidates, weight, self._eps),
            self._with_current(),
        )

    def start_block(self) -> None:
        """Keep the running sum as a finished block; the next :meth:`add` begins a new sum."""
        self._blocks, self._restart = self._with_current(), True

    def add(self, y: mx.array) -> None:
        """Add a sublayer's output to the running sum."""
        self.current = y if self._restart else self.current + y
        self._restart = False

    def _with_current(self) -> mx.array:
        current = self.current[..., None, :]
        if self._blocks is None:
            return current
        return mx.concatenate([self._blocks, current], axis=-2)
