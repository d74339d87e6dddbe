"""Run Kimi K3 on your own machine.

>>> from mlx_k3 import load, generate
>>> model, tokenizer = load("path/to/converted-model")
>>> print(generate(model, tokenizer, "What is a delta rule?"))
"""

from typing import TYPE_CHECKING, Any

from . import blas
from .config import K3Config
from .errors import BudgetError, CheckpointError, K3Error, UnsupportedError
from .version import __version__

if TYPE_CHECKING:
    from .chat.session import generate, stream_generate
    from .loader import load

__all__ = [
    "BudgetError",
    "CheckpointError",
    "K3Config",
    "K3Error",
    "UnsupportedError",
    "__version__",
    "generate",
    "load",
    "stream_generate",
]

blas.preload()  # Before anything here can import MLX.

# Imported on first use, so that `mlx-k3 --help` and K3Config need no MLX.
_LAZY = {"load": ".loader", "generate": ".chat.session", "stream_generate": ".chat.session"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name], __name__), name)
