"""``python -m mlx_k3`` is the ``mlx-k3`` command."""

from .cli import entry

entry()
