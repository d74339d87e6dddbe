"""The residual stream: plain addition, or Attention Residuals over blocks of layers."""

import mlx.core as mx

from ..kernels import attention_residual, inverse_rms


class ResidualStream:
    """The running sum of one forward pass, and the sums it went through before.

    Plain residuals are the case without blocks: :meth:`mix` then returns the running sum.
    """

    def __init__(self, embedding: mx.array, eps: float):
        self.current = embedding
        self._eps = eps
        self._blocks: mx.array | None = None
        self._inverse_rms: mx.array | None = None
        self._restart = False

    def mix(self, weight: mx.array | None) -> mx.array:
        """What a sublayer reads: the blocks and the running sum, mixed by ``weight [D]``."""
        if self._blocks is None or weight is None:
            return self.current
        return attention_residual(self._blocks, self._inverse_rms, self.current, weight, self._eps)

    def start_block(self) -> None:
        """Keep the running sum as a finished block; the next :meth:`add` begins a new sum."""
        block = self.current[None]
        norm = inverse_rms(block, self._eps)
        if self._blocks is not None:
            block = mx.concatenate([self._blocks, block])
            norm = mx.concatenate([self._inverse_rms, norm])
        self._blocks, self._inverse_rms, self._restart = block, norm, True

    def add(self, y: mx.array) -> None:
        """Add a sublayer's output to the running sum."""
        self.current = y if self._restart else self.current + y
        self._restart = False
