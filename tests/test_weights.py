"""Builds that others publish: pruned unevenly, packed, under older variants of mlx-lm's names."""

import json

import mlx.core as mx
import pytest

from mlx_k3 import CheckpointError, load

from .support.measure import relative_error
from .support.models import convert_golden

KEPT = {1: [0, 2, 3, 5, 6, 8, 9, 15], 2: list(range(16)), 3: [1, 4, 5, 7], 4: [0, 1, 2, 3, 4, 14]}


@pytest.fixture
def package(golden, tmp_path):
    return convert_golden(golden, "tiny-text", tmp_path)


def read_tensors(folder):
    tensors = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors |= mx.load(str(file))
    return tensors


def write_folder(out, config, tensors):
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), tensors)
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_experts_may_differ_by_layer(package, tmp_path, golden):
    """A pruned layer is the whole one whose other experts are never chosen."""
    config = json.loads((package / "config.json").read_text())
    tensors = read_tensors(package)
    whole, _ = load(package, dtype="float32")
    for layer, kept in KEPT.items():
        mlp, kept = f"language_model.model.layers.{layer}.mlp", mx.array(kept)
        for name in list(tensors):
            if name.startswith(f"{mlp}.switch_mlp") or name in (
                f"{mlp}.gate.weight",
                f"{mlp}.e_score_correction_bias",
            ):
                tensors[name] = tensors[name][kept]
        never = mx.ones((16,), mx.bool_)
        never[kept] = False
        bias = whole.layers[layer].mlp.e_score_correction_bias
        whole.layers[layer].mlp.e_score_correction_bias = mx.where(never, -mx.inf, bias)
    counts = [0, *(len(KEPT[layer]) for layer in (1, 2, 3, 4))]
    config["text_config"]["expert_counts"] = counts
    pruned, _ = load(write_folder(tmp_path / "pruned", config, tensors), dtype="float32")
    assert [len(layer.mlp.gate.weight) for layer in pruned.layers[1:]] == counts[1:]
    ids = mx.load(str(golden / "tiny-text" / "expected.safetensors"))["input_ids"]
    assert relative_error(pruned(ids), whole(ids)) < 1e-5


def test_older_names_and_a_packed_trunk(package, tmp_path, golden):
    """Separate q, k, v; residual pairs as ``proj_weight``; the gate at 8 bits; padded A_log."""
    config, tensors = json.loads((package / "config.json").read_text()), read_tensors(package)
    old = {}
    for name, array in tensors.items():
        stem, _, _ = name.rpartition(".")
        if name.endswith("qkv_proj.weight"):
            for part, rows in zip("qkv", mx.split(array, 3), strict=True):
                old[name.replace("qkv_proj", f"{part}_proj")] = rows
        elif name.endswith("qkv_conv.conv.weight"):
            for part, rows in zip("qkv", mx.split(array, 3), strict=True):
                old[name.replace("qkv_conv", f"{part}_conv")] = rows
        elif stem.endswith(("_res_proj", "_res_norm")):
            base, _, part = stem.rpartition("_")
            old[f"{base}.{part}_weight"] = array
        elif name.endswith("mlp.gate.weight"):
            parts = mx.quantize(array, group_size=64, bits=8)
            for suffix, part in zip(("weight", "scales", "biases"), parts, strict=True):
                old[f"{stem}.{suffix}"] = part
        elif name.endswith("A_log"):
            old[name] = mx.pad(array, (0, 124))
        else:
            old[name] = array
    model, _ = load(write_folder(tmp_path / "old", config, old), dtype="float32")
    reference, _ = load(package, dtype="float32")
    ids = mx.load(str(golden / "tiny-text" / "expected.safetensors"))["input_ids"]
    for layer, same in zip(model.layers, reference.layers, strict=True):
        if "gate" in layer.mlp:
            gate = layer.mlp.gate
            dense = mx.dequantize(gate.weight, gate.scales, gate.biases, group_size=64, bits=8)
            same.mlp.gate.weight = dense
    assert relative_error(model(ids), reference(ids)) < 1e-4


def test_A_log_with_a_real_tail_is_refused(package, tmp_path):
    config, tensors = json.loads((package / "config.json").read_text()), read_tensors(package)
    name = "language_model.model.layers.0.self_attn.A_log"
    tensors[name] = mx.concatenate([tensors[name], mx.ones((2,))])
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.A_log holds more than its 4"):
        load(write_folder(tmp_path / "wrong", config, tensors))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("language_model.model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda t: t.update({"language_model.model.extra.weight": mx.zeros(2)}),
            "model.extra.weight is not part of this model",
        ),
        (
            lambda t: t.update({"language_model.model.norm.weight": mx.zeros(3)}),
            r"model.norm.weight has shape \[3\]",
        ),
    ],
)
def test_wrong_tensors_are_one_clear_line(package, tmp_path, change, message):
    config, tensors = json.loads((package / "config.json").read_text()), read_tensors(package)
    change(tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        load(write_folder(tmp_path / "wrong", config, tensors))
    assert "\n" not in str(error.value)


def test_the_release_s_own_folder_is_sent_to_convert(golden):
    with pytest.raises(CheckpointError, match="mlx-k3 convert"):
        load(golden / "tiny-text")
