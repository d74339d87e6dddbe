"""The model's operations, each picked once for the device at hand.

Every operation has a reference in plain MLX ops that defines what is right, runs anywhere and is
differentiable; :func:`backend` names the path that runs.
"""

from .attention_residual import attention_residual
from .host import sigmoid, silu, softmax
from .kda import kda
from .kda_reference import kda_log_decay, l2norm
from .quantized import quantized_matmul
from .router import route
from .short_conv import short_conv
from .situ import situ


def backend() -> str:
    """Which path the operations take: ``"reference"``, plain MLX ops."""
    return "reference"


__all__ = [
    "attention_residual",
    "backend",
    "kda",
    "kda_log_decay",
    "l2norm",
    "quantized_matmul",
    "route",
    "short_conv",
    "sigmoid",
    "silu",
    "situ",
    "softmax",
]
