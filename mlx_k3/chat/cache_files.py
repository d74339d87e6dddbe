"""One node of the prompt cache as a file: it appears whole or not at all, and tells when damaged.

A file is a plain safetensors file whose last tensor, ``sha256``, digests all before it and a seal
that says what the file has to be. Knows nothing of trees and budgets.
"""

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path

import mlx.core as mx

from ..checkpoint.direct import DirectWriter
from ..checkpoint.reader import TensorFile
from ..checkpoint.writer import PARTIAL, Layout, by_alignment, sync_folder
from ..errors import CheckpointError
from .cache_parts import Arrays

_CHECKSUM = "sha256"
_DTYPES = {
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_arrays(path: Path, seal: str, arrays: Arrays) -> int:
    """Write evaluated ``arrays`` to ``path``; how many bytes the file has.

    Raises:
        OSError: as writing does. Nothing is left then.
    """
    tensors = {name: (_NAMES[x.dtype], tuple(x.shape)) for name, x in arrays.items()}
    layout = Layout(dict(sorted(tensors.items(), key=by_alignment)) | {_CHECKSUM: ("U8", (32,))})
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # Says that someone is at work on it.
        digest, file = _begin(seal, hashlib.sha256(layout.header).hexdigest()), DirectWriter(fd)
        file.write(layout.header)
        for name in layout.tensors:
            if name != _CHECKSUM:
                data = _bytes(arrays[name])
                digest.update(data)
                file.write(data)
        file.write(digest.digest())
        os.fsync(fd)
        os.rename(partial, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    finally:
        os.close(fd)
    return layout.file_bytes


def read_arrays(path: Path, seal: str) -> Arrays:
    """The arrays in ``path``.

    Raises:
        CheckpointError: the file is damaged, or was written under another seal.
    """
    arrays: Arrays = {}
    with TensorFile(path) as file:
        digest = _begin(seal, file.header.sha256)
        tensors = sorted(file.header.tensors.items(), key=lambda item: item[1].offset)
        if not tensors or tensors[-1][0] != _CHECKSUM:
            raise CheckpointError(f"{path} has no checksum at its end")
        for name, info in tensors[:-1]:
            if info.dtype not in _DTYPES:
                raise CheckpointError(f"{path}: {name} has the dtype {info.dtype}")
            arrays[name] = mx.zeros(info.shape, _DTYPES[info.dtype])
            mx.eval(arrays[name])
            # The array's own memory: nothing else refers to it yet.
            data = _bytes(arrays[name])
            file.read_into(data, info.offset)
            digest.update(data)
        if bytes(file.array(_CHECKSUM)) != digest.digest():
            raise CheckpointError(f"{path} does not match its checksum")
    return arrays


def is_abandoned(partial: Path) -> bool:
    """Whether whoever wrote this unfinished file is gone.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _begin(seal: str, header_sha256: str) -> "hashlib._Hash":
    return hashlib.sha256(f"{seal} {header_sha256} ".encode())


def _bytes(array: mx.array) -> memoryview:
    # memoryview knows no bfloat16.
    view = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(view)
    return memoryview(view).cast("B")
