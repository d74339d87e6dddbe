"""Where a conversion reads from: a local model folder, or a repository of the Hugging Face Hub.

Owns names: what belongs to a model and that no name leaves the model's folder. Knows nothing
about what is in the files.

A name is relative and posix (``model-00001-of-000096.safetensors``). The files of a model are
those at the top of its folder or one folder below; hidden folders (``.git``, ``.cache``) and
whatever a conversion never reads (code above all) are not listed at all.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Protocol

from ..errors import CheckpointError, UnsupportedError

# Weights, configuration, tokenizer, licence and model card. Never code.
_PATTERNS = (
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.jinja",
    "*.md",
    "tiktoken.model",
    "license*",
    "licence*",
    "notice*",
)


Progress = Callable[[str, int, int], None]


class Source(Protocol):
    """A model that can be listed at once and read piece by piece."""

    label: str
    """What messages call it: a path or a Hub id."""
    progress: Progress | None
    """Told of a download: name, bytes here, bytes of the file. May be called from any thread."""

    def files(self) -> dict[str, int]:
        """Every file of the model: name -> size_bytes."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` of ``name`` from ``offset`` on, without fetching the rest of the file.

        Raises:
            CheckpointError: if there is no such file or it ends before ``offset + nbytes``.
        """

    def fetch(self, name: str) -> Path:
        """The file ``name`` on the local disk, complete; downloads it if need be.

        Raises:
            CheckpointError: if it is missing or cannot be had intact.
        """

    def release(self, name: str) -> None:
        """Say that ``name`` is no longer needed; a downloaded copy may be deleted."""

    def room_bytes(self, groups: Iterable[Sequence[str]]) -> int:
        """Disk space it takes at most to fetch each group of files and release it, in turn."""

    def close(self) -> None:
        """The conversion is complete: forget what was kept for continuing it."""


def is_model_file(name: str) -> bool:
    """Whether a conversion may ever read ``name``."""
    path = PurePosixPath(name)
    if path.suffix == ".py" or len(path.parts) > 2 or any(p.startswith(".") for p in path.parts):
        return False
    return any(fnmatchcase(path.name.lower(), pattern) for pattern in _PATTERNS)


def check_name(name: str, label: str) -> None:
    """Refuse a name that is not a plain relative posix path below the model's folder.

    Raises:
        CheckpointError: for an absolute name, ``..``, ``.``, empty parts, backslashes or NUL.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{label}: {name!r} is not the name of a file in the model's folder; "
            "do not trust this checkpoint"
        )


class FolderSource:
    """A model in a local folder; the folder itself may be a symbolic link.

    A link inside the folder must stay inside it, with one exception: in the Hub's cache,
    ``models--org--name/snapshots/COMMIT/FILE`` links to ``models--org--name/blobs/HASH``.
    Any other way out could make a conversion read, and publish, a file that is not the model's.
    """

    def __init__(self, folder: str | Path) -> None:
        self.label = str(folder)
        self.progress: Progress | None = None
        if not os.path.isdir(folder):
            raise CheckpointError(f"{self.label}: no such folder")
        self._root = Path(os.path.realpath(folder))
        self._allowed = [self._root]
        if self._root.parent.name == "snapshots":
            self._allowed.append(self._root.parent.parent / "blobs")

    def files(self) -> dict[str, int]:
        """Every file of the model: name -> size_bytes, sorted by name.

        Raises:
            CheckpointError: if one of them is a link out of the folder or to nothing.
        """
        found = {}
        for path in [*self._root.glob("*"), *self._root.glob("*/*")]:
            name = path.relative_to(self._root).as_posix()
            if is_model_file(name) and not path.is_dir():
                found[name] = self.fetch(name).stat().st_size
        return dict(sorted(found.items()))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` of ``name`` from ``offset`` on.

        Raises:
            CheckpointError: if there is no such file or it ends before ``offset + nbytes``.
        """
        pieces, end = [], offset + nbytes
        try:
            fd = os.open(self.fetch(name), os.O_RDONLY)
        except OSError as e:
            raise CheckpointError(f"{self.label}: {name} cannot be read: {e.strerror}") from e
        try:
            while offset < end:
                # Above 2^31-1 bytes macOS refuses and Linux returns short: ask for at most 1 GiB.
                piece = os.pread(fd, min(end - offset, 2**30), offset)
                if not piece:
                    raise CheckpointError(
                        f"{self.label}: {name} ends {end - offset:,} bytes early; copy it again"
                    )
                pieces.append(piece)
                offset += len(piece)
        finally:
            os.close(fd)
        return b"".join(pieces)

    def fetch(self, name: str) -> Path:
        """The path of ``name`` in the folder.

        Raises:
            CheckpointError: if there is no such file or it lies outside the folder.
        """
        check_name(name, self.label)
        path = self._root / name
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(folder) for folder in self._allowed):
            raise CheckpointError(
                f"{self.label}: {name} is a link to {target}, outside the model's folder; "
                "put the file itself there"
            )
        if not target.is_file():
            raise CheckpointError(f"{self.label}: {name} is missing; download it again")
        return path

    def release(self, name: str) -> None:
        """Nothing: a folder that was given is never changed."""

    def room_bytes(self, groups: Iterable[Sequence[str]]) -> int:
        """Nothing: the files are there."""
        return 0

    def close(self) -> None:
        """Nothing: a folder that was given is never changed."""


def open_source(
    src: str | Path,
    *,
    revision: str | None = None,
    free_source: bool = False,
    staging: Path | None = None,
) -> Source:
    """The folder ``src`` if there is one, else the Hub repository ``src`` (``org/name``).

    ``revision`` (branch, tag or commit), ``free_source`` (delete a downloaded file when it is
    released) and ``staging`` (the folder downloads go to; without it only :meth:`Source.read`
    works) concern the Hub only.

    Raises:
        CheckpointError: if ``src`` is neither.
        UnsupportedError: if a flag for the Hub is given with a folder.
    """
    if os.path.isdir(src):
        if revision is not None or free_source:
            flag = "--revision" if revision is not None else "--free-source"
            raise UnsupportedError(f"{src} is a local folder: {flag} works with a Hub id only")
        return FolderSource(src)
    # Imported here: a conversion from a folder needs no huggingface-hub.
    from .hub import is_hub_id, open_hub

    if not is_hub_id(str(src)):
        raise CheckpointError(f"{src}: no such folder, and not a Hub id of the form org/name")
    return open_hub(str(src), revision=revision, free_source=free_source, staging=staging)
