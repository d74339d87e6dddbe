"""Names, shapes and dtypes of every tensor, against the real release's own list."""

import json
import math
import re
from collections import Counter

import pytest

from mlx_k3.checkpoint.names import (
    expert_probe,
    is_ignored,
    is_mlx_name,
    mlx_tensors,
    release_tensors,
)
from mlx_k3.checkpoint.reader import NUMPY_DTYPES
from mlx_k3.config import K3Config

from .support.releases import all_tensors


@pytest.fixture(scope="module")
def reference(repository):
    folder = repository.parent / "shared" / "reference"
    if not folder.is_dir():
        pytest.skip("the real release's tensor list lies beside the checkout only")
    return folder


def test_the_real_release_tensor_by_tensor(reference):
    """497,220 names, and their sizes add up to the release's total_size to the byte."""
    config = K3Config.from_file(reference / "kimi-k3-config.json")
    expected = list(release_tensors(config, "mxfp4"))
    listed = json.loads((reference / "kimi-k3-tensors.json").read_text())
    names = {tensor.name for tensor in expected}
    assert len(names) == len(expected) == listed["total_tensors"] == 497_220
    assert not set(listed["tensors"]) - names
    # The list holds every non-expert tensor, so nothing may be missing from it either.
    assert {n for n in names if ".experts." not in n} == {
        n for n in listed["tensors"] if ".experts." not in n
    }
    total = sum(
        math.prod(tensor.shapes[0]) * NUMPY_DTYPES[tensor.dtypes[0]].itemsize for tensor in expected
    )
    assert total == listed["metadata"]["total_size"] == 1_560_860_324_864


def test_a_layer_lies_in_one_shard(reference):
    """What lets the converter work shard by shard from the Hub: layer L is in shard L + 1."""
    listed = json.loads((reference / "kimi-k3-tensors.json").read_text())["tensors"]
    for name, file in listed.items():
        if match := re.search(r"model\.layers\.(\d+)\.", name):
            assert file == f"model-{int(match[1]) + 1:05}-of-000096.safetensors"


@pytest.mark.parametrize("name", ["tiny-text", "tiny-multimodal", "tiny-kimi-linear"])
def test_golden_checkpoints(golden, name):
    folder = golden / name
    config = K3Config.from_file(folder)
    stored = all_tensors(folder)
    form = "mxfp4" if expert_probe(config) in stored else "bf16"
    expected = {tensor.name: tensor for tensor in release_tensors(config, form)}
    assert set(expected) == set(stored)
    for key, (dtype, shape, _) in stored.items():
        assert tuple(shape) in expected[key].shapes, key
        assert dtype in expected[key].dtypes, key


def test_experts_differ_per_layer(golden):
    raw = json.loads((golden / "tiny-text/config.json").read_text())
    raw["text_config"]["expert_counts"] = [0, 16, 8, 5, 4]
    config = K3Config.from_dict(raw)
    counts = Counter(
        re.search(r"layers\.(\d)", tensor.name)[1]
        for tensor in release_tensors(config, "mxfp4")
        if tensor.name.endswith("w1.weight_packed")
    )
    assert counts == {"1": 16, "2": 8, "3": 5, "4": 4}
    router = {
        t.name: t.shape for t in mlx_tensors(config, "mxfp4") if t.name.endswith("mlp.gate.weight")
    }
    assert router["language_model.model.layers.3.mlp.gate.weight"] == (5, 128)


def test_prediction_heads_are_ignored_and_nothing_else(golden):
    config = K3Config.from_file(golden / "tiny-text")
    for name in ("model.mtp.0.norm.weight", "mtp.norm.weight", "model.layers.5.norm.weight"):
        assert is_ignored(config, f"language_model.{name}")
    for name in ("model.layers.4.extra", "model.layers.x.norm.weight", "lm_head.weight", "mtpx"):
        assert not is_ignored(config, f"language_model.{name}")


def test_a_converted_folder_is_recognised_by_names():
    assert is_mlx_name("language_model.model.layers.1.mlp.switch_mlp.up_proj.weight")
    assert is_mlx_name("model.layers.3.self_attn.embed_q.scales")
    assert not is_mlx_name("model.layers.1.block_sparse_moe.experts.0.w1.weight")
