"""Conversion: the right bytes under the right names, and nothing begun that must be refused."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import load_model
from typer.testing import CliRunner

from mlx_k3.checkpoint.direct import DirectWriter
from mlx_k3.checkpoint.extents import merge, open_experts
from mlx_k3.checkpoint.writer import ALIGNMENT
from mlx_k3.cli import app
from mlx_k3.convert.plan import NothingToDo, make_plan
from mlx_k3.convert.profiles import PROFILES
from mlx_k3.convert.source import FolderSource
from mlx_k3.convert.stream import convert, open_conversion
from mlx_k3.errors import BudgetError, CheckpointError, UnsupportedError

from .support.measure import relative_error
from .support.releases import (
    add_tensor,
    all_tensors,
    contents,
    copy_release,
    edit_json,
    random_release,
    read_tensors,
    replace_tensor,
    write_tensors,
)

GOLDEN = ["tiny-text", "tiny-multimodal", "tiny-kimi-linear"]
LAYER_0 = "language_model.model.layers.0."


@pytest.fixture
def release(golden, tmp_path) -> Path:
    return copy_release(golden / "tiny-text", tmp_path / "release")


def load_all(folder: Path) -> dict[str, mx.array]:
    return {k: v for p in folder.glob("model*.safetensors") for k, v in mx.load(str(p)).items()}


def same(one: mx.array, two: mx.array) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and bool(mx.array_equal(one, two))


@pytest.mark.parametrize("name", GOLDEN)
def test_equals_what_mlx_lm_makes_of_the_release(golden, tmp_path, name):
    """mlx-lm's own reading of the release is an independent statement of names and values."""
    convert(golden / name, tmp_path / "out", trunk="bf16")
    model, _ = load_model(tmp_path / "out", lazy=True)
    want = model.sanitize(load_all(golden / name))
    got = load_all(tmp_path / "out")
    vision = {k for k in got if k.startswith(("vision_tower.", "mm_projector."))}
    assert set(got) - vision == set(want)
    for key, value in want.items():
        assert same(got[key], value), key


def test_vision_passes_unchanged(golden, tmp_path):
    convert(golden / "tiny-multimodal", tmp_path / "out", trunk="q4")
    want = all_tensors(golden / "tiny-multimodal")
    got = read_tensors(tmp_path / "out/model-vision-00001-of-00001.safetensors")
    assert got == {k: v for k, v in want.items() if not k.startswith("language_model.")}
    assert len(got) == 3 + 3 * 6 + 3


@pytest.mark.parametrize("form", ["copy", "reference"])
@pytest.mark.parametrize("name", GOLDEN)
def test_every_expert_is_the_source_s_to_the_byte(golden, tmp_path, name, form):
    convert(golden / name, tmp_path / "out", trunk="bf16", experts=form)
    source = all_tensors(golden / name)
    prefix = "" if name == "tiny-kimi-linear" else "language_model."
    suffixes = ["weight"] if name == "tiny-kimi-linear" else ["weight_packed", "weight_scale"]
    experts = open_experts(tmp_path / "out")
    assert experts.form == form
    for layer in experts.layers:
        for number in range(experts.count(layer)):
            base = f"{prefix}model.layers.{layer}.block_sparse_moe.experts.{number}."
            want = [source[f"{base}{w}.{s}"][2] for w in ("w1", "w3", "w2") for s in suffixes]
            extents = experts.extents(layer, number)
            got = []
            for path, offset, nbytes in extents:
                with open(path, "rb") as file:
                    file.seek(offset)
                    got.append(file.read(nbytes))
            assert [hashlib.sha256(x).digest() for x in got] == [
                hashlib.sha256(x).digest() for x in want
            ]
            assert [len(x) for x in got] == [p.nbytes for p in experts.pieces(layer)]
        with pytest.raises(IndexError):
            experts.extents(layer, experts.count(layer))


def test_both_forms_describe_an_expert_alike(golden, tmp_path):
    for form in ("copy", "reference"):
        convert(golden / "tiny-text", tmp_path / form, experts=form)
    copied, left = (open_experts(tmp_path / form) for form in ("copy", "reference"))
    assert copied.layers == left.layers == (1, 2, 3, 4)
    assert [copied.pieces(i) for i in copied.layers] == [left.pieces(i) for i in left.layers]
    assert [p.name for p in left.pieces(1)] == [
        f"{projection}_proj.{part}"
        for projection in ("gate", "up", "down")
        for part in ("weight", "scales")
    ]
    # In the release the six lie back to back: one read. Stacked, they are six.
    (run,) = merge(left.extents(2, 7))
    assert run.nbytes == left.expert_bytes(2) and sorted(run.pieces) == list(range(6))
    assert len(merge(copied.extents(2, 7))) == 6


def test_stacked_experts_begin_on_a_page(golden, tmp_path):
    convert(golden / "tiny-text", tmp_path / "out")
    for layer in open_experts(tmp_path / "out").layers:
        first = open_experts(tmp_path / "out").extents(layer, 0)[0]
        assert first.offset == ALIGNMENT


@pytest.mark.parametrize("form", ["gone", "short", "replaced"])
def test_a_reference_to_another_release_is_refused(release, tmp_path, form):
    convert(release, tmp_path / "out", experts="reference")
    shard = release / "model-00003-of-000006.safetensors"
    if form == "gone":
        shard.rename(shard.with_suffix(".away"))
    elif form == "short":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        shard.write_bytes((release / "model-00002-of-000006.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00003.*--experts copy"):
        open_experts(tmp_path / "out")


def run_mlx_lm(folder: Path, expected: dict[str, mx.array]) -> tuple[float, float]:
    """Errors of prompt and decode logits in float32, everything but packed weights widened."""
    model, _ = load_model(folder)
    model.update(
        tree_map(
            lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
            model.parameters(),
        )
    )
    cache = model.make_cache()
    logits = model(expected["input_ids"], cache=cache)
    steps = expected["decode_ids"]
    decoded = [model(steps[:, t : t + 1], cache=cache) for t in range(steps.shape[1])]
    return (
        relative_error(logits, expected["logits"]),
        relative_error(mx.concatenate(decoded, axis=1), expected["decode_logits"]),
    )


def test_stock_mlx_lm_gives_the_reference_s_logits(golden, tmp_path):
    convert(golden / "tiny-text", tmp_path / "out", trunk="bf16")
    expected = mx.load(str(golden / "tiny-text/expected.safetensors"))
    converted = run_mlx_lm(tmp_path / "out", expected)
    direct = run_mlx_lm(golden / "tiny-text", expected)
    assert max(converted) < 1e-4 and max(direct) < 1e-4
    assert converted == direct


def test_stock_mlx_lm_runs_kimi_linear_as_well_as_it_can(golden, tmp_path):
    """Its inner norms' epsilon costs 2.5e-3 on this checkpoint, whoever converted it."""
    convert(golden / "tiny-kimi-linear", tmp_path / "out", trunk="bf16")
    expected = mx.load(str(golden / "tiny-kimi-linear/expected.safetensors"))
    assert max(run_mlx_lm(tmp_path / "out", expected)) < 4e-3


@pytest.mark.parametrize("trunk", [name for name in PROFILES if name != "bf16"])
def test_trunk_profiles(golden, tmp_path, trunk):
    """Linear layers are what mx.quantize makes of them, the rest is exact, mlx-lm loads it."""
    how = PROFILES[trunk]
    report = convert(golden / "tiny-text", tmp_path / "out", trunk=trunk)
    convert(golden / "tiny-text", tmp_path / "exact", trunk="bf16")
    got, want = load_all(tmp_path / "out"), load_all(tmp_path / "exact")
    quantized = {
        k.removesuffix(".scales") for k in got if k.endswith(".scales") and "switch_" not in k
    }
    errors: dict[str, list[float]] = {}
    for key, weight in want.items():
        module = key.rpartition(".")[0]
        if module not in quantized:
            assert same(got[key], weight), key
            continue
        parts = mx.quantize(weight, group_size=how.group_size, bits=how.bits, mode=how.mode)
        for part, name in zip(parts, ("weight", "scales", "biases"), strict=False):
            assert same(got[f"{module}.{name}"], part), key
        stored = mx.dequantize(
            *parts, group_size=how.group_size, bits=how.bits, mode=how.mode, dtype=mx.float32
        )
        difference = np.array(stored.astype(mx.float32)) - np.array(weight.astype(mx.float32))
        sums = errors.setdefault(module.rpartition(".")[2], [0.0, 0.0])
        sums[0] += float((difference.astype(np.float64) ** 2).sum())
        sums[1] += float((np.array(weight.astype(mx.float32)).astype(np.float64) ** 2).sum())
    told = report["trunk"]["relative_error"]
    assert set(told) == set(errors)
    for kind, (error, size) in errors.items():
        assert told[kind] == pytest.approx((error / size) ** 0.5, rel=1e-3)
        assert told[kind] <= how.max_error
    model, config = load_model(tmp_path / "out")
    assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all()
    assert {k: config["quantization"][k] for k in how.mlx} == how.mlx
    left = {k.rpartition(".")[2] for k in (m.rpartition(".")[0] for m in want) if k} & set(
        report["trunk"]["left_exact"]
    )
    assert left == set(report["trunk"]["left_exact"])


def test_what_must_stay_exact_does(golden, tmp_path):
    convert(golden / "tiny-text", tmp_path / "out", trunk="q4")
    for name in load_all(tmp_path / "out"):
        if name.endswith(".scales"):
            kind = name.split(".")[-2]
            assert kind not in ("gate", "norm", "A_log", "dt_bias", "conv"), name
            assert not kind.endswith(("norm", "_res_proj")), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    experts = {k: v for k, v in config["quantization"].items() if "switch_mlp" in k}
    assert len(experts) == 4 * 3
    assert set(map(str, experts.values())) == {str({"group_size": 32, "bits": 4, "mode": "mxfp4"})}


def test_an_exact_trunk_names_the_experts_format_only(golden, tmp_path):
    convert(golden / "tiny-text", tmp_path / "k3", trunk="bf16")
    convert(golden / "tiny-kimi-linear", tmp_path / "linear", trunk="bf16")
    k3, linear = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("k3", "linear")
    )
    assert k3["quantization"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert "quantization" not in linear


def test_large_tensors_are_quantized_in_rows_alike(golden, tmp_path, monkeypatch):
    """The blocks a tensor is read in must not show in the result."""
    convert(golden / "tiny-text", tmp_path / "whole")
    monkeypatch.setattr("mlx_k3.convert.blocks.ROWS_BYTES", 3000)
    monkeypatch.setattr("mlx_k3.convert.blocks.BLOCK_BYTES", 999)
    convert(golden / "tiny-text", tmp_path / "rows")
    whole, rows = contents(tmp_path / "whole"), contents(tmp_path / "rows")
    whole.pop("mlx_k3.json"), rows.pop("mlx_k3.json")  # the error sums round differently
    assert whole == rows


@pytest.mark.parametrize("block", [64, 512, 4096])
def test_blocks_are_not_reused_before_they_are_written(golden, tmp_path, monkeypatch, block):
    """Tensors of whole blocks, as K3's expert stacks are, and a disk that lags behind."""
    convert(golden / "tiny-text", tmp_path / "want", trunk="bf16")
    monkeypatch.setattr("mlx_k3.convert.blocks.BLOCK_BYTES", block)
    write = DirectWriter.write

    def write_late(self, data):
        time.sleep(2e-4)
        write(self, data)

    monkeypatch.setattr(DirectWriter, "write", write_late)
    convert(golden / "tiny-text", tmp_path / "got", trunk="bf16")
    assert contents(tmp_path / "got") == contents(tmp_path / "want")


def test_bf16_experts_become_mxfp4_only_when_asked(golden, tmp_path):
    convert(golden / "tiny-kimi-linear", tmp_path / "kept", trunk="bf16")
    report = convert(golden / "tiny-kimi-linear", tmp_path / "out", trunk="bf16", experts="mxfp4")
    kept, got = load_all(tmp_path / "kept"), load_all(tmp_path / "out")
    name = "model.layers.3.mlp.switch_mlp.up_proj"
    assert kept[f"{name}.weight"].dtype == mx.bfloat16
    weight, scales = mx.quantize(kept[f"{name}.weight"], group_size=32, bits=4, mode="mxfp4")
    assert same(got[f"{name}.weight"], weight) and same(got[f"{name}.scales"], scales)
    assert 0.05 < report["experts"]["relative_error"] < 0.2
    model, _ = load_model(tmp_path / "out")
    assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all()


@pytest.mark.parametrize("shape", ["heads", "padded", "four"])
def test_a_log_in_every_stored_shape(golden, release, tmp_path, shape):
    convert(golden / "tiny-text", tmp_path / "want", trunk="bf16")
    dtype, _, raw = all_tensors(release)[f"{LAYER_0}self_attn.A_log"]
    stored = {"heads": ([4], raw[:16]), "padded": ([128], raw), "four": ([1, 1, 4, 1], raw[:16])}
    replace_tensor(release, f"{LAYER_0}self_attn.A_log", (dtype, *stored[shape]))
    convert(release, tmp_path / "out", trunk="bf16")
    got, want = load_all(tmp_path / "out"), load_all(tmp_path / "want")
    name = f"{LAYER_0}self_attn.A_log"
    assert same(got[name], want[name]) and got[name].shape == (4,)


def test_a_log_with_values_beyond_the_heads_is_refused(release, tmp_path):
    name = f"{LAYER_0}self_attn.A_log"
    dtype, shape, raw = all_tensors(release)[name]
    replace_tensor(release, name, (dtype, shape, raw[:-1] + b"\x01"))
    with pytest.raises(CheckpointError, match="beyond its 4 heads"):
        convert(release, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_per_layer_differ(golden, tmp_path):
    counts = [0, 16, 8, 5, 4]
    folder = random_release(tmp_path / "in", golden / "tiny-text", expert_counts=counts)
    convert(folder, tmp_path / "out")
    experts = open_experts(tmp_path / "out")
    assert [experts.count(layer) for layer in experts.layers] == counts[1:]
    got = load_all(tmp_path / "out")
    assert got["language_model.model.layers.3.mlp.switch_mlp.up_proj.weight"].shape[0] == 5
    assert got["language_model.model.layers.3.mlp.gate.weight"].shape == (5, 128)


def test_prediction_heads_are_left_out(release, tmp_path):
    shard = "model-00006-of-000006.safetensors"
    for name in (
        "language_model.model.mtp.norm.weight",
        "language_model.model.layers.5.norm.weight",
    ):
        add_tensor(release, shard, name, ("BF16", [2], bytes(4)))
    assert convert(release, tmp_path / "out")["ignored_tensors"] == 2
    assert not [name for name in load_all(tmp_path / "out") if "mtp" in name or "layers.5" in name]


def test_what_travels_along_and_what_does_not(release, tmp_path):
    (release / "LICENSE").write_text("do what is right")
    (release / "README.md").write_text("a card")
    (release / "generation_config.json").write_text('{"eos_token_id": 498}')
    (release / "modeling_kimi_k3.py").write_text("raise SystemExit")
    (release / "hf_quant_config.json").write_text('{"quantization": {}}')
    (release / "pytorch_model.bin.index.json").write_text("{}")
    convert(release, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    small = {name for name in names if not name.endswith(".safetensors")}
    assert small == {
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "mlx_k3.json",
        "model.safetensors.index.json",
    }
    assert (tmp_path / "out/LICENSE").read_text() == "do what is right"


def test_the_plan_knows_the_size_to_the_byte(golden, tmp_path):
    for trunk in PROFILES:
        plan = make_plan(FolderSource(golden / "tiny-multimodal"), trunk=trunk)
        convert(golden / "tiny-multimodal", tmp_path / trunk, trunk=trunk)
        sizes = {p.name: p.stat().st_size for p in (tmp_path / trunk).glob("*.safetensors")}
        assert sizes == {f["file"]: f["bytes"] for f in plan.summary()["files"]}
        assert plan.total_bytes == sum(sizes.values())


def refused(action, kind, says, out: Path) -> None:
    """``action`` fails with one line and leaves no trace of ``out``."""
    with pytest.raises(kind, match=says) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda c: c.update(model_type="llama"), UnsupportedError, "'llama'"),
        (lambda c: c["text_config"].update(num_experts=32), CheckpointError, "has shape"),
        (
            lambda c: c["text_config"]["linear_attn_config"].update(use_full_rank_gate=False),
            CheckpointError,
            "6 of 515 tensors are missing, the first is .*g_a_proj",
        ),
        (
            lambda c: c["text_config"].update(mla_use_output_gate=False),
            CheckpointError,
            "2 tensors that config.json does not explain, the first is .*layers.3.*g_proj",
        ),
        (lambda c: c["text_config"].update(hidden_size=256), CheckpointError, "has shape"),
        (
            lambda c: c["text_config"].pop("quantization_config") and None,
            UnsupportedError,
            "no quantization",
        ),
        (
            lambda c: c["text_config"]["quantization_config"].update(format="int-quantized"),
            UnsupportedError,
            "compressed-tensors/int-quantized",
        ),
        (
            lambda c: c["text_config"]["quantization_config"].update(quant_method="awq"),
            UnsupportedError,
            "awq/",
        ),
        (
            lambda c: c["text_config"]["quantization_config"]["config_groups"]["group_0"][
                "weights"
            ].update(group_size=16),
            UnsupportedError,
            "16",
        ),
        (
            lambda c: c["text_config"].update(moe_intermediate_size=48),
            CheckpointError,
            "experts of width 48",
        ),
        (lambda c: [1], CheckpointError, "JSON object"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_at_once(release, tmp_path, change, kind, says):
    edit_json(release / "config.json", change)
    refused(lambda: convert(release, tmp_path / "out"), kind, says, tmp_path / "out")


def test_unknown_and_misshapen_tensors_are_refused(release, tmp_path):
    shard, out = "model-00001-of-000006.safetensors", tmp_path / "out"
    add_tensor(release, shard, f"{LAYER_0}extra.weight", ("BF16", [2], bytes(4)))
    refused(lambda: convert(release, out), CheckpointError, "does not explain.*extra", out)
    tensors = read_tensors(release / shard)
    del tensors[f"{LAYER_0}extra.weight"]
    write_tensors(release / shard, tensors)
    edit_json(
        release / "model.safetensors.index.json",
        lambda index: index["weight_map"].pop(f"{LAYER_0}extra.weight") and None,
    )
    replace_tensor(release, f"{LAYER_0}self_attn.dt_bias", ("I32", [128], bytes(512)))
    refused(lambda: convert(release, out), CheckpointError, "dt_bias is I32", out)
    replace_tensor(release, f"{LAYER_0}self_attn.dt_bias", ("F32", [64], bytes(256)))
    refused(lambda: convert(release, out), CheckpointError, r"dt_bias has shape \[64\]", out)


def test_flags_that_cannot_act_are_refused(golden, tmp_path):
    out = tmp_path / "out"
    for options, says in (
        ({"trunk": "q5"}, "--trunk q5"),
        ({"experts": "none"}, "--experts none"),
        ({"experts": "mxfp4"}, "MXFP4 already"),
        ({"free_source": True}, "--free-source"),
        ({"revision": "main"}, "--revision"),
    ):
        action = lambda options=options: convert(golden / "tiny-text", out, **options)  # noqa: E731
        refused(action, UnsupportedError, says, out)


def test_too_little_disk_space_is_said_before_anything_is_written(golden, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_k3.convert.stream._free_bytes", lambda out: 1_000_000)
    out = tmp_path / "out"
    refused(lambda: convert(golden / "tiny-text", out), BudgetError, "616 KB more than", out)


def test_the_output_folder_must_be_new_or_its_own(golden, release, tmp_path):
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(release, release)
    link = tmp_path / "link"
    link.symlink_to(release)
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(release, link)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(release, foreign)
    assert os.listdir(foreign) == ["thesis.tex"]
    with pytest.raises(CheckpointError, match="is a file"):
        convert(release, foreign / "thesis.tex")
    convert(release, tmp_path / "out")
    with pytest.raises(NothingToDo, match="already, complete"):
        convert(release, tmp_path / "out")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(release, tmp_path / "out", trunk="q4")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(golden / "tiny-text", tmp_path / "out")


def test_a_damaged_result_is_not_taken_for_a_foreign_folder(release, tmp_path):
    out = tmp_path / "out"
    convert(release, out)
    (out / "model-trunk-00002-of-00006.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not all of it is intact; delete the folder"):
        convert(release, out)


def test_a_folder_in_mlx_form_has_nothing_to_convert(golden, tmp_path):
    convert(golden / "tiny-text", tmp_path / "mlx")
    (tmp_path / "mlx/mlx_k3.json").unlink()  # as mlx-lm would have left it
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "mlx"), str(tmp_path / "out")])
    assert result.exit_code == 0 and "nothing to convert" in result.output
    assert not (tmp_path / "out").exists()


def test_spaces_symbolic_links_and_read_only_folders(golden, tmp_path):
    want = tmp_path / "want"
    convert(golden / "tiny-text", want)
    spaced = copy_release(golden / "tiny-text", tmp_path / "my model, v 1")
    os.chmod(spaced, 0o555)
    link = tmp_path / "a link"
    link.symlink_to(spaced)
    convert(link, tmp_path / "out here" / "deep er")
    got, wanted = contents(tmp_path / "out here" / "deep er"), contents(want)
    assert (
        json.loads(got.pop("mlx_k3.json"))["files"]
        == json.loads(wanted.pop("mlx_k3.json"))["files"]
    )
    assert got == wanted


def test_in_the_hub_s_cache_shards_are_links(golden, tmp_path):
    repo = tmp_path / "models--org--tiny"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    copy_release(golden / "tiny-text", repo / "blobs")
    for path in (repo / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    convert(snapshot, tmp_path / "out", experts="reference")
    assert open_experts(tmp_path / "out").count(1) == 16


def test_dry_run_and_report_as_json(golden, tmp_path):
    source, out = str(golden / "tiny-text"), str(tmp_path / "out")
    runner = CliRunner()
    plan = json.loads(runner.invoke(app, ["convert", source, out, "--dry-run", "--json"]).stdout)
    assert not os.path.exists(out)
    report = json.loads(runner.invoke(app, ["convert", source, out, "--json"]).stdout)
    assert report["written_bytes"] == plan["total_bytes"] == sum(report["bytes"].values())
    again = json.loads(runner.invoke(app, ["convert", source, out, "--json"]).stdout)
    assert "already" in again["nothing_to_do"]


_MEMORY = """
import resource, sys
from mlx_k3.convert.stream import convert
convert(sys.argv[1], sys.argv[3], trunk=sys.argv[4])  # everything is imported, MLX is awake
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[2], sys.argv[3] + "2", trunk=sys.argv[4])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("trunk", ["bf16", "q8"])
def test_memory_does_not_grow_with_the_model(golden, tmp_path, trunk):
    """390 MB of experts and 260 MB of embedding and head pass through; a few blocks are held."""
    folder = random_release(
        tmp_path / "in",
        golden / "tiny-text",
        num_experts=96,
        moe_intermediate_size=512,
        routed_expert_hidden_size=1024,
        vocab_size=512 * 1000,
    )
    small = str(golden / "tiny-text")
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY, small, str(folder), str(tmp_path / "out"), trunk],
        capture_output=True,
        text=True,
        check=True,
    )
    for path in tmp_path.iterdir():
        shutil.rmtree(path)  # pytest would keep a gigabyte for days
    assert int(result.stdout) * 1024 < 300e6


def test_a_conversion_can_be_inspected_before_it_runs(golden, tmp_path):
    conversion = open_conversion(golden / "tiny-text", tmp_path / "out", trunk="bf16")
    conversion.check()
    assert conversion.plan.config.num_hidden_layers == 5
    assert not (tmp_path / "out").exists()
