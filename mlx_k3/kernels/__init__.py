"""The model's operations, each picked once for the device at hand.

Every operation has a reference in plain MLX ops that defines what is right, runs anywhere and is
differentiable. On a GPU some run as kernels; :func:`backend` names the path, and :func:`using`
takes another one for a while, to compare.
"""

from .attention_residual import attention_residual, residual_step
from .build import backend, using
from .gated_norm import gated_rms_norm
from .gradient import without_gradients
from .host import sigmoid, silu, softmax
from .kda import kda
from .kda_reference import kda_log_decay, l2norm
from .quantized import quantized_matmul
from .router import route
from .short_conv import short_conv
from .situ import situ

__all__ = [
    "attention_residual",
    "backend",
    "gated_rms_norm",
    "kda",
    "kda_log_decay",
    "l2norm",
    "quantized_matmul",
    "residual_step",
    "route",
    "short_conv",
    "sigmoid",
    "silu",
    "situ",
    "softmax",
    "using",
    "without_gradients",
]
