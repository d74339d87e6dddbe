"""The journal of a conversion: which files are done, and the lock that keeps others out.

``.mlx_k3-journal.jsonl`` lies in the output folder while a conversion is unfinished. Its first
line says what is being converted, every further line records one finished file. A line is on the
disk before the next file is begun; a line torn by a crash is dropped. The file is also the lock.
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.writer import PARTIAL, sync_folder
from ..errors import CheckpointError

NAME = ".mlx_k3-journal.jsonl"


@dataclass(frozen=True)
class Record:
    """One finished file. ``errors`` is what quantizing cost: kind -> [error, size], squared."""

    file: str
    nbytes: int
    sha256: str
    errors: dict[str, list[float]] = field(default_factory=dict)


def read(out: Path) -> tuple[dict[str, Any] | None, dict[str, Record], int]:
    """The job an unfinished conversion in ``out`` is about, its intact files, the valid length.

    A file whose size is not what the journal says does not count as done.
    """
    job, records, end = None, {}, 0
    try:
        raw = (out / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None, {}, 0
    for line in raw.splitlines(keepends=True):
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
            if not isinstance(entry, dict):
                break
            if job is None:
                job = entry
            else:
                record = Record(**entry)
                records[record.file] = record
        except (ValueError, TypeError):
            break
        end += len(line)
    done = {name: r for name, r in records.items() if _size(out / name) == r.nbytes}
    return job, done, end


def check_finished(out: Path) -> None:
    """Refuse a folder with an unfinished conversion.

    Raises:
        CheckpointError: if there is one in ``out``.
    """
    if (out / NAME).exists():
        raise CheckpointError(f"{out}: the conversion is not finished; run the same command again")


class Journal:
    """The open, locked journal of one conversion."""

    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        """Begin or continue ``job`` in the folder ``out``, which must exist.

        Raises:
            CheckpointError: if another process is converting into ``out``, or what is there
                belongs to another job.
        """
        self._path = out / NAME
        self._fd = self._lock()
        try:
            found, self.done, end = read(out)
            if found is not None and found != job:
                raise CheckpointError(f"{out}: {_difference(found, job)}")
            os.ftruncate(self._fd, end)
            for leftover in out.glob(f"*{PARTIAL}"):
                leftover.unlink()
            if found is None:
                self._append(job)
                sync_folder(out)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A process that has just finished may have removed the file we opened.
                if os.fstat(fd).st_ino == os.stat(self._path).st_ino:
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise CheckpointError(
                    f"{self._path.parent}: another process is converting into this folder; "
                    "wait for it or choose another"
                ) from None
            except FileNotFoundError:
                pass
            os.close(fd)

    def add(self, record: Record) -> None:
        """Record a finished file, durably."""
        self._append(asdict(record))
        self.done[record.file] = record

    def _append(self, entry: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")
        os.fsync(self._fd)

    def remove(self) -> None:
        """The conversion is complete: delete the journal and give up the lock."""
        os.unlink(self._path)
        sync_folder(self._path.parent)
        self.close()

    def close(self) -> None:
        """Give up the lock; closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _difference(found: dict[str, Any], job: dict[str, Any]) -> str:
    for key in ("source", "experts", "trunk"):
        if found.get(key) != job[key]:
            return (
                f"an unfinished conversion with {key} {found.get(key)} is here, not {job[key]}; "
                "finish that one, or choose another folder"
            )
    return "an unfinished conversion of a source that has changed since is here; start afresh"
