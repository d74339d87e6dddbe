"""``load()``: a converted folder becomes a model and a tokenizer.

Owns the order of things: check every file, build the modules, name, pack and place the weights.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from .chat.tokenizer import load_tokenizer
from .checkpoint.index import Checkpoint, open_checkpoint, read_json
from .config import K3Config
from .convert.source import FolderSource
from .errors import CheckpointError
from .models.kimi import Model

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_PREFIX = "language_model."


def load(path: str | Path, dtype: str | None = None) -> "tuple[Model, TokenizerWrapper | None]":
    """Open a folder that ``mlx-k3 convert`` wrote, or a build in mlx-lm's form.

    Args:
        path: the folder.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` recasts every floating-point weight;
            packed weights stay packed. By default weights stay as stored, except that a CPU
            computes in float32: it has no bfloat16 arithmetic, and emulating it is many times
            slower.

    Returns:
        The model and its tokenizer, None where the folder has no tokenizer files.

    Raises:
        CheckpointError: a file is missing, damaged, of another length than its header says, or
            the tensors are not this model's.
        UnsupportedError: the model is of another family.
    """
    source = FolderSource(path)
    config = K3Config.from_file(source.fetch("config.json"))
    checkpoint = open_checkpoint(source)
    if any(".block_sparse_moe." in name for name in checkpoint.files):
        raise CheckpointError(
            f"{path} is in the release's own format; convert it once: mlx-k3 convert {path} OUT"
        )
    model = Model(config)
    weights = model.sanitize(_open_weights(source, checkpoint))
    _quantize(model, weights, read_json(source, "config.json"))
    _check_parameters(model, weights, str(path))
    _recast(weights, dtype)
    model.load_weights(list(weights.items()), strict=False)
    model.eval()
    # Layer by layer: what a layer's joins and casts leave behind is freed before the next.
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model, load_tokenizer(Path(path))


def _open_weights(source: FolderSource, checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Every tensor of the text model, mapped but not read yet."""
    weights: dict[str, mx.array] = {}
    for file in checkpoint.headers:
        weights |= mx.load(str(source.fetch(file)))
    return weights


def _quantize(model: nn.Module, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Give every module that comes packed its packed form."""
    stated = {k.removeprefix(_PREFIX): v for k, v in config.get("quantization", {}).items()}

    def packing(path: str, module: nn.Module) -> dict[str, Any] | bool:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        how = stated.get(path)
        return how if isinstance(how, dict) else infer_quant_config(path, module, weights)

    nn.quantize(model, class_predicate=packing)


def _check_parameters(model: nn.Module, weights: dict[str, mx.array], label: str) -> None:
    """The weights are exactly the model's parameters, in name and shape."""
    parameters = dict(tree_flatten(model.parameters()))
    for what, names in (
        ("is missing", parameters.keys() - weights.keys()),
        ("is not part of this model", weights.keys() - parameters.keys()),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{label}: {min(names)} {what}{more}; convert the model again")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{label}: {name} has shape {list(weights[name].shape)}, "
                f"config.json asks for {list(parameter.shape)}"
            )


def _recast(weights: dict[str, mx.array], dtype: str | None) -> None:
    """Floating-point weights in ``dtype``; the router's gate stays in float32."""
    if dtype is None and mx.default_device() != mx.cpu:
        return
    target = getattr(mx, dtype or "float32")
    for name, array in weights.items():
        if mx.issubdtype(array.dtype, mx.floating) and not name.endswith(".mlp.gate.weight"):
            weights[name] = array.astype(target)
