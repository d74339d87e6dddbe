"""A whole checkpoint: which tensor lies in which file, from the index and every shard's header.

Owns the question "is this folder complete and consistent?". Knows nothing about what the tensors
mean. Reads only headers, through anything with ``files()`` and ``read()``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError
from .reader import Header, TensorInfo, header_end, parse_header

INDEX = "model.safetensors.index.json"


class Readable(Protocol):
    """The part of a source that this module needs."""

    label: str

    def files(self) -> dict[str, int]:
        """Every file: name -> size in bytes."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """A range of one file."""


class LocalFolder:
    """A folder of this machine as a :class:`Readable`; for folders that the user made or trusts."""

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self._folder = folder

    def files(self) -> dict[str, int]:
        """The files of the folder itself."""
        if not self._folder.is_dir():
            raise CheckpointError(f"{self.label}: no such folder")
        return {p.name: p.stat().st_size for p in self._folder.iterdir() if p.is_file()}

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """A range of one file; short only at its end."""
        with open(self._folder / name, "rb") as file:
            file.seek(offset)
            return file.read(nbytes)


@dataclass(frozen=True)
class Checkpoint:
    """The headers of all shards, and where each tensor lies."""

    label: str
    headers: dict[str, Header]
    files: dict[str, str]
    """Tensor name -> file name."""

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of the tensor ``name``."""
        return self.headers[self.files[name]].tensors[name]


def read_json(source: Readable, name: str) -> Any:
    """The parsed JSON file ``name``.

    Raises:
        CheckpointError: if it is missing or not JSON.
    """
    size = source.files().get(name)
    if size is None:
        raise CheckpointError(f"{source.label}: {name} is missing; is this a model folder?")
    try:
        return json.loads(source.read(name, 0, size))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{source.label}: {name} is not valid JSON: {e}") from None


def read_index(source: Readable) -> dict[str, str] | None:
    """The index's ``weight_map``, tensor name -> file name; None if there is no index.

    Raises:
        CheckpointError: if the index has another form or names a file outside the folder.
    """
    if INDEX not in source.files():
        return None
    index = read_json(source, INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{source.label}: {INDEX} has no weight_map; download it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{source.label}: {INDEX} gives no file name for {tensor}")
        if "\\" in file or "\0" in file or any(p in ("", ".", "..") for p in file.split("/")):
            raise CheckpointError(
                f"{source.label}: {INDEX} names {file!r}, which is not a file in the folder; "
                "do not trust this checkpoint"
            )
    return weight_map


def shard_names(source: Readable, weight_map: dict[str, str] | None) -> list[str]:
    """The weight files of the checkpoint, sorted; those the index names, present or not.

    Raises:
        CheckpointError: no weight files at all, or ``model*.safetensors`` the index omits.
    """
    present = {f for f in source.files() if f.startswith("model") and f.endswith(".safetensors")}
    if weight_map is None:
        if not present:
            raise CheckpointError(f"{source.label}: no model*.safetensors here")
        return sorted(present)
    named = set(weight_map.values())
    if foreign := sorted(present - named):
        raise CheckpointError(
            f"{source.label}: {foreign[0]} is not in {INDEX}; remove it or download the index again"
        )
    return sorted(named)


def open_header(source: Readable, name: str) -> Header:
    """The checked header of the shard ``name``, by two small reads."""
    size, label = source.files()[name], f"{source.label}: {name}"
    end = header_end(source.read(name, 0, min(size, 8)), size, label)
    return parse_header(source.read(name, 0, end), size, label)


def open_checkpoint(source: Readable) -> Checkpoint:
    """Every shard's header, checked against its file, the index and the other shards.

    Raises:
        CheckpointError: a missing, short, long, damaged or foreign shard, a tensor in two shards,
            or a tensor that index and shards do not place alike.
    """
    weight_map = read_index(source)
    names, sizes = shard_names(source, weight_map), source.files()
    if missing := [name for name in names if name not in sizes]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{source.label}: {missing[0]}{more} missing; download it again")
    headers = {name: open_header(source, name) for name in names}
    files: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor in files:
                raise CheckpointError(
                    f"{source.label}: {tensor} is in both {files[tensor]} and {file}"
                )
            files[tensor] = file
    if weight_map is not None:
        _compare(weight_map, files, source.label)
    return Checkpoint(source.label, headers, files)


def _compare(weight_map: dict[str, str], files: dict[str, str], label: str) -> None:
    for tensor, file in weight_map.items():
        if files.get(tensor) != file:
            raise CheckpointError(
                f"{label}: {INDEX} places {tensor} in {file}, which does not hold it"
            )
    if len(files) != len(weight_map):
        extra = next(tensor for tensor in files if tensor not in weight_map)
        raise CheckpointError(f"{label}: {files[extra]} holds {extra}, which {INDEX} does not name")
