"""A recording of which experts were asked for and what was read for them.

Owns the file format, writing it while a model runs and reading it back. Draws no conclusions.

A file is one line of JSON, the header, then chunks: a tag, the length, zlib-compressed columns.
A chunk is written at once and at least every second, so a killed process leaves a file that reads
up to its last second. The chunk tagged ``E`` says that the recording was closed.
"""

import json
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import CheckpointError, K3Error

VERSION = 1
FLUSH_SECONDS = 0.5

# One call of a layer's router: tokens x k choices. Times are seconds since the file was opened.
CALL = np.dtype(
    [("position", "<u4"), ("layer", "<u2"), ("k", "<u2"), ("tokens", "<u4"), ("time", "<f8")]
)
# `call` is the latest call of a router when the event was recorded, -1 before the first.
READ = np.dtype(
    [
        ("call", "<i4"),
        ("layer", "<u2"),
        ("expert", "<u2"),
        ("kind", "u1"),
        ("nbytes", "<u8"),
        ("start", "<f8"),
        ("seconds", "<f4"),
    ]
)
STALL = np.dtype([("call", "<i4"), ("layer", "<u2"), ("seconds", "<f4")])
KINDS = ("demand", "prefetch", "hit", "drop")
"""What happened to an expert: read when asked for, read ahead, found in a slot, left out."""

_EXPERT, _WEIGHT = np.dtype("<u2"), np.dtype("<f2")
_CHUNK = struct.Struct("<cI")


class TraceWriter:
    """Records routing and reads into ``path``; for one thread, and cheap for it.

    A background thread compresses and writes. A full disk ends the recording, not the run: the
    calls go on and :meth:`close` raises.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        """Start a file. ``header`` needs ``expert_bytes``; ``slots`` and ``policy`` help.

        Raises:
            K3Error: the file cannot be written.
        """
        _check_header(header)
        self._path = path
        try:
            self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  # Open until close().
        except OSError as e:
            raise K3Error(f"{path}: cannot record a trace: {e.strerror}") from None
        self._error: OSError | None = None
        self._zero = time.perf_counter()
        self._count = 0
        self._lock = threading.Lock()
        self._start_batch()
        self._write(json.dumps({"mlx_k3_trace": VERSION, **header}).encode() + b"\n")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._flush_often, name="trace", daemon=True)
        self._thread.start()

    def route(self, position: int, layer: int, experts: np.ndarray, weights: np.ndarray) -> None:
        """A router's choice: experts and weights [tokens, k]; ``position`` is the first token's.

        Call it before the reads that it causes. More than one token is a step of prefill.
        """
        if experts.shape != weights.shape or experts.ndim != 2:
            raise ValueError(f"experts {experts.shape} and weights {weights.shape}: no [tokens, k]")
        tokens, k = experts.shape
        now = time.perf_counter() - self._zero
        # Copies: the arrays may be MLX's own memory.
        experts, weights = np.array(experts, _EXPERT), np.array(weights, _WEIGHT)
        with self._lock:
            self._calls.append((position, layer, k, tokens, now))
            self._experts.append(experts)
            self._weights.append(weights)
            self._count += 1

    def io(
        self, layer: int, expert: int, nbytes: int, kind: str, start: float, seconds: float
    ) -> None:
        """One of :data:`KINDS` for an expert; ``start`` is a ``time.perf_counter()``."""
        row = (layer, expert, KINDS.index(kind), nbytes, start - self._zero, seconds)
        with self._lock:
            self._reads.append((self._count - 1, *row))

    def stall(self, layer: int, seconds: float) -> None:
        """The model waited this long for a layer's experts."""
        with self._lock:
            self._stalls.append((self._count - 1, layer, seconds))

    def close(self) -> None:
        """Write what is left.

        Raises:
            K3Error: something could not be written; the file reads up to there.
        """
        if self._file.closed:
            return
        self._closing.set()
        self._thread.join()
        self._flush()
        self._write(_chunk(b"E", b""))
        try:
            self._file.close()
        except OSError as e:
            self._error = self._error or e
        if self._error:
            raise K3Error(f"{self._path}: the trace is cut short: {self._error.strerror}")

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start_batch(self) -> None:
        self._calls: list[tuple] = []
        self._experts: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._reads: list[tuple] = []
        self._stalls: list[tuple] = []

    def _flush_often(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            calls, experts, weights = self._calls, self._experts, self._weights
            reads, stalls = self._reads, self._stalls
            self._start_batch()
        chunks = b""
        if calls:
            flat = b"".join(a.tobytes() for a in experts) + b"".join(a.tobytes() for a in weights)
            chunks += _chunk(b"C", struct.pack("<I", len(calls)) + _columns(calls, CALL) + flat)
        if reads:
            chunks += _chunk(b"R", _columns(reads, READ))
        if stalls:
            chunks += _chunk(b"S", _columns(stalls, STALL))
        if chunks:
            self._write(chunks)

    def _write(self, data: bytes) -> None:
        if self._error:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as e:
            self._error = e


@dataclass(frozen=True)
class Trace:
    """A recording: :data:`CALL`, :data:`READ` and :data:`STALL` rows in the order of events."""

    header: dict[str, Any]
    calls: np.ndarray
    experts: np.ndarray
    """[choices] uint16, those of all calls one after another: see :attr:`offsets`."""
    weights: np.ndarray
    """[choices] float16."""
    reads: np.ndarray
    stalls: np.ndarray
    closed: bool
    """False where the recording process was killed."""

    @cached_property
    def offsets(self) -> np.ndarray:
        """[calls + 1]: call ``i`` chose ``experts[offsets[i]:offsets[i + 1]]``."""
        sizes = self.calls["tokens"].astype(np.int64) * self.calls["k"]
        return np.concatenate([[0], np.cumsum(sizes)])

    def choices(self, call: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts and weights [tokens, k] of one call."""
        span, shape = slice(*self.offsets[call : call + 2]), (-1, int(self.calls["k"][call]))
        return self.experts[span].reshape(shape), self.weights[span].reshape(shape)


def read_trace(path: str | Path) -> Trace:
    """Read a recording, also an unfinished one.

    Raises:
        CheckpointError: no such file, not a trace, or damaged before its end.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror}") from None
    header, at = _read_header(path, data)
    parts: dict[bytes, list[bytes]] = {b"C": [], b"R": [], b"S": [], b"E": []}
    while at + _CHUNK.size <= len(data):
        tag, nbytes = _CHUNK.unpack_from(data, at)
        payload = data[at + _CHUNK.size : at + _CHUNK.size + nbytes]
        if tag in parts and len(payload) < nbytes:
            break  # Killed while writing.
        try:
            parts[tag].append(zlib.decompress(payload))
        except (KeyError, zlib.error):
            raise CheckpointError(f"{path}: damaged at byte {at:,}; record it again") from None
        at += _CHUNK.size + nbytes
    calls, experts, weights = _split_calls(parts[b"C"])
    return Trace(
        header=header,
        calls=_join(calls, CALL),
        experts=_join(experts, _EXPERT),
        weights=_join(weights, _WEIGHT),
        reads=_join([_rows(part, READ) for part in parts[b"R"]], READ),
        stalls=_join([_rows(part, STALL) for part in parts[b"S"]], STALL),
        closed=bool(parts[b"E"]),
    )


def _check_header(header: Any) -> None:
    size, slots = header.get("expert_bytes"), header.get("slots", 0)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"expert_bytes is {size!r}")
    if slots is not None and (not isinstance(slots, int) or slots < 1):
        raise ValueError(f"slots is {slots!r}")


def _read_header(path: str | Path, data: bytes) -> tuple[dict[str, Any], int]:
    line, newline, _ = data.partition(b"\n")
    try:
        header = json.loads(line)
        version = header.pop("mlx_k3_trace")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is not a trace; `--trace FILE` records one") from None
    if version != VERSION:
        raise CheckpointError(f"{path} is of trace version {version}; this reads {VERSION}")
    try:
        _check_header(header)
    except ValueError as e:
        raise CheckpointError(f"{path}: damaged header: {e}") from None
    return header, len(line) + len(newline)


def _chunk(tag: bytes, payload: bytes) -> bytes:
    packed = zlib.compress(payload, 1)
    return _CHUNK.pack(tag, len(packed)) + packed


def _columns(rows: Sequence[tuple], kind: np.dtype) -> bytes:
    """Column by column, which compresses to about half of what rows do."""
    table = np.array(rows, kind)
    return b"".join(table[name].tobytes() for name in kind.names)


def _rows(payload: bytes, kind: np.dtype, count: int | None = None) -> np.ndarray:
    """The inverse of :func:`_columns`; ``count`` rows, or as many as there are."""
    table = np.empty(len(payload) // kind.itemsize if count is None else count, kind)
    at = 0
    for name in kind.names:
        table[name] = np.frombuffer(payload, kind[name], len(table), at)
        at += len(table) * kind[name].itemsize
    return table


def _split_calls(payloads: list[bytes]) -> tuple[list, list, list]:
    """Call rows, experts and weights of each chunk."""
    calls, experts, weights = [], [], []
    for payload in payloads:
        (count,) = struct.unpack_from("<I", payload)
        table = _rows(payload[4:], CALL, count)
        at = 4 + table.nbytes
        choices = (len(payload) - at) // (_EXPERT.itemsize + _WEIGHT.itemsize)
        calls.append(table)
        experts.append(np.frombuffer(payload, _EXPERT, choices, at))
        weights.append(np.frombuffer(payload, _WEIGHT, choices, at + choices * _EXPERT.itemsize))
    return calls, experts, weights


def _join(parts: list[np.ndarray], kind: np.dtype) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, kind)
