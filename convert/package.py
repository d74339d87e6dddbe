"""The small files of a converted folder: configuration, index, manifest, and what is carried along.

Owns their content and order: ``config.json`` comes last, because it is what makes the folder a
model.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..checkpoint.extents import MANIFEST
from ..checkpoint.index import INDEX
from ..checkpoint.writer import write_file
from ..version import __version__
from .journal import Record
from .plan import Plan
from .profiles import MXFP4, Error
from .source import Source
from .tokenizer import write_tokenizer

FORMAT = 1
# Written by us, or true only of the release's own files.
_NOT_CARRIED = {"config.json", "hf_quant_config.json", MANIFEST}
_TOKENIZER = {
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}


def finish(
    out: Path, source: Source, plan: Plan, job: dict[str, Any], done: dict[str, Record]
) -> None:
    """Write everything but the weights into ``out``; the folder is a model afterwards."""
    files = {name: {"bytes": r.nbytes, "sha256": r.sha256} for name, r in done.items()}
    for name in [*_carry(source, out), *_write_tokenizer(source, out)]:
        files[name] = _describe((out / name).read_bytes())
    index, config = _json(index_of(plan)), _json(config_of(plan))
    files[INDEX], files["config.json"] = _describe(index), _describe(config)
    manifest = {
        "format": FORMAT,
        "made_by": f"mlx-k3 {__version__}",
        "job": job,
        "experts": experts_of(source, plan),
        "trunk": report(plan, done)["trunk"],
        "files": dict(sorted(files.items())),
    }
    write_file(out / INDEX, [index])
    write_file(out / MANIFEST, [_json(manifest)])
    write_file(out / "config.json", [config])


def is_here(out: Path, job: dict[str, Any]) -> bool:
    """Whether ``out`` once held the finished conversion ``job``, by its manifest."""
    return _manifest(out).get("job") == job


def is_complete(out: Path, job: dict[str, Any]) -> bool:
    """Whether ``out`` holds all of the finished conversion ``job``, by the sizes of its files."""
    try:
        return is_here(out, job) and all(
            (out / name).stat().st_size == file["bytes"]
            for name, file in _manifest(out)["files"].items()
        )
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def _manifest(out: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def config_of(plan: Plan) -> dict[str, Any]:
    """The source's config with its quantization replaced by mlx-lm's form of what was written.

    The top-level parameters are those of the trunk; every module that differs is named.
    """
    config = {k: v for k, v in plan.raw_config.items() if k != "quantization_config"}
    if "text_config" in config:
        text = config["text_config"]
        config["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    quantized = plan.quantized
    if quantized:
        default = plan.trunk if plan.trunk.bits is not None else MXFP4
        config["quantization"] = {
            **default.mlx,
            **{module: how.mlx for module, how in quantized.items() if how != default},
        }
    return config


def index_of(plan: Plan) -> dict[str, Any]:
    """``model.safetensors.index.json`` of the folder."""
    weight_map = {name: output.name for output in plan.outputs for name in output.layout.tensors}
    total = sum(output.layout.data_bytes for output in plan.outputs)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def experts_of(source: Source, plan: Plan) -> dict[str, Any]:
    """The manifest's word on the experts: in this folder, or where they were left."""
    precision = "mxfp4" if plan.experts == "mxfp4" else plan.expert_form
    if plan.experts != "reference":
        return {"form": "copy", "precision": precision}
    headers = plan.checkpoint.headers
    return {
        "form": "reference",
        "precision": precision,
        "folder": os.path.realpath(source.label),
        "shards": {
            name: {"bytes": headers[name].file_bytes, "header_sha256": headers[name].sha256}
            for name in plan.expert_shards
        },
    }


def report(plan: Plan, done: dict[str, Record]) -> dict[str, Any]:
    """What a conversion did, as data: sizes, precision, and the relative error by kind."""
    errors: dict[str, Error] = {}
    for output in plan.outputs:
        for kind, (error, size) in done[output.name].errors.items():
            errors.setdefault(kind, Error()).add(Error(error, size))
    relative = {kind: round(error.relative, 6) for kind, error in sorted(errors.items())}
    experts = {"form": plan.experts, "precision": plan.expert_form}
    if plan.experts == "mxfp4":
        experts |= {"precision": "mxfp4", "relative_error": relative.pop("experts", 0.0)}
    return {
        "experts": experts,
        "trunk": {
            "profile": plan.trunk.name,
            "relative_error": relative,
            "left_exact": plan.left_exact,
        },
        "bytes": {
            kind: sum(o.layout.file_bytes for o in plan.outputs if o.kind == kind)
            for kind in ("trunk", "experts", "vision")
        },
        "files": len(plan.outputs),
        "ignored_tensors": len(plan.ignored),
    }


def _carry(source: Source, out: Path) -> list[str]:
    """Copy license, model card, generation and processor configuration; never weights or code."""
    names = [
        name
        for name in source.files()
        if "/" not in name
        and not name.endswith((".safetensors", ".index.json"))
        and name not in _NOT_CARRIED | _TOKENIZER
    ]
    for name in names:
        write_file(out / name, [source.fetch(name).read_bytes()])
    return names


def _write_tokenizer(source: Source, out: Path) -> list[str]:
    names = [name for name in source.files() if name in _TOKENIZER]
    with tempfile.TemporaryDirectory() as folder:
        # Downloaded files may lie in several places; the tokenizer wants them side by side.
        for name in names:
            shutil.copyfile(source.fetch(name), Path(folder) / name)
        return [path.name for path in write_tokenizer(Path(folder), out)]


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"


def _describe(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
