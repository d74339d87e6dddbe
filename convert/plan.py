"""What becomes what: the files a conversion will write, their exact sizes, and what they need.

Pure: reads headers and a few numbers of the source, writes nothing. Everything that can be
refused is refused here, before the first byte.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..checkpoint.index import Checkpoint, open_checkpoint, read_json
from ..checkpoint.names import (
    ExpertForm,
    MlxTensor,
    ReleaseTensor,
    expert_probe,
    expert_tensors,
    is_ignored,
    is_mlx_name,
    layer_tensors,
    release_tensors,
    stem_tensors,
    vision_tensors,
)
from ..checkpoint.reader import NUMPY_DTYPES
from ..checkpoint.writer import Layout, by_alignment
from ..config import K3Config
from ..errors import CheckpointError, UnsupportedError
from .profiles import MXFP4, Profile, profile
from .source import Source

EXPERTS = ("copy", "reference", "mxfp4")


class NothingToDo(Exception):
    """The source is in MLX form already; not an error."""


@dataclass(frozen=True)
class Output:
    """One weight file to be: its tensors, how each is stored, and the source shards it needs."""

    name: str
    kind: Literal["trunk", "experts", "vision"]
    tensors: dict[str, MlxTensor]
    """By the name of the first stored tensor: ``X.weight`` for a quantized X."""
    profiles: dict[str, Profile]
    """The same names -> how those that are quantized are quantized."""
    layout: Layout
    shards: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A whole conversion, ready to be carried out."""

    raw_config: dict[str, Any]
    config: K3Config
    checkpoint: Checkpoint
    experts: str
    """As asked: copy, reference or mxfp4."""
    expert_form: ExpertForm
    """As they are in the source."""
    trunk: Profile
    outputs: tuple[Output, ...]
    ignored: tuple[str, ...]
    """Tensors of the source that the model does not use."""

    @property
    def total_bytes(self) -> int:
        """Size of all weight files."""
        return sum(output.layout.file_bytes for output in self.outputs)

    def summary(self) -> dict[str, Any]:
        """The plan as data, for people and scripts: every weight file and its size."""
        files = [
            {"file": o.name, "bytes": o.layout.file_bytes, "needs": list(o.shards)}
            for o in self.outputs
        ]
        return {
            "source": self.checkpoint.label,
            "experts": {"form": self.experts, "precision": self.expert_form},
            "trunk": self.trunk.name,
            "files": files,
            "total_bytes": self.total_bytes,
        }

    @property
    def expert_shards(self) -> list[str]:
        """The source shards that hold routed experts."""
        shards = {
            self.checkpoint.files[source.name]
            for layer in self.config.moe_layers
            for tensor in expert_tensors(self.config, layer, self.expert_form)
            for source in tensor.sources
        }
        return sorted(shards)

    @property
    def quantized(self) -> dict[str, Profile]:
        """Module path -> how its weight is stored, for every module that is not plain."""
        modules = {
            tensor.module: output.profiles[name]
            for output in self.outputs
            for name, tensor in output.tensors.items()
            if name in output.profiles
        }
        if self.expert_form == "mxfp4":
            for layer in self.config.moe_layers:
                for tensor in expert_tensors(self.config, layer, "mxfp4"):
                    modules[tensor.module] = MXFP4
        return modules

    @property
    def left_exact(self) -> dict[str, int]:
        """Kinds of linear weights the profile had to leave as they are, and how many of each.

        Their width does not fill the profile's groups.
        """
        if self.trunk.bits is None:
            return {}
        return Counter(
            tensor.kind
            for output in self.outputs
            for name, tensor in output.tensors.items()
            if tensor.role in ("linear", "embedding") and name not in output.profiles
        )


def make_plan(source: Source, *, experts: str = "copy", trunk: str = "q8") -> Plan:
    """Plan the conversion of ``source``.

    Raises:
        NothingToDo: if it has been converted to MLX before.
        CheckpointError: if it is incomplete, damaged or not the model its config describes.
        UnsupportedError: an unknown model type, quantization or option.
    """
    how = profile(trunk)
    if experts not in EXPERTS:
        raise UnsupportedError(f"--experts {experts}: choose one of {', '.join(EXPERTS)}")
    raw_config = read_json(source, "config.json")
    if not isinstance(raw_config, dict):
        raise CheckpointError(f"{source.label}: config.json does not hold a JSON object")
    config = K3Config.from_dict(raw_config)
    checkpoint = open_checkpoint(source)
    if any(is_mlx_name(name) for name in checkpoint.files):
        raise NothingToDo(f"{source.label} is an MLX model already: nothing to convert")
    form = expert_form(config, checkpoint)
    check_quantization(raw_config, config, form)
    if experts == "mxfp4" and form == "mxfp4":
        raise UnsupportedError(
            "--experts mxfp4: the experts are MXFP4 already; leave the option out"
        )
    ignored = check_tensors(config, form, checkpoint)
    check_a_log(config, form, checkpoint, source)
    outputs = tuple(_outputs(config, form, checkpoint, experts, how))
    return Plan(raw_config, config, checkpoint, experts, form, how, outputs, ignored)


def expert_form(config: K3Config, checkpoint: Checkpoint) -> ExpertForm:
    """How the routed experts are stored in the release ``checkpoint``."""
    probe = expert_probe(config)
    return "mxfp4" if probe is not None and probe in checkpoint else "bf16"


def check_quantization(raw_config: dict[str, Any], config: K3Config, form: ExpertForm) -> None:
    """Refuse a quantized release whose format is not the one the packed experts are read as.

    Raises:
        UnsupportedError: naming the format.
        CheckpointError: if the experts cannot be in it.
    """
    text = raw_config.get("text_config", raw_config)
    found = text.get("quantization_config", raw_config.get("quantization_config"))
    if form == "bf16" and not found:
        return
    if form == "mxfp4" and not isinstance(found, dict):
        raise UnsupportedError(
            "config.json: the experts are packed but no quantization_config says how"
        )
    groups = found.get("config_groups") or {}
    weights = [g.get("weights") or {} for g in groups.values()] or [{}]
    layouts = {(w.get("num_bits"), w.get("group_size"), w.get("type")) for w in weights}
    if (
        found.get("quant_method") != "compressed-tensors"
        or found.get("format") != "mxfp4-pack-quantized"
        or layouts != {(4, 32, "float")}
    ):
        raise UnsupportedError(
            f"config.json: quantization {found.get('quant_method')}/{found.get('format')} "
            f"{sorted(map(str, layouts))} is not mxfp4-pack-quantized in groups of 32"
        )
    if form == "bf16":
        raise CheckpointError("config.json says the experts are MXFP4, but they are not packed")
    for width in (config.expert_dim, config.moe_intermediate_size):
        if width % MXFP4.group_size:
            raise CheckpointError(f"config.json: experts of width {width} do not fill groups of 32")


def check_tensors(config: K3Config, form: ExpertForm, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Compare what is there with what ``config`` demands; returns the tensors that are ignored.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has another shape or dtype.
    """
    expected = 0
    missing = []
    known = set()
    for tensor in release_tensors(config, form):
        expected += 1
        if tensor.name in checkpoint:
            check_tensor(tensor, checkpoint)
            known.add(tensor.name)
        else:
            missing.append(tensor.name)
    label = checkpoint.label
    if missing:
        raise CheckpointError(
            f"{label}: {len(missing):,} of {expected:,} tensors are missing, the first is "
            f"{missing[0]}; download the checkpoint again"
        )
    rest = [name for name in checkpoint.files if name not in known]
    unknown = [name for name in rest if not is_ignored(config, name)]
    if unknown:
        raise CheckpointError(
            f"{label}: {len(unknown):,} tensors that config.json does not explain, the first is "
            f"{unknown[0]} in {checkpoint.files[unknown[0]]}"
        )
    return tuple(rest)


def check_tensor(tensor: ReleaseTensor, checkpoint: Checkpoint) -> None:
    """Compare one tensor's shape and dtype with what the config demands."""
    info = checkpoint.info(tensor.name)
    where = f"{checkpoint.label}: {checkpoint.files[tensor.name]}: {tensor.name}"
    if info.shape not in tensor.shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(tensor.shapes))
        raise CheckpointError(
            f"{where} has shape {list(info.shape)}, config.json asks for {wanted}"
        )
    if info.dtype not in tensor.dtypes:
        wanted = " or ".join(tensor.dtypes)
        raise CheckpointError(f"{where} is {info.dtype}, must be {wanted}")


def check_a_log(config: K3Config, form: ExpertForm, checkpoint: Checkpoint, source: Source) -> None:
    """Refuse an ``A_log`` with values beyond the heads: it would not be per head then.

    Raises:
        CheckpointError: naming the tensor.
    """
    for layer in sorted(config.kda_layers):
        for tensor in layer_tensors(config, layer):
            if tensor.op != "a_log":
                continue
            name = tensor.sources[0].name
            info = checkpoint.info(name)
            kept = config.kda_num_heads * NUMPY_DTYPES[info.dtype].itemsize
            if kept == info.nbytes:
                continue
            tail = source.read(checkpoint.files[name], info.offset + kept, info.nbytes - kept)
            if np.frombuffer(tail, np.uint8).any():
                raise CheckpointError(
                    f"{checkpoint.label}: {name} has values beyond its {config.kda_num_heads} "
                    "heads, where the release has zeros"
                )


def _outputs(
    config: K3Config, form: ExpertForm, checkpoint: Checkpoint, experts: str, trunk: Profile
) -> Iterator[Output]:
    """The files in writing order: whatever needs one release shard comes together."""
    layers, moe = config.num_hidden_layers, len(config.moe_layers)
    quantize_experts = MXFP4 if experts == "mxfp4" else None
    number = 0
    for layer in range(layers):
        name = f"model-trunk-{layer + 1:05}-of-{layers + 1:05}.safetensors"
        yield _output(name, "trunk", layer_tensors(config, layer), checkpoint, trunk)
        if config.expert_counts[layer] and experts != "reference":
            number += 1
            name = f"model-experts-{number:05}-of-{moe:05}.safetensors"
            tensors = expert_tensors(config, layer, form)
            yield _output(name, "experts", tensors, checkpoint, quantize_experts)
    name = f"model-trunk-{layers + 1:05}-of-{layers + 1:05}.safetensors"
    yield _output(name, "trunk", stem_tensors(config), checkpoint, trunk)
    if config.vision_config:
        name = "model-vision-00001-of-00001.safetensors"
        yield _output(name, "vision", vision_tensors(config), checkpoint, None)


def _output(
    name: str,
    kind: Literal["trunk", "experts", "vision"],
    tensors: Iterable[MlxTensor],
    checkpoint: Checkpoint,
    how: Profile | None,
) -> Output:
    by_name, profiles, stored, shards = {}, {}, [], {}
    for tensor in tensors:
        by_name[tensor.name] = tensor
        dtypes = {checkpoint.info(source.name).dtype for source in tensor.sources}
        if len(dtypes) > 1:
            first = tensor.sources[0].name
            raise CheckpointError(
                f"{checkpoint.label}: {first} and its siblings mix {', '.join(sorted(dtypes))}"
            )
        dtype = dtypes.pop()
        if how is not None and how.applies(tensor):
            profiles[tensor.name] = how
            stored.extend(how.stored(tensor, dtype))
        else:
            stored.append((tensor.name, (tensor.dtype or dtype, tensor.shape)))
        shards |= {checkpoint.files[source.name]: None for source in tensor.sources}
    layout = Layout(dict(sorted(stored, key=by_alignment)))
    return Output(name, kind, by_name, profiles, layout, tuple(shards))
