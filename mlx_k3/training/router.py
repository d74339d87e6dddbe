"""The router's gate while the model learns: it keeps the scores that balancing needs."""

import mlx.core as mx

from ..config import K3Config
from ..models.layers import Linear
from .balancing import quantile_bias, sign_bias


class RecordingGate(Linear):
    """A gate that remembers the logits of its last call."""

    def __init__(self, input_dims: int, output_dims: int):
        super().__init__(input_dims, output_dims)
        self._logits: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        self._logits = super().__call__(x)
        return self._logits

    def scores(self, config: K3Config) -> mx.array:
        """``[N, E]`` float32, without gradient."""
        logits = mx.stop_gradient(self._logits).flatten(0, -2)
        if config.moe_router_activation_func == "softmax":
            return mx.softmax(logits, axis=-1)
        return mx.sigmoid(logits)


def rebalance(
    kind: str, rate: float, scores: mx.array, bias: mx.array, load: mx.array, top_k: int
) -> mx.array:
    """The selection bias ``[E]`` after a step that saw ``scores [N, E]`` and ``load [E]``."""
    if kind == "quantile":
        return bias + rate * (quantile_bias(scores, bias, top_k) - bias)
    return sign_bias(load, bias, rate) if kind == "sign" else bias
