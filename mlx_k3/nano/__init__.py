"""The checkpoint that travels with the package: a very small K3 in the release's format.

Owns where it lies and its converted copy in the user's cache. Its weights are random for now.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import K3Error
from ..folders import cache_folder
from ..version import __version__

Progress = Callable[[int, int, str], None]

_HERE = Path(__file__).resolve().parent
EXPECTED = _HERE / "expected.safetensors"
"""``ids [1, T]`` and the ``last_logits [1, vocab]`` that mlx-lm computes for them in float32."""


def path() -> Path:
    """The checkpoint's folder, in the release's format."""
    return _HERE / "model"


def is_converted() -> bool:
    """Whether :func:`converted` has nothing left to do."""
    return _folder().is_dir()


def converted(progress: Progress | None = None) -> Path:
    """The checkpoint as an MLX package, converted on the first call and kept in the user's cache.

    A command without a model uses it: ``load(nano.converted())``. The trunk stays bfloat16.
    ``progress`` is called with bytes done, bytes in all and the file.

    Raises:
        K3Error: the cache cannot be written.
    """
    from ..convert.stream import convert

    folder = _folder()
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(dir=folder.parent, prefix=".nano-")
        except OSError as e:
            raise K3Error(
                f"{folder.parent}: {e.strerror}; the bundled model is converted into this folder"
            ) from None
        with scratch as name:
            convert(path(), Path(name) / "model", trunk="bf16", progress=progress)
            try:
                os.rename(Path(name) / "model", folder)
            except OSError:
                if not folder.is_dir():  # Else another process was faster: the same bytes.
                    raise
    return folder


def _folder() -> Path:
    return cache_folder() / f"nano-{_key()}"


def _key() -> str:
    digest = hashlib.sha256()
    for file in sorted(path().iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{__version__}-{digest.hexdigest()[:12]}"
