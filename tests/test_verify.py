"""Verification: every kind of damage is found and named, and nothing sound is suspected."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_k3.cli import app
from mlx_k3.convert.profiles import PROFILES
from mlx_k3.convert.stream import convert
from mlx_k3.convert.verify import verify
from mlx_k3.errors import CheckpointError

from .support.releases import copy_release, edit_json, read_tensors, replace_tensor, write_tensors

TRUNK = "model-trunk-00002-of-00006.safetensors"
EXPERTS = "model-experts-00001-of-00004.safetensors"


@pytest.fixture
def release(golden, tmp_path) -> Path:
    return copy_release(golden / "tiny-text", tmp_path / "release")


@pytest.fixture
def out(release, tmp_path) -> Path:
    convert(release, tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of ``path``."""
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("trunk", PROFILES)
@pytest.mark.parametrize("name", ["tiny-text", "tiny-multimodal", "tiny-kimi-linear"])
def test_a_sound_conversion_passes(golden, tmp_path, name, trunk):
    convert(golden / name, tmp_path / "out", trunk=trunk)
    report = verify(tmp_path / "out", against=golden / name)
    assert report["ok"] and report["problems"] == []
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    suffixes = (".scales", ".biases")
    trunk_scales = {
        key.rpartition(".")[0]
        for key in index["weight_map"]
        if key.endswith(".scales") and "switch_mlp" not in key
    }
    plain = [
        key
        for key in index["weight_map"]
        if key.rpartition(".")[0] not in trunk_scales or not key.endswith((*suffixes, ".weight"))
    ]
    assert report["tensors_within_bound"] == len(trunk_scales)
    assert report["tensors_equal"] == len(plain)


def test_quantized_experts_are_held_to_their_bound(golden, tmp_path):
    convert(golden / "tiny-kimi-linear", tmp_path / "out", experts="mxfp4")
    report = verify(tmp_path / "out", against=golden / "tiny-kimi-linear")
    assert report["ok"] and report["tensors_within_bound"] == 5 * 3


DAMAGE = {
    "a bit of an expert": (lambda out: flip(out / EXPERTS), f"{EXPERTS}: its bytes have changed"),
    "a bit of the trunk": (lambda out: flip(out / TRUNK), f"{TRUNK}: its bytes have changed"),
    "a bit of the padding": (lambda out: flip(out / TRUNK, 16000), f"{TRUNK}: its bytes have"),
    "shorter": (lambda out: os.truncate(out / EXPERTS, 5000), f"{EXPERTS} has 5,000 bytes"),
    "gone": (lambda out: (out / TRUNK).unlink(), f"{TRUNK}: No such file"),
    "the config": (
        lambda out: edit_json(out / "config.json", lambda c: c["text_config"].update(vocab_size=9)),
        "config.json has",
    ),
    "one file too many": (
        lambda out: shutil.copyfile(out / TRUNK, out / "model-00001.safetensors"),
        "model-00001.safetensors does not belong here",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(out, damage):
    spoil, says = DAMAGE[damage]
    spoil(out)
    report = verify(out)
    assert not report["ok"]
    (problem,) = report["problems"]
    assert problem.startswith(says)


def reseal(out: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed: only the source can tell then."""
    raw = (out / name).read_bytes()
    described = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    edit_json(out / "mlx_k3.json", lambda m: m["files"].update({name: described}))
    assert verify(out)["ok"]


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_two_experts_that_changed_places(out, release, part):
    """Every expert is intact and among the source's: only their order is wrong."""
    name = f"language_model.model.layers.1.mlp.switch_mlp.up_proj.{part}"
    _, shape, raw = read_tensors(out / EXPERTS)[name]
    one = len(raw) // shape[0]
    swapped = raw[one : 2 * one] + raw[:one] + raw[2 * one :]
    (out / EXPERTS).write_bytes((out / EXPERTS).read_bytes().replace(raw, swapped))
    reseal(out, EXPERTS)
    assert verify(out, against=release)["problems"] == [
        f"{EXPERTS}: {name} differs from the source"
    ]


def test_a_file_with_other_tensors(out, release):
    tensors = read_tensors(out / EXPERTS)
    tensors.popitem()
    write_tensors(out / EXPERTS, tensors)
    reseal(out, EXPERTS)
    assert verify(out, against=release)["problems"] == [
        f"{EXPERTS}: its tensors are not those that the source would give"
    ]


def test_a_quantized_weight_of_another_layer(out, release):
    """Right shape, right precision, plausible values: only the source knows better."""
    source = json.loads((release / "model.safetensors.index.json").read_text())["weight_map"]
    one, two = (f"language_model.model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1))
    tensors = {n: read_tensors(release / source[n])[n] for n in (one, two)}
    replace_tensor(release, one, tensors[two])
    report = verify(out, against=release)
    (problem,) = report["problems"]
    assert problem.startswith(f"model-trunk-00001-of-00006.safetensors: {one} is 1.4")
    assert problem.endswith("q8 allows 0.06")


def test_an_exact_trunk_is_compared_to_the_byte(release, tmp_path):
    convert(release, tmp_path / "out", trunk="bf16")
    name = "language_model.model.layers.3.self_attn.kv_b_proj.weight"
    source = json.loads((release / "model.safetensors.index.json").read_text())["weight_map"]
    dtype, shape, raw = read_tensors(release / source[name])[name]
    replace_tensor(release, name, (dtype, shape, bytes([raw[0] ^ 1]) + raw[1:]))
    report = verify(tmp_path / "out", against=release)
    # Its first value is in the half that becomes embed_q.
    assert report["problems"] == [
        "model-trunk-00004-of-00006.safetensors: "
        "language_model.model.layers.3.self_attn.embed_q.weight differs from the source"
    ]


def test_another_source(out, golden):
    report = verify(out, against=golden / "tiny-multimodal")
    assert len(report["problems"]) == 11  # ten files of other shapes, and no vision file


def test_a_reference_needs_its_release(release, tmp_path):
    convert(release, tmp_path / "out", experts="reference")
    assert verify(tmp_path / "out", against=release)["ok"]
    (release / "model-00002-of-000006.safetensors").unlink()
    with pytest.raises(CheckpointError, match="reads its experts from"):
        verify(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": [], "experts": {}, "job": {}}'])
def test_a_damaged_manifest(out, text):
    (out / "mlx_k3.json").write_text(text)
    with pytest.raises(CheckpointError, match="is damaged; convert it again"):
        verify(out)


def test_what_was_never_converted(release, tmp_path):
    with pytest.raises(CheckpointError, match="was this converted by mlx-k3"):
        verify(release)
    with pytest.raises(CheckpointError):
        verify(tmp_path / "nowhere")


def test_the_command(out, release):
    runner = CliRunner()
    fine = runner.invoke(app, ["verify", str(out), "--against", str(release)])
    assert fine.exit_code == 0 and "92 tensors equal those of" in fine.stdout
    report = json.loads(runner.invoke(app, ["verify", str(out), "--json"]).stdout)
    assert report["ok"] and report["files"] == 12
    flip(out / EXPERTS)
    broken = runner.invoke(app, ["verify", str(out), "--json"])
    assert broken.exit_code == 2 and json.loads(broken.stdout)["ok"] is False
    broken = runner.invoke(app, ["verify", str(out)])
    assert isinstance(broken.exception, CheckpointError) and EXPERTS in broken.stdout
