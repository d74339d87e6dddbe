"""What a kept state belongs to: a model's weights, precision, kind of cache, and this format."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..checkpoint.index import INDEX, LocalFolder, read_json
from .cache_parts import layout
from .prefix_tree import BLOCK_TOKENS

FORMAT = 1  # of what is kept; another number makes all before it another model's
_MANIFEST = "mlx_k3.json"


def model_identity(folder: str | Path, model: Any) -> str:
    """Hexadecimal digits that differ wherever states of ``model``, loaded from ``folder``, may.

    A folder that ``mlx-k3 convert`` wrote states the digest of every file. Of other folders the
    sizes and times of the weight files stand for their contents.

    Raises:
        CheckpointError: the folder is no model.
    """
    folder = Path(folder)
    local = LocalFolder(folder)
    files = local.files()
    facts = {
        "format": [FORMAT, BLOCK_TOKENS],
        "config": read_json(local, "config.json"),
        "index": read_json(local, INDEX) if INDEX in files else None,
        "files": _files(folder, files),
        "dtypes": _dtypes(model),
        "cache": layout(model.make_cache()),
        "levers": _levers(model),
        "activations": getattr(model, "activations", None),
        "device": str(mx.default_device().type),
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Path, files: dict[str, int]) -> Any:
    if _MANIFEST in files:
        manifest = read_json(LocalFolder(folder), _MANIFEST)
        if isinstance(manifest, dict) and manifest.get("files"):
            return [manifest["files"], manifest.get("experts")]
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    return [[name, files[name], (folder / name).stat().st_mtime_ns] for name in weights]


def _dtypes(model: Any) -> list[str]:
    """Of all but the experts, which are the same numbers wherever they are."""
    parameters = tree_flatten(model.parameters())
    return sorted({str(x.dtype) for name, x in parameters if ".switch_mlp." not in name})


def _levers(model: Any) -> Any:
    """What is left out of the arithmetic on purpose."""
    offload = getattr(model, "offload", None)
    if offload is None or not offload.levers.on:
        return None
    return [offload.levers.active_experts, offload.levers.drop_missed]
