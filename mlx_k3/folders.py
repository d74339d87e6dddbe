"""Where the package keeps what it can make again."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """This package's folder in the user's cache; it need not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-k3"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-k3"
