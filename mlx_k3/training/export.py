"""A trained model as a checkpoint in the release's own format.

Owns the way back from this package's parameters to the release's tensors: what the converter
joins, cuts and drops is cut, joined and padded here. Experts are packed to MXFP4.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..checkpoint.index import INDEX
from ..checkpoint.names import (
    ExpertForm,
    MlxTensor,
    expert_tensors,
    layer_tensors,
    stem_tensors,
    vision_tensors,
)
from ..checkpoint.writer import Layout, by_alignment, write_file
from ..config import VISION_PARTS, K3Config
from ..models.kimi import Model
from .precision import stored_dtype
from .qat import mxfp4_pack

Stored = tuple[str, tuple[int, ...], bytes]
"""dtype as safetensors spells it, shape, bytes"""

_DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16"}
# How the experts are packed, for configurations that do not say it yet.
_WEIGHTS = {"num_bits": 4, "group_size": 32, "type": "float", "strategy": "group"}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
}


def export(
    model: Model, raw_config: dict[str, Any], folder: Path, experts: ExpertForm = "mxfp4"
) -> None:
    """Write ``model`` to the new ``folder``: a shard a layer, the stem, projector and tower if it
    sees, the index, config.json.

    ``raw_config`` is the content of the model's ``config.json``; the new one says how the experts
    are stored. ``experts="bf16"`` leaves them unpacked, to see what packing costs. The folder
    appears when it is complete.

    Raises:
        OSError: as writing does; nothing is left then.
    """
    config = model.config
    arrays = package_arrays(config, dict(tree_flatten(model.parameters())), experts)
    shards = [
        [*layer_tensors(config, layer), *expert_tensors(config, layer, experts)]
        for layer in range(config.num_hidden_layers)
    ]
    shards.append(list(stem_tensors(config)))
    sight = list(vision_tensors(config))
    for part in VISION_PARTS[::-1] if sight else ():  # The projector first, as in the release.
        shards.append([tensor for tensor in sight if tensor.name.startswith(part)])
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weight_map, total_bytes = {}, 0
    try:
        for number, tensors in enumerate(shards, start=1):
            name = f"model-{number:05}-of-{len(shards):06}.safetensors"
            stored = dict(_release(config, tensors, arrays))
            layout = _write(partial / name, stored)
            weight_map |= dict.fromkeys(layout.tensors, name)
            total_bytes += layout.data_bytes
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index) + "\n")
        stated = _stating_quantization(config, raw_config, experts)
        (partial / "config.json").write_text(json.dumps(stated, indent=1) + "\n")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _stating_quantization(
    config: K3Config, raw_config: dict[str, Any], experts: ExpertForm
) -> dict[str, Any]:
    stated = dict(raw_config)
    text = stated
    if "text_config" in stated:
        text = stated["text_config"] = dict(stated["text_config"])
    places = [part for part in (text, stated) if "quantization_config" in part]
    if experts == "bf16":
        for part in places:
            part.pop("quantization_config", None)
    elif not places and config.moe_layers:
        stated["quantization_config"] = _QUANTIZATION
    return stated


def package_arrays(
    config: K3Config, parameters: dict[str, mx.array], experts: ExpertForm
) -> dict[str, mx.array]:
    """This package's parameters under the names of an MLX folder, in the dtypes of the release."""
    arrays = {}
    for name, parameter in parameters.items():
        own = name.removeprefix("vision.")
        name = own if own != name else config.weight_prefix + name
        if ".switch_mlp." in name and experts == "mxfp4":
            packed, scales = mxfp4_pack(parameter)
            arrays[name] = packed
            arrays[name.removesuffix("weight") + "scales"] = scales
            continue
        array = parameter.astype(stored_dtype(name))
        if name.endswith("_res"):
            arrays[f"{name}_norm.weight"] = mx.ones_like(array)
            arrays[f"{name}_proj.weight"] = array
        elif name.endswith("qkv_proj.weight"):
            arrays |= _qkv(config, name, array)
        elif name.endswith("qkv_conv"):
            arrays |= _qkv(config, f"{name}.conv.weight", array)
        else:
            arrays[name] = array
    return arrays


def _qkv(config: K3Config, name: str, array: mx.array) -> dict[str, mx.array]:
    """Queries, keys and values: together in K3's packages, apart in Kimi Linear's."""
    if config.model_type == "kimi_k3":
        return {name: array}
    parts = zip("qkv", mx.split(array, 3), strict=True)
    return {name.replace(".qkv_", f".{x}_"): part for x, part in parts}


def _release(
    config: K3Config, tensors: list[MlxTensor], arrays: dict[str, mx.array]
) -> Iterator[tuple[str, Stored]]:
    """The release tensors that ``tensors`` are made of."""
    for tensor in tensors:
        array = arrays[tensor.name]
        if tensor.op == "unembed_out":
            continue
        if tensor.op == "embed_q":
            array = _kv_b(config, array, arrays[tensor.name.replace("embed_q", "unembed_out")])
        elif tensor.op == "a_log":
            padded = math.prod(tensor.sources[0].shapes[0])
            array = mx.pad(array, (0, padded - array.size))
        raw = _raw(array)
        dtype = "U8" if array.dtype == mx.uint8 else _DTYPES[array.dtype]
        size = len(raw) // len(tensor.sources)
        for i, source in enumerate(tensor.sources):
            yield source.name, (dtype, source.shapes[0], raw[i * size : (i + 1) * size])


def _kv_b(config: K3Config, embed_q: mx.array, unembed_out: mx.array) -> mx.array:
    """``embed_q [H, rank, nope]`` and ``unembed_out [H, value, rank]`` -> ``kv_b_proj``."""
    halves = [embed_q.swapaxes(1, 2), unembed_out]
    return mx.concatenate(halves, axis=1).reshape(-1, config.kv_lora_rank)


def _raw(array: mx.array) -> bytes:
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.view(mx.uint8)).tobytes()


def _write(path: Path, stored: dict[str, Stored]) -> Layout:
    kinds = {name: (dtype, shape) for name, (dtype, shape, _) in sorted(stored.items())}
    layout = Layout(dict(sorted(kinds.items(), key=by_alignment)), alignment=8)
    write_file(path, iter([layout.header, *(stored[name][2] for name in layout.tensors)]))
    return layout
