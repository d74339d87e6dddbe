"""Random checkpoints in the release's format, of any size: what tests and benchmarks convert.

Owns plausible numbers, not good ones: activations stay finite and experts are chosen evenly, no
more. The numbers come from one block of noise, read from a place that depends on the seed and the
tensor's name, so a checkpoint of K3's width is written at the speed of the disk.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..config import K3Config
from .index import INDEX
from .names import (
    MlxTensor,
    ReleaseTensor,
    expert_tensors,
    layer_tensors,
    stem_tensors,
    vision_tensors,
)
from .reader import NUMPY_DTYPES
from .writer import Layout, by_alignment, write_file

_NOISE = 4 * 2**20
# Scale bytes of the experts: with codes of about 2.5, weights of about 2^-6.
_SCALES = (119, 122)


def write_random_release(folder: Path, raw_config: dict[str, Any], seed: int = 0) -> None:
    """Write a release of ``raw_config`` (the content of a ``config.json``) to a new ``folder``.

    As in the release, a shard holds a layer; the stem, the projector and the vision tower follow.
    Experts are MXFP4 if the configuration has a ``quantization_config``, else bfloat16.
    """
    folder.mkdir(parents=True)
    config = K3Config.from_dict(raw_config)
    text = raw_config.get("text_config", raw_config)
    experts = "mxfp4" if "quantization_config" in text else "bf16"
    shards = [
        [*layer_tensors(config, layer), *expert_tensors(config, layer, experts)]
        for layer in range(config.num_hidden_layers)
    ]
    vision = list(vision_tensors(config))
    shards.append(list(stem_tensors(config)))
    for part in ("mm_projector.", "vision_tower."):
        shards.append([tensor for tensor in vision if tensor.name.startswith(part)])
    shards = [shard for shard in shards if shard]
    noise, weight_map, total = _Noise(seed), {}, 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):06}.safetensors"
        layout = _write_shard(folder / name, tensors, noise)
        weight_map |= dict.fromkeys(layout.tensors, name)
        total += layout.data_bytes
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(raw_config, indent=1))


def _write_shard(path: Path, tensors: list[MlxTensor], noise: "_Noise") -> Layout:
    sources = {
        s.name: (s, tensor)
        for tensor in tensors
        for s in tensor.sources
        if tensor.op != "unembed_out"
    }
    stored = ((name, (s.dtypes[0], s.shapes[0])) for name, (s, _) in sorted(sources.items()))
    layout = Layout(dict(sorted(stored, key=by_alignment)), alignment=8)

    def blocks() -> Iterator[bytes | memoryview]:
        yield layout.header
        for name in layout.tensors:
            yield from noise.blocks(*sources[name])

    write_file(path, blocks())
    return layout


class _Noise:
    """Numbers for any tensor, from one block of normal noise and one of random bytes."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._seed = seed
        self._normal = rng.standard_normal(2 * _NOISE, np.float32)
        self._bytes = rng.integers(0, 256, 2 * _NOISE, np.uint8)
        self._scales = rng.integers(*_SCALES, 2 * _NOISE, np.uint8)

    def blocks(self, source: ReleaseTensor, tensor: MlxTensor) -> Iterator[memoryview]:
        """The bytes of ``source``, a release tensor that ``tensor`` is made of."""
        count = int(np.prod(source.shapes[0]))
        start = zlib.crc32(f"{self._seed}/{source.name}".encode()) % _NOISE
        for first in range(0, count, _NOISE):
            n = min(_NOISE, count - first)
            part = slice(start, start + n)
            if source.dtypes[0] == "U8":
                values = (self._scales if source.name.endswith("_scale") else self._bytes)[part]
            else:
                values = _shaped(self._normal[part], source, tensor)
            yield memoryview(values).cast("B")


def _shaped(normal: np.ndarray, source: ReleaseTensor, tensor: MlxTensor) -> np.ndarray:
    """Normal noise -> values of a size that suits the tensor, in its dtype."""
    width = source.shapes[0][-1]
    if tensor.op == "a_log":
        heads = int(np.prod(tensor.shape))
        values = np.where(np.arange(len(normal)) < heads, np.abs(normal), np.float32(0))
    elif source.name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
        values = 1 + normal / 10
    elif tensor.role == "embedding":
        values = normal
    else:
        values = normal / np.float32(width**0.5)
    if source.dtypes[0] == "BF16":
        # Cut, not rounded: noise does not mind.
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))
    return values.astype(NUMPY_DTYPES[source.dtypes[0]])
