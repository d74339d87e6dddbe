"""config.json: the release's, its relatives', and wrong ones."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_k3 import CheckpointError, K3Config, K3Error, UnsupportedError, nano

from .conftest import REPOSITORY

RELEASE = REPOSITORY / "tests" / "data" / "kimi-k3-config.json"


def release() -> dict[str, Any]:
    return json.loads(RELEASE.read_text())


def test_the_release() -> None:
    config = K3Config.from_file(RELEASE)
    mla = [layer for layer in range(93) if layer not in config.kda_layers]
    assert mla == [*range(3, 92, 4), 92]
    assert len(config.kda_layers) == 69
    assert config.moe_layers == tuple(range(1, 93))
    assert set(config.expert_counts) == {0, 896}
    assert (config.hidden_size, config.vocab_size, config.intermediate_size) == (
        7168,
        163840,
        33792,
    )
    assert (config.num_attention_heads, config.kda_num_heads, config.kda_head_dim) == (96, 96, 128)
    assert (config.q_lora_rank, config.kv_lora_rank) == (1536, 512)
    dims = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    assert dims == (128, 64, 128)
    assert (config.num_experts_per_token, config.num_shared_experts) == (16, 2)
    assert config.has_latent_moe and config.latent_moe_use_norm and config.moe_renormalize
    assert (config.expert_dim, config.moe_intermediate_size) == (3584, 3072)
    assert (config.activation_situ_beta, config.activation_situ_linear_beta) == (4.0, 25.0)
    assert (config.gate_lower_bound, config.use_full_rank_gate) == (-5.0, True)
    assert (config.attn_res_block_size, config.rms_norm_eps) == (12, 1e-5)
    assert config.max_position_embeddings == 1_048_576
    ids = (config.bos_token_id, config.eos_token_ids, config.pad_token_id)
    assert ids == (163584, (163586,), 163839)
    assert config.media_placeholder_token_id == 163605
    assert config.weight_prefix == "language_model."
    assert config.vision_config["vt_num_hidden_layers"] == 27


def test_kimi_linear(golden: Path) -> None:
    config = K3Config.from_file(golden / "tiny-kimi-linear")
    assert config.model_type == "kimi_linear" and config.weight_prefix == ""
    assert config.attn_res_block_size is None and config.q_lora_rank is None
    assert config.gate_lower_bound is None and not config.use_full_rank_gate
    assert not config.has_latent_moe and config.expert_dim == config.hidden_size
    assert config.hidden_act == "silu" and not config.mla_use_output_gate


def test_pruned_builds_list_their_experts() -> None:
    raw = release()
    counts = [0] + [896] * 46 + [448] * 46
    raw["text_config"]["expert_counts"] = counts
    config = K3Config.from_dict(raw)
    assert config.expert_counts == tuple(counts)
    raw["text_config"]["expert_counts"] = counts[1:]
    with pytest.raises(CheckpointError, match="expert_counts lists 92 layers of 93"):
        K3Config.from_dict(raw)
    raw["text_config"]["expert_counts"] = [*counts[:-1], 15]
    with pytest.raises(CheckpointError, match="layer 92 has 15 experts"):
        K3Config.from_dict(raw)


def test_the_layer_lists_must_partition_the_layers() -> None:
    for lists in ({"kda_layers": [1, 2]}, {"full_attn_layers": [0, 93]}):
        raw = release()
        raw["text_config"]["linear_attn_config"] |= lists
        with pytest.raises(CheckpointError, match="every layer from 1 to 93 exactly once"):
            K3Config.from_dict(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mla_use_nope": False}, "NoPE"),
        ({"moe_router_activation_func": "tanh"}, "tanh"),
    ],
)
def test_variants_that_are_not_implemented(change: dict, message: str) -> None:
    raw = release()
    raw["text_config"] |= change
    with pytest.raises(UnsupportedError, match=message):
        K3Config.from_dict(raw)


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'llama'"):
        K3Config.from_dict({"model_type": "llama"})


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff\xfe", b'"kimi_k3"'])
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        K3Config.from_file(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; is this a model folder"):
        K3Config.from_file(tmp_path)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
SMALL = json.loads((nano.path() / "config.json").read_text())
INNER = SMALL["text_config"]["linear_attn_config"]
PLACES = [
    *[(key,) for key in SMALL],
    *[("text_config", key) for key in SMALL["text_config"]],
    *[("text_config", "linear_attn_config", key) for key in INNER],
]


@settings(max_examples=600, deadline=None)
@given(place=st.sampled_from(PLACES), value=ANY_JSON)
def test_any_value_anywhere_is_read_or_refused_in_one_line(place: tuple, value: Any) -> None:
    raw = copy.deepcopy(SMALL)
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        K3Config.from_dict(raw)
    except K3Error as e:
        assert "\n" not in str(e) and str(e).startswith("config.json: ")


@pytest.mark.parametrize("value", [0.5, -1, -2.5])
def test_a_frequency_of_expert_layers_is_at_least_one(value: float) -> None:
    raw = copy.deepcopy(SMALL)
    raw["text_config"]["moe_layer_freq"] = value
    with pytest.raises(CheckpointError, match=f"moe_layer_freq is {value}"):
        K3Config.from_dict(raw)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_missing_field_is_named_or_has_a_default(place: tuple) -> None:
    raw = copy.deepcopy(SMALL)
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    try:
        K3Config.from_dict(raw)
    except CheckpointError as e:
        assert place[-1] in str(e) or place[-1] == "text_config"
    except UnsupportedError:
        assert place[-1] in ("model_type", "mla_use_nope")
