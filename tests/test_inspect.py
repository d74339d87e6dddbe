"""What ``inspect`` says of a folder: the real model's numbers, and what is missing."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_k3.checkpoint.index import LocalFolder
from mlx_k3.checkpoint.summary import describe, kind_of, parameters
from mlx_k3.cli import app
from mlx_k3.config import K3Config
from mlx_k3.convert.stream import convert
from mlx_k3.errors import CheckpointError

from .support.releases import all_tensors, copy_release

SHARD = "model-0000{}-of-000006.safetensors"


@pytest.fixture
def release(golden, tmp_path) -> Path:
    return copy_release(golden / "tiny-text", tmp_path / "release")


def test_the_real_model_s_parameters(repository):
    config = repository.parent / "shared/reference/kimi-k3-config.json"
    if not config.is_file():
        pytest.skip("the real configuration lies beside the checkout only")
    weights = parameters(K3Config.from_file(config))
    assert 2.775e12 < weights["total"] < 2.785e12
    assert 103e9 < weights["active"] < 105e9
    assert 0.978 < weights["experts"] / weights["total"] < 0.980
    assert weights["vision"] == pytest.approx(401e6 + 75e6, rel=0.1)


@pytest.mark.parametrize("name", ["tiny-text", "tiny-multimodal", "tiny-kimi-linear"])
def test_parameters_and_bytes_are_those_of_the_tensors(golden, name):
    tensors = all_tensors(golden / name)
    facts = describe(LocalFolder(golden / name))
    assert facts["complete"] and facts["form"] == "release"
    assert sum(facts["bytes"].values()) == sum(len(raw) for _, _, raw in tensors.values())
    count = 0
    for key, (dtype, _, raw) in tensors.items():
        if key.endswith("weight_packed"):
            count += 2 * len(raw)
        elif key.endswith("A_log"):
            count += {"tiny-multimodal": 3, "tiny-text": 4, "tiny-kimi-linear": 3}[name]
        elif not key.endswith("weight_scale"):
            count += len(raw) // (2 if dtype == "BF16" else 4)
    assert facts["parameters"]["total"] == count
    experts = sum(len(raw) for key, (_, _, raw) in tensors.items() if ".experts." in key)
    assert facts["bytes"]["routed experts"] == experts


def test_precision_of_every_form(golden, tmp_path):
    def said(folder: Path) -> tuple[str, str, str]:
        facts = describe(LocalFolder(folder))
        assert facts["complete"], facts["problems"]
        return facts["form"], facts["precision"]["trunk"], facts["precision"]["experts"]

    source = golden / "tiny-text"
    assert said(source) == ("release", "bf16", "mxfp4")
    for trunk, words in (
        ("bf16", "bf16"),
        ("q8", "8 bit affine, groups of 64"),
        ("q4", "4 bit affine, groups of 64"),
        ("mxfp8", "mxfp8"),
    ):
        convert(source, tmp_path / trunk, trunk=trunk)
        assert said(tmp_path / trunk) == ("MLX", words, "mxfp4")
    convert(source, tmp_path / "left", trunk="bf16", experts="reference")
    assert said(tmp_path / "left") == ("MLX, experts in the release", "bf16", "mxfp4")
    linear = golden / "tiny-kimi-linear"
    assert said(linear) == ("release", "bf16", "bf16")
    convert(linear, tmp_path / "linear", experts="mxfp4", trunk="bf16")
    assert said(tmp_path / "linear") == ("MLX", "bf16", "mxfp4")


def test_a_half_downloaded_release_says_what_is_missing(release):
    (release / SHARD.format(2)).unlink()
    os.truncate(release / SHARD.format(4), 50_000)
    facts = describe(LocalFolder(release))
    assert not facts["complete"]
    missing, short = facts["problems"]
    assert missing == f"{SHARD.format(2)} is missing"
    assert short.startswith(f"{SHARD.format(4)} ends 357,128 bytes early")
    assert facts["architecture"]["layers"] == 5
    (release / "model.safetensors.index.json").unlink()
    problems = describe(LocalFolder(release))["problems"]
    assert any("tensors are not in the shards" in problem for problem in problems)


def test_an_mlx_folder_with_a_file_missing(release, tmp_path):
    convert(release, tmp_path / "out")
    (tmp_path / "out/model-experts-00003-of-00004.safetensors").unlink()
    facts = describe(LocalFolder(tmp_path / "out"))
    assert facts["problems"] == ["model-experts-00003-of-00004.safetensors is missing"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed",
            "routed experts",
        ),
        ("model.layers.1.mlp.switch_mlp.up_proj.scales", "routed experts"),
        ("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.1.mlp.routed_expert_norm.weight", "latent projections"),
        ("model.layers.1.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "dense MLP"),
        ("language_model.model.layers.0.self_attn.o_norm.weight", "attention"),
        ("language_model.model.layers.0.self_attention_res_proj.weight", "norms and residual mix"),
        ("vision_tower.encoder.blocks.0.mlp.fc0.weight", "vision"),
        ("lm_head.weight", "embedding and head"),
    ],
)
def test_kinds(name, kind):
    """Always-on tensors must never be counted with the experts by a loose match."""
    assert kind_of(name) == kind


def test_the_command(golden, release, tmp_path):
    runner = CliRunner()
    shown = runner.invoke(app, ["inspect", str(release)])
    assert shown.exit_code == 0
    for words in ("kimi_k3", "5: 3 KDA, 2 gated MLA", "16 in each of 4 layers", "1.69 M"):
        assert words in shown.stdout
    facts = json.loads(runner.invoke(app, ["inspect", str(release), "--json"]).stdout)
    assert facts["architecture"]["experts"] == 16
    convert(release, tmp_path / "left", experts="reference")
    (release / SHARD.format(3)).unlink()
    facts = json.loads(runner.invoke(app, ["inspect", str(tmp_path / "left"), "--json"]).stdout)
    assert not facts["complete"] and "gone" in facts["problems"][0]


def test_an_unfinished_conversion_is_called_that(release, tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(release, tmp_path / "out", progress=stop)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")])
    assert isinstance(result.exception, CheckpointError) and "not finished" in str(result.exception)
