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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.names import MlxTensor
from ..checkpoint.writer import PARTIAL, write_file
from ..errors import BudgetError, CheckpointError, UnsupportedError
from ..units import format_bytes
from . import journal, package
from .blocks import Blocks, as_bytes, open_blocks
from .plan import NothingToDo, Output, Plan, make_plan
from .profiles import Error, Profile, quantize
from .source import FolderSource, Source, open_source

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
        with self._plain_errors():
            self._check()

    def _check(self) -> None:
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
            if package.is_here(self.out, self.job):
                raise CheckpointError(
                    f"{self.out} holds this conversion, but not all of it is intact; "
                    "delete the folder and convert again"
                )
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
        with self._plain_errors():
            self.out.mkdir(parents=True, exist_ok=True)
            book = journal.Journal(self.out, self.job)
            try:
                written = self._write_weights(book, progress)
                package.finish(self.out, self.source, self.plan, self.job, book.done)
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

            book.add(self._write(output, advance))
            for name in output.shards:
                uses[name] -= 1
            self._release(name for name in output.shards if not uses[name])
        return written

    def _release(self, names: Iterator[str]) -> None:
        for name in names:
            self.source.release(name)

    def _write(self, output: Output, advance: Callable[[int], None]) -> journal.Record:
        errors: dict[str, Error] = {}
        with open_blocks(self.source, self.plan, output) as blocks:
            path = self.out / output.name
            digest = write_file(path, _file(output, blocks, errors), advance)
        sums = {kind: [e.error, e.size] for kind, e in sorted(errors.items())}
        return journal.Record(output.name, output.layout.file_bytes, digest, sums)

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """A full or failing disk becomes one clear line."""
        try:
            yield
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


def _file(output: Output, blocks: Blocks, errors: dict[str, Error]) -> Iterator[memoryview | bytes]:
    """The bytes of an output file in order; what quantizing costs is added to ``errors``."""
    held: dict[str, np.ndarray] = {}
    yield output.layout.header
    for name in output.layout.tensors:
        if name in held:
            yield as_bytes(held.pop(name))
        elif how := output.profiles.get(name):
            yield from _quantized(output.tensors[name], how, blocks, held, errors)
        else:
            yield from blocks.raw(output.tensors[name])


def _quantized(
    tensor: MlxTensor,
    how: Profile,
    blocks: Blocks,
    held: dict[str, np.ndarray],
    errors: dict[str, Error],
) -> Iterator[memoryview]:
    """The quantized weight in blocks; its scales (and biases) are left in ``held``."""
    dtype = blocks.dtype(tensor)
    total = errors.setdefault(tensor.kind, Error())
    rest: list[list[np.ndarray]] = []
    for rows in blocks.rows(tensor):
        (weight, *parts), error = quantize(rows, dtype, how)
        total.add(error)
        rest.append(parts)
        yield as_bytes(weight)
    names = [name for name, _ in how.stored(tensor, dtype)][1:]
    for name, parts in zip(names, zip(*rest, strict=True), strict=True):
        held[name] = np.concatenate(parts)


def _free_bytes(out: Path) -> int:
    """Room for ``out`` on its disk, counting what an interrupted run left half written."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    leftovers = sum(path.stat().st_size for path in out.glob(f"*{PARTIAL}")) if out.exists() else 0
    return shutil.disk_usage(folder).free + leftovers
