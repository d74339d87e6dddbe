"""A model to train that continues from a trained checkpoint.

Owns the way from a folder in release format to a training model's parameters: through the
converter and the loader, experts unpacked. A tower that the checkpoint lacks stays as it is.
"""

import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoint.index import LocalFolder, open_checkpoint
from ..config import VISION_PARTS, K3Config
from ..convert.stream import convert
from ..errors import K3Error
from ..loader import assemble
from ..models.kimi import Model
from .two_optimizers import TOWER

VOCABULARY = "tiktoken.model"


def start_from(model: Model, folder: Path, like: Path) -> None:
    """Give ``model`` the weights of the release in ``folder``, in float32.

    ``like`` is the folder that the run's model is described in.

    Raises:
        K3Error: the checkpoint is of another model, or has another vocabulary.
        CheckpointError: it is incomplete or damaged.
    """
    config = K3Config.from_file(folder)
    files = [path / VOCABULARY for path in (folder, like)]
    if not all(f.is_file() for f in files) or files[0].read_bytes() != files[1].read_bytes():
        raise K3Error(
            f"initialize_from: {folder} has another {VOCABULARY} than {like}; "
            "prepare the run with the vocabulary of the checkpoint"
        )
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "package"
        convert(folder, package, trunk="bf16")
        weights = _text(package)
        if config.vision_config and model.vision is not None:
            weights |= _tower(package)
        own = dict(tree_flatten(model.parameters()))
        needed = {key for key in own if not key.startswith(f"{TOWER}.")} | weights.keys()
        for key in sorted(needed):
            if key not in own or key not in weights or own[key].shape != weights[key].shape:
                raise K3Error(
                    f"initialize_from: {folder} is another model than {like} describes: "
                    f"they differ in {key}"
                )
        model.update(tree_unflatten(list(weights.items())))
        mx.eval(model.parameters())  # Before the files they are mapped from are gone.


def _text(package: Path) -> dict[str, mx.array]:
    weights = dict(tree_flatten(assemble(package, "float32").parameters()))
    unpacked = {}
    for name, array in weights.items():
        scales = weights.get(name.removesuffix("weight") + "scales")
        if name.endswith(".scales"):
            continue
        if scales is not None:
            array = mx.dequantize(array, scales, group_size=32, bits=4, mode="mxfp4")
        unpacked[name] = array.astype(mx.float32)
    return unpacked


def _tower(package: Path) -> dict[str, mx.array]:
    files = open_checkpoint(LocalFolder(package)).files
    weights: dict[str, mx.array] = {}
    for file in {f for name, f in files.items() if name.startswith(VISION_PARTS)}:
        weights |= mx.load(str(package / file))
    return {
        f"{TOWER}.{name}": array.astype(mx.float32)
        for name, array in weights.items()
        if name.startswith(VISION_PARTS)
    }
