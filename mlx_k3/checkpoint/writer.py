"""Writing safetensors files: layout known in advance, bytes streamed, appearance by rename.

Owns the file format's writing side and the pipeline that hashes and writes one block while the
next is being produced. Knows nothing about where the bytes come from.
"""

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .direct import DirectWriter
from .reader import NUMPY_DTYPES, TensorInfo

# Data begin on a page of Apple silicon, so that aligned tensors can be read without the cache.
ALIGNMENT = 16384
# Blocks that may be hashed or written while the next is produced.
IN_FLIGHT = 3
PARTIAL = ".partial"


class Layout:
    """Where each tensor of a file will lie, and the header that says so.

    Tensors come in the order given, which should be by falling item size (each is then aligned
    to its item size, as the safetensors library does it): see :func:`by_alignment`.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[str, tuple[int, ...]]], alignment: int = ALIGNMENT
    ) -> None:
        """``tensors`` maps a name to its dtype (as safetensors spells it) and shape.

        The data begin at a multiple of ``alignment``.
        """
        offset, entries, sizes = 0, {}, {}
        for name, (dtype, shape) in tensors.items():
            sizes[name] = tensor_bytes(dtype, shape)
            entries[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [offset, offset + sizes[name]],
            }
            offset += sizes[name]
        text = json.dumps({"__metadata__": {"format": "mlx"}, **entries}, separators=(",", ":"))
        raw = text.encode()
        start = -(-(8 + len(raw)) // alignment) * alignment
        self.header = (start - 8).to_bytes(8, "little") + raw.ljust(start - 8)
        self.data_bytes = offset
        self.file_bytes = start + offset
        self.tensors = {
            name: TensorInfo(
                e["dtype"], tuple(e["shape"]), start + e["data_offsets"][0], sizes[name]
            )
            for name, e in entries.items()
        }


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor; ``dtype`` as safetensors spells it."""
    nbytes = NUMPY_DTYPES[dtype].itemsize
    for n in shape:
        nbytes *= n
    return nbytes


def by_alignment(item: tuple[str, tuple[str, tuple[int, ...]]]) -> int:
    """Sort key of ``(name, (dtype, shape))`` that keeps every tensor aligned to its items."""
    return -NUMPY_DTYPES[item[1][0]].itemsize


def write_file(
    path: Path,
    blocks: Iterable[memoryview | bytes],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Write ``blocks`` to ``path``, which appears complete or not at all; returns its sha256.

    A block must stay untouched until :data:`IN_FLIGHT` more have been taken: a producer may cycle
    through ``IN_FLIGHT + 1`` buffers. The file is on the disk, not just in the system's cache,
    when it gets its name. ``progress`` is told of bytes as they are taken.

    Raises:
        OSError: as writing does, ENOSPC among them; nothing is left then.
    """
    partial = path.with_name(path.name + PARTIAL)
    digest = hashlib.sha256()
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as writer:
            file = DirectWriter(fd)
            pending: deque[tuple[Future, Future]] = deque()
            for block in blocks:
                pending.append(
                    (hasher.submit(digest.update, block), writer.submit(file.write, block))
                )
                progress(len(block))
                if len(pending) == IN_FLIGHT + 1:
                    _wait(pending.popleft())
            for futures in pending:
                _wait(futures)
        os.fsync(fd)
        os.rename(partial, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    finally:
        os.close(fd)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames and removals in ``folder`` survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _wait(futures: tuple[Future, Future]) -> None:
    for future in futures:
        future.result()
