"""Carrying out a conversion: one output file at a time, in flat memory, resumable at any point.

Owns the order of things on the disk: weight files (each by rename, then its line in the journal),
then the small files, ``config.json`` last, then the journal goes. A folder without ``config.json``
is not a model, so nobody loads an unfinished one.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.names import MlxTensor, ReleaseTensor
from ..checkpoint.reader import NUMPY_DTYPES, TensorFile, TensorInfo
from ..checkpoint.writer import IN_FLIGHT, PARTIAL, tensor_bytes, write_file
from ..errors import BudgetError, CheckpointError, UnsupportedError
from ..units import format_bytes
from . import journal, package
from .plan import NothingToDo, Output, Plan, make_plan
from .profiles import Error, Profile, quantize
from .source import FolderSource, Source, open_source

BLOCK_BYTES = 8 * 2**20
# Source bytes that are quantized at once: large enough for the device, small enough for memory.
QUANTIZE_BYTES = 32 * 2**20

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all and the file at hand."""


def convert(
    src: str | Path | Source,
    out: str | Path,
    *,
    experts: str = "copy",
    trunk: str = "q8",
    revision: str | None = None,
    free_source: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Convert the release ``src`` to an MLX folder ``out``; continues an interrupted conversion.

    Args:
        src: a folder, a Hub id, or an open source.
        experts: ``copy`` them stacked, byte for byte; ``reference`` leaves them in ``src``;
            ``mxfp4`` quantizes experts that are bfloat16.
        trunk: ``bf16`` (as it is), ``mxfp8``, ``q8``, ``q6`` or ``q4``.
        revision: of a Hub id.
        free_source: delete downloaded shards as they are used up.

    Returns:
        The report: what was written, how fast, and what quantizing cost, by kind of tensor.

    Raises:
        NothingToDo: ``src`` is in MLX form, or ``out`` holds this very conversion, complete.
        K3Error: anything that can be refused, before a byte is written; a full disk.
    """
    conversion = open_conversion(
        src,
        out,
        experts=experts,
        trunk=trunk,
        revision=revision,
        free_source=free_source,
    )
    return conversion.run(progress)


def open_conversion(
    src: str | Path | Source,
    out: str | Path,
    *,
    experts: str = "copy",
    trunk: str = "q8",
    revision: str | None = None,
    free_source: bool = False,
) -> "Conversion":
    """Plan a conversion without carrying it out; arguments and errors as for :func:`convert`."""
    out = Path(out)
    source = src
    if isinstance(src, (str, Path)):
        staging = out.with_name(out.name + ".source")
        source = open_source(src, revision=revision, free_source=free_source, staging=staging)
    plan = make_plan(source, experts=experts, trunk=trunk)
    return Conversion(source, plan, out)


@dataclass
class Conversion:
    """A plan, and the folder it is carried out in."""

    source: Source
    plan: Plan
    out: Path

    def check(self) -> None:
        """Everything that can be refused before ``out`` is touched.

        Raises:
            NothingToDo: the very same conversion is complete already.
            CheckpointError: ``out`` is the source, holds other files, or another conversion.
            BudgetError: the disk has too little room.
            UnsupportedError: experts cannot stay where they are, on the Hub.
        """
        folder = isinstance(self.source, FolderSource)
        if self.plan.experts == "reference" and not folder:
            raise UnsupportedError(
                f"--experts reference: {self.source.label} is not a folder; download it first"
            )
        if self.out.exists() and not self.out.is_dir():
            raise CheckpointError(f"{self.out} is a file; choose a folder")
        if folder and self.out.exists() and os.path.samefile(self.out, self.source.label):
            raise CheckpointError(f"{self.out} is the source itself; choose another folder")
        found, done, _ = journal.read(self.out)
        if found is None and self.out.exists():
            if package.is_complete(self.out, self.job):
                raise NothingToDo(f"{self.out} holds this conversion already, complete")
            if foreign := sorted(p.name for p in self.out.iterdir() if p.name != journal.NAME):
                raise CheckpointError(
                    f"{self.out} is not empty ({foreign[0]}, ...); choose an empty folder"
                )
        self._check_space(done)

    def _check_space(self, done: dict[str, journal.Record]) -> None:
        needed = self.plan.total_bytes - sum(r.nbytes for r in done.values())
        # What is downloaded lies beside the output.
        pending = [output.shards for output in self.plan.outputs if output.name not in done]
        needed += self.source.room_bytes(pending)
        if (missing := needed - _free_bytes(self.out)) > 0:
            raise BudgetError(
                f"{self.out}: {format_bytes(needed)} to write, {format_bytes(missing)} more than "
                "the disk has room for; make room or choose another disk"
            )

    @property
    def job(self) -> dict[str, Any]:
        """What the journal and the manifest say is being converted, to tell jobs apart."""
        plan = self.plan
        shape = hashlib.sha256()
        for name, header in sorted(plan.checkpoint.headers.items()):
            shape.update(f"{name} {header.file_bytes} {header.sha256}\n".encode())
        label, commit = self.source.label, getattr(self.source, "commit", None)
        return {
            "format": package.FORMAT,
            "source": f"{label}@{commit}" if commit else os.path.realpath(label),
            "experts": plan.experts,
            "trunk": plan.trunk.name,
            "headers": shape.hexdigest(),
        }

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Carry the plan out; see :func:`convert`."""
        self.check()
        started = time.perf_counter()
        self.out.mkdir(parents=True, exist_ok=True)
        book = journal.Journal(self.out, self.job)
        try:
            written = self._write_weights(book, progress)
            self._guard(
                lambda: package.finish(self.out, self.source, self.plan, self.job, book.done)
            )
            book.remove()
            self.source.close()
        finally:
            book.close()
        seconds = time.perf_counter() - started
        return {
            "out": str(self.out),
            **package.report(self.plan, book.done),
            "written_bytes": written,
            "seconds": round(seconds, 3),
        }

    def _write_weights(self, book: journal.Journal, progress: Progress | None) -> int:
        outputs, total = self.plan.outputs, self.plan.total_bytes
        pending = [output for output in outputs if output.name not in book.done]
        if pending and (self.out / "config.json").exists():
            # A finished file has gone missing since: the folder is not a model any more.
            (self.out / "config.json").unlink()
        uses = {
            name: sum(name in o.shards for o in pending) for name in self.plan.checkpoint.headers
        }
        self._release(name for name, count in uses.items() if not count)
        ahead = total - sum(output.layout.file_bytes for output in pending)
        written = 0

        def downloading(name: str, here: int, size: int) -> None:
            if progress and here < size:
                share = f"{format_bytes(here)} of {format_bytes(size)}"
                progress(ahead + written, total, f"downloading {name}, {share}")

        self.source.progress = downloading
        for output in pending:

            def advance(nbytes: int, output: Output = output) -> None:
                nonlocal written
                written += nbytes
                if progress:
                    progress(ahead + written, total, output.name)

            book.add(self._guard(lambda output=output: self._write(output, advance)))
            for name in output.shards:
                uses[name] -= 1
            self._release(name for name in output.shards if not uses[name])
        return written

    def _release(self, names: Iterator[str]) -> None:
        for name in names:
            self.source.release(name)

    def _write(self, output: Output, advance: Callable[[int], None]) -> journal.Record:
        errors: dict[str, Error] = {}
        with ExitStack() as stack:
            files = {name: stack.enter_context(self._open(name, output)) for name in output.shards}
            blocks = _Blocks(self.plan, output, files, errors)
            digest = write_file(self.out / output.name, blocks, advance)
        sums = {kind: [e.error, e.size] for kind, e in sorted(errors.items())}
        return journal.Record(output.name, output.layout.file_bytes, digest, sums)

    def _open(self, name: str, output: Output) -> TensorFile:
        file = TensorFile(self.source.fetch(name))
        if file.header.sha256 != self.plan.checkpoint.headers[name].sha256:
            file.close()
            raise CheckpointError(f"{self.source.label}: {name} changed during the conversion")
        return file

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Run ``action``; a full or failing disk becomes one clear line."""
        try:
            return action()
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(f"{e.filename or self.out}: {e.strerror}") from e
            done = sum(r.nbytes for r in journal.read(self.out)[1].values())
            needed = self.plan.total_bytes - done
            missing = max(needed - _free_bytes(self.out), 0)
            raise BudgetError(
                f"{self.out}: the disk is full; make room for {format_bytes(missing)} more "
                f"({format_bytes(needed)} left to write) and run the same command again"
            ) from None


class _Blocks:
    """The bytes of one output file, in order: iterate once."""

    def __init__(
        self, plan: Plan, output: Output, files: dict[str, TensorFile], errors: dict[str, Error]
    ) -> None:
        self._plan = plan
        self._output = output
        self._files = files
        self._errors = errors
        # The writer may hold IN_FLIGHT blocks while one more is filled.
        self._buffers = cycle([_buffer(BLOCK_BYTES) for _ in range(IN_FLIGHT + 1)])

    def __iter__(self) -> Iterator[memoryview | bytes]:
        held: dict[str, np.ndarray] = {}
        yield self._output.layout.header
        for name in self._output.layout.tensors:
            if name in held:
                yield _bytes_of(held.pop(name))
                continue
            tensor = self._output.tensors[name]
            if how := self._output.profiles.get(name):
                yield from self._quantized(tensor, how, held)
            elif tensor.op in ("join", "a_log"):
                yield from self._joined(tensor, self._buffers)
            else:
                yield _bytes_of(self._half_of_kv_b(tensor))

    def _dtype(self, tensor: MlxTensor) -> str:
        return self._plan.checkpoint.info(tensor.sources[0].name).dtype

    def _joined(self, tensor: MlxTensor, buffers: Iterator[memoryview]) -> Iterator[memoryview]:
        """The sources' bytes one after the other, filling ``buffers`` in turn.

        ``a_log`` ends at the last head: what follows there is padding.
        """
        left = tensor_bytes(tensor.dtype or self._dtype(tensor), tensor.shape)
        buffer, filled = next(buffers), 0
        for source in tensor.sources:
            file, info = self._find(source)
            position, end = info.offset, info.offset + min(info.nbytes, left)
            left -= end - position
            while position < end:
                # A buffer taken from the cycle and not yielded would shorten the writer's grace.
                if filled == len(buffer):
                    yield buffer
                    buffer, filled = next(buffers), 0
                n = min(end - position, len(buffer) - filled)
                file.read_into(buffer[filled : filled + n], position)
                position, filled = position + n, filled + n
        if filled:
            yield buffer[:filled]

    def _find(self, source: ReleaseTensor) -> tuple[TensorFile, TensorInfo]:
        checkpoint = self._plan.checkpoint
        return self._files[checkpoint.files[source.name]], checkpoint.info(source.name)

    def _half_of_kv_b(self, tensor: MlxTensor) -> np.ndarray:
        """``kv_b_proj`` [H * (nope + value), rank] -> ``embed_q`` or ``unembed_out``."""
        file, _ = self._find(tensor.sources[0])
        weight = file.array(tensor.sources[0].name)
        heads, nope = self._plan.config.num_attention_heads, self._plan.config.qk_nope_head_dim
        weight = weight.reshape(heads, -1, weight.shape[-1])
        if tensor.op == "embed_q":
            return np.ascontiguousarray(weight[:, :nope].swapaxes(1, 2))
        return np.ascontiguousarray(weight[:, nope:])

    def _quantized(
        self, tensor: MlxTensor, how: Profile, held: dict[str, np.ndarray]
    ) -> Iterator[memoryview]:
        """The quantized weight in blocks; its scales (and biases) are left in ``held``."""
        dtype, width = self._dtype(tensor), tensor.shape[-1]
        total = self._errors.setdefault(tensor.kind, Error())
        rest: list[list[np.ndarray]] = []
        for rows in self._rows(tensor, dtype, width):
            (weight, *parts), error = quantize(rows, dtype, how)
            total.add(error)
            rest.append(parts)
            yield _bytes_of(weight)
        names = [name for name, _ in how.stored(tensor, dtype)][1:]
        for name, parts in zip(names, zip(*rest, strict=True), strict=True):
            held[name] = np.concatenate(parts)

    def _rows(self, tensor: MlxTensor, dtype: str, width: int) -> Iterator[np.ndarray]:
        """The weight as [rows, width], some rows at a time."""
        if tensor.op != "join":
            yield self._half_of_kv_b(tensor).reshape(-1, width)
            return
        row_bytes = width * NUMPY_DTYPES[dtype].itemsize
        buffer = _buffer(max(QUANTIZE_BYTES // row_bytes, 1) * row_bytes)
        # Quantizing copies the block before the next one is read: one buffer will do.
        for block in self._joined(tensor, repeat(buffer)):
            yield np.frombuffer(block, NUMPY_DTYPES[dtype]).reshape(-1, width)


def _buffer(nbytes: int) -> memoryview:
    # numpy leaves fresh memory untouched: a large buffer costs nothing until it is used.
    return memoryview(np.empty(nbytes, np.uint8))


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B")


def _free_bytes(out: Path) -> int:
    """Room for ``out`` on its disk, counting what an interrupted run left half written."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    leftovers = sum(path.stat().st_size for path in out.glob(f"*{PARTIAL}")) if out.exists() else 0
    return shutil.disk_usage(folder).free + leftovers
