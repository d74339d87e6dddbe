"""A trained model in the release's format: every tensor in its place, and the same logits."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model as mlx_lm_load_model
from typer.testing import CliRunner

from mlx_k3 import load
from mlx_k3.checkpoint.mxfp4 import decode
from mlx_k3.checkpoint.names import release_tensors
from mlx_k3.cli import app
from mlx_k3.config import K3Config
from mlx_k3.convert.stream import convert
from mlx_k3.models.kimi import Model
from mlx_k3.training import bank
from mlx_k3.training import export as exporting
from mlx_k3.training.export import export
from mlx_k3.training.initialize import new_model
from mlx_k3.training.precision import as_stored
from mlx_k3.training.qat import mxfp4_fake_quantize

from .support.measure import relative_error
from .support.releases import all_tensors, edit_json

# Every other way a model of the family may be.
VARIANTS = {
    "plain residuals": {"attn_res_block_size": None},
    "no latent": {"routed_expert_hidden_size": None, "hidden_size": 64},
    "no query rank": {"q_lora_rank": None},
    "no output gate": {"mla_use_output_gate": False},
    "tied embeddings": {"tie_word_embeddings": True},
    "no shared experts": {"num_shared_experts": 0},
    "pruned": {"expert_counts": [0, 8, 4, 6, 8]},
}


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places enough for every pair: what has none is no matter of the export."""
    monkeypatch.setattr(bank, "CAPACITY", 1e6)


def trained(folder: Path, seed: int = 1) -> Model:
    """A model of ``folder``'s configuration in which no parameter is what it began as."""
    model = new_model(K3Config.from_file(folder), seed)
    key = mx.random.key(seed)

    def moved(parameter: mx.array) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        return parameter + 0.1 * mx.random.normal(parameter.shape, key=own)

    model.update(tree_map(moved, model.parameters()))
    return model


def as_used(model: Model) -> Model:
    """The model with the numbers its last phase of training computes with, in float32."""
    stored = tree_map(lambda p: p.astype(mx.float32), as_stored(model.parameters()))
    model.update(stored)
    for layer in model.config.moe_layers:
        model.layers[layer].mlp.switch_mlp.quantized = True
    return model


def exported(folder: Path, out: Path, model: Model) -> Path:
    export(model, json.loads((folder / "config.json").read_text()), out)
    return out


def some_ids(config: K3Config) -> mx.array:
    return mx.random.randint(0, config.vocab_size, (2, 70), key=mx.random.key(3))


@pytest.fixture(params=["K3", "Kimi Linear"])
def source(request: pytest.FixtureRequest, golden: Path, start: Path) -> Path:
    """The configuration of a K3 with every mechanism, or of its predecessor."""
    return start if request.param == "K3" else golden / "tiny-kimi-linear"


def test_logits_survive_export_and_conversion(source: Path, tmp_path: Path) -> None:
    model = trained(source)
    release = exported(source, tmp_path / "release", model)
    convert(release, tmp_path / "package", trunk="bf16")
    loaded, _ = load(tmp_path / "package")
    ids = some_ids(model.config)
    unrounded = model(ids)
    expected = as_used(model)(ids)
    assert relative_error(loaded(ids), expected) < 1e-5
    assert relative_error(unrounded, expected) > 1e-3  # So that the rounding was there to lose.


def test_experts_may_stay_unpacked(source: Path, tmp_path: Path) -> None:
    """Then the package computes with them in bfloat16, as training does before it rounds."""
    model = trained(source)
    raw_config = json.loads((source / "config.json").read_text())
    export(model, raw_config, tmp_path / "release", experts="bf16")
    assert "quantization_config" not in (tmp_path / "release" / "config.json").read_text()
    assert raw_config == json.loads((source / "config.json").read_text())
    convert(tmp_path / "release", tmp_path / "package", trunk="bf16")
    loaded, _ = load(tmp_path / "package")
    ids = some_ids(model.config)
    in_bfloat16 = tree_map(
        lambda p: p.astype(mx.bfloat16).astype(mx.float32) if p.ndim == 3 else p,
        tree_map(lambda p: p.astype(mx.float32), as_stored(model.parameters())),
    )
    model.update(in_bfloat16)
    assert relative_error(loaded(ids), model(ids)) < 1e-5


def test_mlx_lm_opens_it_too(source: Path, tmp_path: Path) -> None:
    model = trained(source)
    release = exported(source, tmp_path / "release", model)
    convert(release, tmp_path / "package", trunk="bf16")
    ids = some_ids(model.config)
    expected = as_used(model)(ids)
    # mlx-lm reads releases of K3 alone, and gives Kimi Linear's inner norms another epsilon.
    is_k3 = model.config.model_type == "kimi_k3"
    folders, bound = [tmp_path / "package"], 1e-2
    if is_k3:
        folders, bound = [release, *folders], 1e-4
    for folder in folders:
        theirs, _ = mlx_lm_load_model(folder)
        theirs.set_dtype(mx.float32)
        assert relative_error(theirs(ids), expected) < bound


def test_what_is_converted_from_it_verifies(source: Path, tmp_path: Path) -> None:
    release = exported(source, tmp_path / "release", trained(source))
    package = tmp_path / "package"
    convert(release, package)
    arguments = ["verify", str(package), "--against", str(release), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["problems"] == []


def test_tensors_are_those_of_the_release(source: Path, tmp_path: Path) -> None:
    model = trained(source)
    release = exported(source, tmp_path / "release", model)
    config, tensors = model.config, all_tensors(release)
    wanted = {t.name: (t.dtypes[0], [*t.shapes[0]]) for t in release_tensors(config, "mxfp4")}
    assert {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()} == wanted
    index = json.loads((release / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in tensors.values())
    layers = config.num_hidden_layers
    for name, file in index["weight_map"].items():
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name else layers
        assert file == f"model-{int(layer) + 1:05}-of-{layers + 1:06}.safetensors"
    # Released with zeros behind the heads.
    [name] = [n for n in tensors if n.endswith("layers.0.self_attn.A_log")]
    stored = np.frombuffer(tensors[name][2], np.float32)
    heads = config.kda_num_heads
    assert np.array_equal(stored[:heads], model.layers[0].self_attn.A_log)
    assert not stored[heads:].any()


def test_an_expert_is_its_rounded_weights(start: Path, tmp_path: Path) -> None:
    model = trained(start)
    tensors = all_tensors(exported(start, tmp_path / "release", model))
    experts = model.layers[2].mlp.switch_mlp
    for theirs, ours in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        prefix = f"language_model.model.layers.2.block_sparse_moe.experts.5.{theirs}.weight_"
        packed, scales = (
            np.frombuffer(raw, np.uint8).reshape(shape)
            for _, shape, raw in (tensors[prefix + part] for part in ("packed", "scale"))
        )
        expected = mxfp4_fake_quantize(experts[ours].weight[5])
        assert np.array_equal(decode(packed, scales), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_survive_too(start: Path, tmp_path: Path, variant: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((start / "config.json").read_bytes())
    edit_json(source / "config.json", lambda c: c["text_config"].update(VARIANTS[variant]))
    model = trained(source)
    release = exported(source, tmp_path / "release", model)
    convert(release, tmp_path / "package", trunk="bf16")
    ids = some_ids(model.config)
    assert relative_error(load(tmp_path / "package")[0](ids), as_used(model)(ids)) < 1e-5


@contextmanager
def failing_at(shard: int, error: BaseException, monkeypatch: Any) -> Iterator[None]:
    """The write of the ``shard``-th file fails."""
    write, count = exporting._write, 0

    def fail(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == shard:
            raise error
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_write", fail)
        yield


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=repr)
def test_it_appears_whole_or_not_at_all(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model, out = trained(start), tmp_path / "release"
    with failing_at(4, error, monkeypatch), pytest.raises(type(error)):
        exported(start, out, model)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "release.partial").mkdir()  # What a run that was killed left behind.
    (tmp_path / "release.partial" / "model-00001-of-000006.safetensors").touch()
    exported(start, out, model)
    assert [path.name for path in tmp_path.iterdir()] == ["release"]
    shards = [f"model-{n:05}-of-000006.safetensors" for n in range(1, 7)]
    others = ["config.json", "model.safetensors.index.json"]
    assert sorted(path.name for path in out.iterdir()) == [*others[:1], *shards, others[1]]


def test_the_same_model_gives_the_same_bytes(start: Path, tmp_path: Path) -> None:
    first, second = (exported(start, tmp_path / name, trained(start)) for name in "ab")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_training_computes_with_what_is_stored(start: Path) -> None:
    """What is rounded to bfloat16 while training, and what stays."""
    model = trained(start)
    parameters = dict(tree_flatten(model.parameters()))
    stored = dict(tree_flatten(as_stored(model.parameters())))
    table = {t.name: t.dtypes[0] for t in release_tensors(K3Config.from_file(start), "mxfp4")}
    for name, parameter in stored.items():
        released = table.get(f"language_model.{name}")
        if released is None or name.endswith("mlp.gate.weight"):
            continue
        rounded = parameters[name].astype({"F32": mx.float32, "BF16": mx.bfloat16}[released])
        assert mx.array_equal(parameter, rounded), name
    gate = stored["model.layers.1.mlp.gate.weight"]
    assert gate.dtype == mx.float32 and mx.array_equal(gate, gate.astype(mx.bfloat16))
    assert stored["model.layers.0.self_attn.qkv_conv"].dtype == mx.float32
