"""The errors a user can meet. Everything mlx-k3 raises on purpose is a :class:`K3Error`.

A message is one line: what is wrong, where, and what to do next.
"""


class K3Error(Exception):
    """Base of all errors mlx-k3 raises on purpose; the command line prints it and exits with 2."""


class CheckpointError(K3Error):
    """A model folder, shard, index, config or tokenizer file is missing, damaged or foreign."""


class BudgetError(K3Error):
    """Memory or disk space does not suffice; the message holds the arithmetic."""


class UnsupportedError(K3Error):
    """A well-formed request or model that mlx-k3 does not implement."""


class KernelError(K3Error):
    """A GPU kernel does not compile or does not start on this device."""
