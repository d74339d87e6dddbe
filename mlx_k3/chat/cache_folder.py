"""The prompt cache's folder: a tree of prefixes as files, found again by the next process.

A file's name says its place in the tree and the model it belongs to, so that opening a folder
reads no file. Everything here may vanish at any time: what is missing or damaged is computed
again, and a disk that refuses is not asked again.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..checkpoint.writer import PARTIAL
from ..errors import CheckpointError
from ..units import format_bytes
from .cache_files import is_abandoned, read_arrays, write_arrays
from .cache_parts import Arrays
from .prefix_tree import KEY_DIGITS, Place, PrefixTree

_LOG = logging.getLogger(__name__)
_MODEL_DIGITS = 16
_SUFFIX = ".safetensors"
_KEY = f"([0-9a-f]{{{KEY_DIGITS}}})"
_NAME = re.compile(rf"([0-9a-f]{{{_MODEL_DIGITS}}})-(\d+)-(state|block)-{_KEY}-{_KEY}{_SUFFIX}")


class CacheFolder:
    """Nodes of the prompt cache in ``folder``, of at most ``limit_bytes`` for all models together.

    ``tree`` has the places of all files, other models' too: they give way when room is needed.
    """

    def __init__(self, folder: Path, identity: str, limit_bytes: int | None):
        self.folder = folder
        self.tree = PrefixTree(limit_bytes)
        self._identity = identity
        self._others: dict[str, str] = {}  # key of another model's node -> that model's digits
        self._writes = True
        self._scan()

    def read(self, place: Place) -> Arrays | None:
        """What is in the file at ``place``; None, and the file is forgotten, if that fails."""
        try:
            return read_arrays(self._path(place), self._seal(place))
        except (CheckpointError, OSError) as e:
            _LOG.warning("%s; it is not used", e)
            self._delete([place])
            self.tree.remove(place.key)
            return None

    def write(self, place: Place, arrays: Arrays) -> None:
        """Put ``arrays`` into the file at ``place``. A disk that refuses is not asked again."""
        if not self._writes:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            nbytes = write_arrays(self._path(place), self._seal(place), arrays)
        except FileNotFoundError:
            return  # Someone has just deleted the folder.
        except OSError as e:
            self._writes = False
            _LOG.warning("%s: %s; prompts are no longer kept there", self.folder, e.strerror)
            return
        self.tree.add(place, nbytes)
        self._delete(self.tree.shrink())

    def use(self, place: Place) -> None:
        """Note that the file at ``place`` was of use, for this process and for later ones."""
        try:
            os.utime(self._path(place))
            self.tree.use(place.key)
        except FileNotFoundError:
            self.tree.remove(place.key)
        except OSError:
            self.tree.use(place.key)  # A folder that cannot be written can still be read.

    def forget(self, key: str) -> None:
        """Delete the state ``key``, and what only it needed."""
        self._delete(self.tree.prune(key))

    def bytes_of(self, keys: Iterable[str]) -> int:
        """Bytes of the files that the states ``keys`` are read from, as far as they are there."""
        places = {place for key in keys for place in self.tree.path_to(key)}
        return sum(self.tree.nbytes_of(place.key) for place in places)

    def _scan(self) -> None:
        found = []
        others_bytes = 0
        for entry in _entries(self.folder):
            match = _NAME.fullmatch(entry.name)
            try:
                if match:
                    found.append((entry.stat(), match))
                elif entry.name.endswith(PARTIAL) and is_abandoned(Path(entry.path)):
                    os.unlink(entry.path)
            except OSError:
                continue  # Another process has deleted it, or may not be read.
        for status, match in sorted(found, key=lambda item: item[0].st_mtime_ns):
            model, end, kind, key, parent = match.groups()
            self.tree.add(Place(key, parent, int(end), kind == "state"), status.st_size)
            if model != self._identity[:_MODEL_DIGITS]:
                self._others[key] = model
                others_bytes += status.st_size
        if others_bytes:
            size = format_bytes(others_bytes)
            _LOG.info("%s: %s of another model or version, not used", self.folder, size)
        self._delete(self.tree.shrink())

    def _delete(self, places: list[Place]) -> None:
        for place in places:
            try:
                os.unlink(self._path(place))
            except OSError:
                continue  # Gone already, or of a folder that only can be read.

    def _path(self, place: Place) -> Path:
        kind = "state" if place.is_state else "block"
        model = self._others.get(place.key, self._identity[:_MODEL_DIGITS])
        return self.folder / f"{model}-{place.end}-{kind}-{place.key}-{place.parent}{_SUFFIX}"

    def _seal(self, place: Place) -> str:
        return f"{self._identity} {place.key} {place.parent} {place.end} {place.is_state}"


def _entries(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # Not there yet.


def free_bytes(folder: Path) -> int:
    """Free space where ``folder`` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
