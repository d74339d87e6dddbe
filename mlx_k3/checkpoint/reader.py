"""Reading safetensors files: a header taken on trust for nothing, then exact byte ranges.

Owns what a shard says about itself and whether its size agrees. Knows nothing about models.
Files are read with ``pread`` and never mapped: the tail of a mapped file that someone truncates
reads as zeros, and a model with zeros in it still speaks.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from .direct import DirectReader

# bfloat16 has no numpy dtype: its bits travel as uint16.
NUMPY_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F64": np.dtype("<f8"),
}
# The limit of the safetensors library itself; a larger claim is a damaged file.
MAX_HEADER_BYTES = 100_000_000
# Reads from this size on go past the page cache.
_DIRECT_BYTES = 2**20
# One system call never asks for more: macOS refuses 2^31 bytes and Linux returns short.
MAX_READ_BYTES = 2**30


class TensorInfo(NamedTuple):
    """Where one tensor lies; ``offset`` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A checked safetensors header. ``sha256`` covers the length field and the header text."""

    tensors: dict[str, TensorInfo]
    data_start: int
    file_bytes: int
    sha256: str


def header_end(first: bytes, file_bytes: int, label: str) -> int:
    """Offset of the first data byte, from the ``first`` eight bytes of a file.

    Raises:
        CheckpointError: if no header of that length can be in a file of ``file_bytes``.
    """
    if file_bytes < 8 or len(first) < 8:
        raise CheckpointError(f"{label} has {file_bytes} bytes, too few for a safetensors file")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{label} is not a safetensors file: its header claims {length:,} bytes"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{label} ends {8 + length - file_bytes:,} bytes early, inside its header; "
            "download it again"
        )
    return 8 + length


def parse_header(raw: bytes, file_bytes: int, label: str) -> Header:
    """The header in ``raw`` (length field and text), checked against the size of the file.

    Raises:
        CheckpointError: not JSON of the right form, an unknown dtype, offsets that overlap, leave
            holes or disagree with the shapes, or a file longer or shorter than its tensors.
    """
    data_start = header_end(raw[:8], file_bytes, label)
    try:
        entries = json.loads(raw[8:data_start].decode("utf-8"), object_pairs_hook=_unique)
    except _Duplicate as e:
        raise CheckpointError(f"{label}: its header names {e.args[0]!r} twice") from None
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{label}: its header is not valid JSON: {e}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{label}: its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _entry(name, entry, data_start, label) for name, entry in entries.items()}

    end = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            what = "overlaps another tensor" if info.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{label}: {name} {what}; the header is damaged")
        end += info.nbytes
    if end != file_bytes:
        short = f"ends {end - file_bytes:,} bytes early"
        long = f"is {file_bytes - end:,} bytes longer than its header says"
        raise CheckpointError(f"{label} {short if end > file_bytes else long}; download it again")
    return Header(tensors, data_start, file_bytes, hashlib.sha256(raw[:data_start]).hexdigest())


class _Duplicate(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _Duplicate(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return result


def _entry(name: str, entry: Any, data_start: int, label: str) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        well_formed = isinstance(shape, list) and all(
            type(n) is int and n >= 0 for n in (*shape, begin, end)
        )
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{label}: the header entry of {name} is malformed")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise CheckpointError(f"{label}: {name} has the unknown dtype {dtype!r}")
    nbytes = NUMPY_DTYPES[dtype].itemsize
    for n in shape:
        nbytes *= n
    if nbytes != end - begin:
        raise CheckpointError(
            f"{label}: {name} is {dtype} {shape}, {nbytes:,} bytes, but takes {end - begin:,}"
        )
    return TensorInfo(dtype, tuple(shape), data_start + begin, nbytes)


def read_header(path: str | Path) -> Header:
    """The checked header of the safetensors file at ``path``; see :func:`parse_header`."""
    with TensorFile(path) as file:
        return file.header


class TensorFile:
    """An open safetensors file whose header has been checked.

    >>> with TensorFile(path) as file:
    ...     weight = file.array("lm_head.weight")
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._direct: DirectReader | None = None
        try:
            self.fd = os.open(self.path, os.O_RDONLY)
        except OSError as e:
            raise CheckpointError(f"{self.path} cannot be read: {e.strerror}") from None
        try:
            size = os.fstat(self.fd).st_size
            end = header_end(os.pread(self.fd, 8, 0), size, str(self.path))
            raw = bytearray(end)
            self.read_into(memoryview(raw), 0)
            self.header = parse_header(bytes(raw), size, str(self.path))
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes at ``offset``; short reads are continued.

        Raises:
            CheckpointError: if the file ends first or cannot be read.
        """
        try:
            done = self._read_into(buffer, offset)
        except OSError as e:
            raise CheckpointError(f"{self.path} cannot be read: {e.strerror}") from e
        if done < len(buffer):
            raise CheckpointError(
                f"{self.path} ends {len(buffer) - done:,} bytes early; download it again"
            )

    def _read_into(self, buffer: memoryview, offset: int) -> int:
        done = 0
        if len(buffer) >= _DIRECT_BYTES:
            self._direct = self._direct or DirectReader(self.path)
            done = self._direct.read_into(buffer, offset)
        while done < len(buffer):
            n = os.preadv(self.fd, [buffer[done : done + MAX_READ_BYTES]], offset + done)
            if not n:
                break
            done += n
        return done

    def array(self, name: str) -> np.ndarray:
        """The whole tensor ``name`` as numpy (bfloat16 as uint16)."""
        info = self.header.tensors[name]
        result = np.empty(info.shape, NUMPY_DTYPES[info.dtype])
        if info.nbytes:
            self.read_into(memoryview(result.reshape(-1)).cast("B"), info.offset)
        return result

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._direct:
            self._direct.close()
            self._direct = None

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
