"""Small files, written at once or not at all."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Have ``data`` in ``path``; a crash leaves what was there before, an error nothing else.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as scratch:
        try:
            scratch.write(data)
            scratch.flush()
            os.fsync(scratch.fileno())
            os.replace(scratch.name, path)
        except BaseException:
            os.unlink(scratch.name)
            raise
