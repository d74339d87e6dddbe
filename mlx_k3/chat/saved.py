"""Conversations on the disk: a JSON file each, and the folder of those that have a name.

Knows what a file must look like, not what is in the messages, and no model.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import K3Error
from ..files import replace_file

FORMAT = 1
_NAME = re.compile(r"\w[\w .-]{0,99}")
_SUFFIX = ".json"


def write_saved(path: Path, saved: dict[str, Any]) -> None:
    """Write a conversation in place of what was there, at once or not at all.

    Raises:
        K3Error: the file cannot be written.
    """
    text = json.dumps({"format": FORMAT, **saved}, ensure_ascii=False, indent=2) + "\n"
    try:
        replace_file(path.resolve(), text.encode())
    except OSError as e:
        raise K3Error(f"{path}: {e.strerror}") from None


def read_saved(path: Path) -> dict[str, Any]:
    """A conversation, with a list of ``messages``.

    Raises:
        K3Error: no such file, or not a saved conversation.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise K3Error(f"{path}: {e.strerror}") from None
    except ValueError:
        raise K3Error(f"{path} is not valid JSON; /save writes what /load reads") from None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise K3Error(f"{path} is not a saved conversation of format {FORMAT}")
    if not isinstance(saved.get("messages"), list):
        raise K3Error(f"{path} has no list of messages")
    return saved


@dataclass(frozen=True)
class NamedSession:
    """A conversation with a name. ``states`` are keys in the prompt cache, if it has them still."""

    name: str
    messages: int
    nbytes: int
    saved_at: float
    states: tuple[str, ...]


class NamedSessions:
    """The conversations in ``folder``."""

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, name: str) -> Path:
        """Where the conversation ``name`` is, or will be when it is saved.

        Raises:
            K3Error: that is no name.
        """
        if not _NAME.fullmatch(name):
            raise K3Error(
                f"{name!r} cannot name a session; use letters, digits, spaces, '.', '-' and '_'"
            )
        return self._folder / f"{name}{_SUFFIX}"

    def existing(self, name: str) -> Path:
        """Where the conversation ``name`` is.

        Raises:
            K3Error: there is none.
        """
        path = self.path(name)
        if not path.is_file():
            raise K3Error(f"there is no session {name!r}; mlx-k3 sessions lists those there are")
        return path

    def make_folder(self) -> None:
        """Have a folder to save into, for nobody else to read.

        Raises:
            K3Error: it cannot be made.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise K3Error(f"{self._folder}: {e.strerror}") from None

    def __iter__(self) -> Iterator[NamedSession]:
        """All that can be read, the last saved first."""
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                saved, status = read_saved(path), path.stat()
            except (K3Error, FileNotFoundError):
                continue
            states = saved.get("states", [])
            states = tuple(str(key) for key in states) if isinstance(states, list) else ()
            messages = len(saved["messages"])
            found.append(NamedSession(path.stem, messages, status.st_size, status.st_mtime, states))
        yield from sorted(found, key=lambda session: -session.saved_at)

    def delete(self, name: str) -> None:
        """Delete the conversation ``name``.

        Raises:
            K3Error: there is none, or it cannot be deleted.
        """
        path = self.existing(name)
        try:
            path.unlink()
        except OSError as e:
            raise K3Error(f"{path}: {e.strerror}") from None


def is_name(text: str) -> bool:
    """Whether ``text`` is meant as a session's name, not as a file."""
    return "/" not in text and os.sep not in text and not text.endswith(_SUFFIX)
