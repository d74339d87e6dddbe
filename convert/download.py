"""One file of the Hub, from its first missing byte to the proof that it is intact.

Owns the partial file, the pieces in flight and the checksum. Knows nothing about connections
(``transfer.py``) or about which files a conversion needs (``hub.py``).

A file grows as ``NAME.part`` and gets its name when its checksum is right. Whatever a killed
process left in ``NAME.part`` is continued, not fetched again.
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .source import Progress
from .transfer import Range, Transfer

# One connection is bounded by its round-trip time; four pieces in flight are 256 MiB of memory.
CONNECTIONS = 4
PIECE_BYTES = 64 * 2**20
_HASH_BYTES = 2**20


@dataclass(frozen=True)
class Listed:
    """A file as the Hub lists it: its length, and its sha256 or, for a small file, git's sha1."""

    name: str
    commit: str
    size_bytes: int
    sha256: str | None
    blob_id: str

    def hasher(self):
        """A hash object for :meth:`matches`."""
        return hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size_bytes)

    def matches(self, digest) -> bool:
        """Whether ``digest``, a :meth:`hasher`, has seen exactly this file."""
        return digest.hexdigest() == (self.sha256 or self.blob_id)

    def is_intact(self, path: Path) -> bool:
        """Whether the file at ``path``, if there is one, is exactly this file."""
        if not path.is_file() or path.stat().st_size != self.size_bytes:
            return False
        digest = self.hasher()
        with open(path, "rb") as file:
            while chunk := file.read(_HASH_BYTES):
                digest.update(chunk)
        return self.matches(digest)

    def range(self, offset: int, nbytes: int) -> Range:
        """``nbytes`` of this file from ``offset`` on."""
        return Range(self.commit, self.name, self.size_bytes, offset, nbytes)


def part_of(path: Path) -> Path:
    """Where ``path`` grows until it is complete."""
    return path.with_name(f"{path.name}.part")


def download(
    transfer: Transfer, file: Listed, path: Path, progress: Progress | None = None
) -> None:
    """Bring ``file`` to ``path``; a damaged copy is fetched once more, from its start.

    Raises:
        CheckpointError: if the Hub does not deliver, or delivers damaged bytes twice.
        OSError: as writing does.
    """
    for _ in range(2):
        if _complete(transfer, file, part_of(path), progress):
            os.replace(part_of(path), path)
            return
        part_of(path).unlink()
    raise CheckpointError(
        f"{transfer.repo}: {file.name} came with a wrong checksum twice; run again later, or "
        "report it to the repository's owner"
    )


def _complete(transfer: Transfer, file: Listed, part: Path, progress: Progress | None) -> bool:
    """Append to ``part`` what it lacks. False if its bytes are not those of the listing."""
    lock = threading.Lock()
    here = 0

    def received(n: int) -> None:
        nonlocal here
        with lock:
            here += n
            if progress:
                progress(file.name, here, file.size_bytes)

    digest = file.hasher()
    with open(part, "ab+") as out:
        out.seek(0)
        while chunk := out.read(_HASH_BYTES):
            digest.update(chunk)
        received(min(out.tell(), file.size_bytes))
        # Closed at once when writing fails: the download must not go on behind the error.
        with closing(_pieces(transfer, file, here, received)) as pieces:
            for piece in pieces:
                out.write(piece)
                digest.update(piece)
    return file.matches(digest)


def _pieces(
    transfer: Transfer, file: Listed, start: int, received: Callable[[int], None]
) -> Iterator[bytearray]:
    """The bytes of ``file`` from ``start`` on, in order, a few pieces in flight at a time."""
    pool, stop = ThreadPoolExecutor(CONNECTIONS), threading.Event()
    flight: deque[Future[bytearray]] = deque()
    try:
        for offset in range(start, file.size_bytes, PIECE_BYTES):
            piece = file.range(offset, min(PIECE_BYTES, file.size_bytes - offset))
            flight.append(pool.submit(transfer.read, piece, received, stop))
            if len(flight) == CONNECTIONS:
                yield flight.popleft().result()
        while flight:
            yield flight.popleft().result()
    finally:
        # Reached early on an error or Ctrl-C: what is under way must not be waited for.
        stop.set()
        pool.shutdown(cancel_futures=True)
