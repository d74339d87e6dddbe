"""Proving a converted folder: its files by checksum, its content against the source.

Owns the questions "is this what the conversion wrote?" and "is that what the source holds?". The
second reads both sides in full: plain tensors and copied experts must be equal to the byte,
quantized ones as close as their profile allows.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.extents import MANIFEST, open_experts
from ..checkpoint.names import MlxTensor
from ..checkpoint.reader import NUMPY_DTYPES, TensorFile, TensorInfo
from ..errors import CheckpointError
from .blocks import Blocks, as_bytes, open_blocks
from .journal import check_finished
from .plan import Output, make_plan
from .profiles import Error, Profile, compare, to_mlx
from .source import Source, open_source

_CHUNK_BYTES = 8 * 2**20
# Hashing a file keeps one core busy; more readers than this only make the disk seek.
_WORKERS = min(4, os.cpu_count() or 1)


def verify(
    out: str | Path,
    *,
    against: str | Path | Source | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Check the converted folder ``out``, and compare it with its source if ``against`` is given.

    ``progress`` is called with bytes done, bytes in all and the file at hand.

    Returns:
        ``ok``, what was read, and ``problems``: one line each.

    Raises:
        CheckpointError: if ``out`` was not converted by mlx-k3 or is not finished, or if
            ``against`` is not a complete release.
    """
    out = Path(out)
    manifest = read_manifest(out)
    problems = check_files(out, manifest, progress)
    if manifest["experts"]["form"] == "reference":
        open_experts(out)
    report: dict[str, Any] = {
        "out": str(out),
        "files": len(manifest["files"]),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
    }
    if against is not None and not problems:
        source = open_source(against) if isinstance(against, (str, Path)) else against
        compared = Comparison(out, manifest, source)
        problems += compared.run(progress)
        report |= {
            "against": source.label,
            "tensors_equal": compared.equal,
            "tensors_within_bound": compared.close,
        }
    return {"ok": not problems, **report, "problems": problems}


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of the finished folder ``out``."""
    check_finished(out)
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        files = manifest["files"]
        words = (manifest["experts"]["form"], manifest["job"]["experts"], manifest["job"]["trunk"])
        well_formed = all(isinstance(word, str) for word in words) and all(
            isinstance(f["bytes"], int) and isinstance(f["sha256"], str) for f in files.values()
        )
    except FileNotFoundError:
        raise CheckpointError(f"{out}: no {MANIFEST}; was this converted by mlx-k3?") from None
    except OSError as e:
        raise CheckpointError(f"{out / MANIFEST}: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{out}: {MANIFEST} is damaged; convert it again")
    return manifest


def check_files(
    out: Path, manifest: dict[str, Any], progress: Callable[[int, int, str], None] | None
) -> list[str]:
    """Size and checksum of every file, and weight files that do not belong."""
    files = manifest["files"]
    total, done = sum(file["bytes"] for file in files.values()), 0

    def check(item: tuple[str, dict[str, Any]]) -> tuple[str, int, str | None]:
        name, file = item
        return name, file["bytes"], _check_file(out / name, file["bytes"], file["sha256"])

    problems = []
    with ThreadPoolExecutor(_WORKERS) as pool:
        for name, nbytes, problem in pool.map(check, files.items()):
            done += nbytes
            if progress:
                progress(done, total, name)
            if problem:
                problems.append(problem)
    for path in sorted(out.glob("model*.safetensors")):
        if path.name not in files:
            problems.append(
                f"{path.name} does not belong here, and loaders would read it; remove it"
            )
    return problems


def _check_file(path: Path, nbytes: int, sha256: str) -> str | None:
    try:
        size = path.stat().st_size
        if size != nbytes:
            return f"{path.name} has {size:,} bytes, must have {nbytes:,}"
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as e:
        return f"{path.name}: {e.strerror}"
    return None if digest.hexdigest() == sha256 else f"{path.name}: its bytes have changed (sha256)"


class Comparison:
    """A converted folder beside its source, tensor by tensor."""

    def __init__(self, out: Path, manifest: dict[str, Any], source: Source) -> None:
        """Plan the conversion of ``source`` again, with the options in ``manifest``."""
        job = manifest["job"]
        self._out = out
        self._source = source
        self._plan = make_plan(source, experts=job["experts"], trunk=job["trunk"])
        self.equal = 0
        self.close = 0

    def run(self, progress: Callable[[int, int, str], None] | None) -> list[str]:
        """One line for every file or tensor that is not what the source makes of it."""
        problems, done = [], 0
        for output in self._plan.outputs:
            problems.extend(self._compare(output))
            done += output.layout.file_bytes
            if progress:
                progress(done, self._plan.total_bytes, output.name)
        return problems

    def _compare(self, output: Output) -> Iterator[str]:
        path = self._out / output.name
        if not path.exists():
            yield f"{output.name} is missing: the source has other layers or experts"
            return
        with TensorFile(path) as file, open_blocks(self._source, self._plan, output) as blocks:
            if file.header.tensors != output.layout.tensors:
                yield f"{output.name}: its tensors are not those that the source would give"
                return
            for name, tensor in output.tensors.items():
                how = output.profiles.get(name)
                if how is None:
                    if self._is_equal(tensor, file, blocks):
                        self.equal += 1
                    else:
                        yield f"{output.name}: {name} differs from the source"
                    continue
                error = self._error(tensor, how, file, blocks)
                if error <= how.max_error:
                    self.close += 1
                else:
                    yield (
                        f"{output.name}: {name} is {error:.3g} off the source (relative); "
                        f"{how.name} allows {how.max_error}"
                    )

    @staticmethod
    def _is_equal(tensor: MlxTensor, file: TensorFile, blocks: Blocks) -> bool:
        position = file.header.tensors[tensor.name].offset
        for block in blocks.raw(tensor):
            stored = np.empty(len(block), np.uint8)
            file.read_into(as_bytes(stored), position)
            if not np.array_equal(stored, np.frombuffer(block, np.uint8)):
                return False
            position += len(block)
        return True

    @staticmethod
    def _error(tensor: MlxTensor, how: Profile, file: TensorFile, blocks: Blocks) -> float:
        dtype, total, row = blocks.dtype(tensor), Error(), 0
        names = [name for name, _ in how.stored(tensor, dtype)]
        for rows in blocks.rows(tensor):
            parts = [
                to_mlx(*_stored_rows(file, file.header.tensors[name], row, len(rows)))
                for name in names
            ]
            total.add(compare(to_mlx(rows, dtype), parts, how))
            row += len(rows)
        return total.relative


def _stored_rows(
    file: TensorFile, info: TensorInfo, first: int, count: int
) -> tuple[np.ndarray, str]:
    """Rows ``first`` to ``first + count`` of a stored tensor, and its dtype."""
    result = np.empty((count, info.shape[-1]), NUMPY_DTYPES[info.dtype])
    row_bytes = result.itemsize * info.shape[-1]
    file.read_into(as_bytes(result), info.offset + first * row_bytes)
    return result, info.dtype
