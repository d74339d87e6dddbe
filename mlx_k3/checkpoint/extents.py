"""Where each routed expert's bytes lie: ``(layer, expert) -> extents``, one per piece.

Owns places on the disk, for both forms of a converted folder: experts stacked in it, or left in
the release's shards. Knows nothing about memory, slots or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import K3Config
from ..errors import CheckpointError
from .index import LocalFolder, open_checkpoint, read_json
from .names import expert_tensors
from .reader import TensorFile
from .writer import tensor_bytes

MANIFEST = "mlx_k3.json"


class Extent(NamedTuple):
    """A range of a file."""

    path: str
    offset: int
    nbytes: int


class Piece(NamedTuple):
    """One tensor of an expert, as MLX sees it: ``gate_proj.weight``, ``U32``, [out, words]."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return tensor_bytes(self.dtype, self.shape)


class Run(NamedTuple):
    """Extents that lie back to back: one read fills all of ``pieces``, in this order."""

    path: str
    offset: int
    nbytes: int
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class _Layer:
    """``files[i]`` and ``offsets[expert, i]`` place piece ``i``; ``files`` may differ by expert."""

    pieces: tuple[Piece, ...]
    paths: tuple[str, ...]
    files: np.ndarray  # [experts, pieces], into paths
    offsets: np.ndarray  # [experts, pieces]


@dataclass(frozen=True)
class ExpertExtents:
    """All routed experts of a converted folder; made by :func:`open_experts`.

    The pieces of an expert always come in the order gate, up, down, of each first the weight,
    then the scales. Experts in bfloat16 have three pieces, packed ones six.
    """

    form: str
    """``copy`` or ``reference``."""
    _layers: dict[int, _Layer]

    @property
    def layers(self) -> tuple[int, ...]:
        """The 0-based layers with experts."""
        return tuple(self._layers)

    def count(self, layer: int) -> int:
        """How many experts ``layer`` has."""
        return len(self._layers[layer].offsets)

    def pieces(self, layer: int) -> tuple[Piece, ...]:
        """Name, dtype and shape of the pieces of each expert in ``layer``."""
        return self._layers[layer].pieces

    def expert_bytes(self, layer: int) -> int:
        """Size of one expert of ``layer``."""
        return sum(piece.nbytes for piece in self._layers[layer].pieces)

    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Where the pieces of one expert lie.

        Raises:
            IndexError: if there is no such expert.
        """
        place = self._layers[layer]
        if not 0 <= expert < len(place.offsets):
            raise IndexError(f"layer {layer} has {len(place.offsets)} experts, not {expert}")
        return tuple(
            Extent(place.paths[file], int(offset), piece.nbytes)
            for piece, file, offset in zip(
                place.pieces, place.files[expert], place.offsets[expert], strict=True
            )
        )


def merge(extents: Sequence[Extent]) -> list[Run]:
    """The fewest reads that cover ``extents``, each a run of neighbours in one file."""
    runs: list[Run] = []
    for i in sorted(range(len(extents)), key=lambda i: extents[i][:2]):
        path, offset, nbytes = extents[i]
        last = runs[-1] if runs else None
        if last and last.path == path and last.offset + last.nbytes == offset:
            runs[-1] = Run(path, last.offset, last.nbytes + nbytes, (*last.pieces, i))
        else:
            runs.append(Run(path, offset, nbytes, (i,)))
    return runs


def open_experts(folder: str | Path) -> ExpertExtents:
    """The experts of the converted ``folder``.

    Raises:
        CheckpointError: if the folder is incomplete, or its experts were left in a release folder
            that is gone or no longer the same.
    """
    folder = Path(folder)
    config = K3Config.from_file(folder)
    local = LocalFolder(folder)
    if MANIFEST in local.files():
        manifest = read_json(local, MANIFEST)
        experts = manifest.get("experts") if isinstance(manifest, dict) else None
        if not isinstance(experts, dict):
            raise CheckpointError(f"{folder}: {MANIFEST} is damaged; convert it again")
        if experts.get("form") == "reference":
            return ExpertExtents("reference", _referenced(folder, config, experts))
    return ExpertExtents("copy", _stacked(folder, config, local))


def _stacked(folder: Path, config: K3Config, local: LocalFolder) -> dict[int, _Layer]:
    checkpoint = open_checkpoint(local)
    layers = {}
    for layer in config.moe_layers:
        count = config.expert_counts[layer]
        stack = f"{config.weight_prefix}model.layers.{layer}.mlp.switch_mlp."
        names = [
            f"{projection}_proj.{part}"
            for projection in ("gate", "up", "down")
            for part in ("weight", "scales", "biases")
            if part == "weight" or f"{stack}{projection}_proj.{part}" in checkpoint
        ]
        pieces, paths, offsets = [], [], []
        for name in names:
            if f"{stack}{name}" not in checkpoint:
                raise CheckpointError(f"{folder}: {stack}{name} is missing; convert it again")
            info = checkpoint.info(f"{stack}{name}")
            if info.shape[0] != count:
                raise CheckpointError(
                    f"{folder}: {stack}{name} holds {info.shape[0]} experts, must be {count}"
                )
            pieces.append(Piece(name, info.dtype, info.shape[1:]))
            paths.append(str(folder / checkpoint.files[f"{stack}{name}"]))
            offsets.append(info.offset + np.arange(count) * (info.nbytes // count))
        files = np.tile(np.arange(len(paths)), (count, 1))
        layers[layer] = _Layer(tuple(pieces), tuple(paths), files, np.stack(offsets, axis=1))
    return layers


def _referenced(folder: Path, config: K3Config, experts: dict[str, Any]) -> dict[int, _Layer]:
    try:
        source, shards = Path(experts["folder"]), dict(experts["shards"])
        precision = experts["precision"]
        expected = {
            name: (shard["bytes"], shard["header_sha256"]) for name, shard in shards.items()
        }
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged; convert it again") from None
    places: dict[str, tuple[int, int]] = {}
    dtypes: dict[str, str] = {}
    paths = []
    for name, (nbytes, sha256) in expected.items():
        tensors = _unchanged(folder, source / name, nbytes, sha256)
        places |= {t: (len(paths), info.offset) for t, info in tensors.items()}
        dtypes |= {t: info.dtype for t, info in tensors.items()}
        paths.append(str(source / name))
    layers = {}
    for layer in config.moe_layers:
        tensors = list(expert_tensors(config, layer, precision))
        stack = f"{config.weight_prefix}model.layers.{layer}.mlp.switch_mlp."
        try:
            pieces = tuple(
                Piece(t.name.removeprefix(stack), t.dtype or dtypes[t.sources[0].name], t.shape[1:])
                for t in tensors
            )
            table = np.array([[places[s.name] for s in t.sources] for t in tensors]).swapaxes(0, 1)
        except KeyError as e:
            raise CheckpointError(f"{source}: {e.args[0]} is in none of its shards") from None
        layers[layer] = _Layer(pieces, tuple(paths), table[..., 0], table[..., 1])
    return layers


def _unchanged(folder: Path, path: Path, nbytes: int, sha256: str):
    """The tensors of the release shard at ``path``, which must be what was there at conversion."""
    advice = "bring it back, or convert with --experts copy"
    try:
        size = path.stat().st_size
    except OSError:
        raise CheckpointError(f"{folder} reads its experts from {path}: gone; {advice}") from None
    if size != nbytes:
        raise CheckpointError(
            f"{folder} reads its experts from {path}: {size:,} bytes now, {nbytes:,} when it was "
            f"converted; {advice}"
        )
    with TensorFile(path) as file:
        if file.header.sha256 != sha256:
            raise CheckpointError(
                f"{folder} reads its experts from {path}: another file lies there now; {advice}"
            )
        return file.header.tensors
