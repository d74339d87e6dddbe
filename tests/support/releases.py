"""Release folders for the tests: copies of golden ones, random ones, and ways to break them.

Reads and writes safetensors with its own few lines, so that a mistake in the package's reader
cannot hide behind itself.
"""

import copy
import json
import shutil
import struct
from pathlib import Path
from typing import Any

from mlx_k3.checkpoint.synthetic import write_random_release

Tensor = tuple[str, list[int], bytes]
"""dtype, shape, bytes"""


def copy_release(source: Path, target: Path) -> Path:
    """A writable copy of a golden checkpoint, without its expected values."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if not path.name.startswith("expected"):
            shutil.copyfile(path, target / path.name)
    return target


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    return {
        name: (e["dtype"], e["shape"], data[e["data_offsets"][0] : e["data_offsets"][1]])
        for name, e in header.items()
    }


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` in the order given."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every weight file in ``folder``."""
    return {
        name: tensor
        for path in sorted(folder.glob("model*.safetensors"))
        for name, tensor in read_tensors(path).items()
    }


def edit_json(path: Path, change: Any) -> None:
    """Apply ``change`` to the parsed content of ``path``; what it returns, if anything, is kept."""
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


def add_tensor(folder: Path, shard: str, name: str, tensor: Tensor) -> None:
    """Put one more tensor into a shard and into the index."""
    tensors = read_tensors(folder / shard)
    tensors[name] = tensor
    write_tensors(folder / shard, tensors)
    edit_json(
        folder / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({name: shard}),
    )


def replace_tensor(folder: Path, name: str, tensor: Tensor) -> None:
    """Give the tensor ``name`` another dtype, shape and content."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = read_tensors(path)
    tensors[name] = tensor
    write_tensors(path, tensors)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of ``folder``, hidden ones too."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def random_release(folder: Path, like: Path, seed: int = 0, **text_config: Any) -> Path:
    """A random release with the config of ``like``, some text settings changed."""
    config = copy.deepcopy(json.loads((like / "config.json").read_text()))
    config.get("text_config", config).update(text_config)
    write_random_release(folder, config, seed)
    return folder
