"""``mlx-k3 plan``: the bounds' arithmetic, the command's forms and its refusals."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mlx_k3.checkpoint.summary import parameters
from mlx_k3.cli import app
from mlx_k3.cli.plan import MACS, TRUNKS, trunk_as
from mlx_k3.config import K3Config
from mlx_k3.convert.profiles import PROFILES
from mlx_k3.errors import CheckpointError, K3Error
from mlx_k3.experts import machine, measure
from mlx_k3.experts.budget import format_at_least, plan_folder, plan_memory
from mlx_k3.experts.estimate import (
    Speeds,
    estimate,
    experts_that_fit,
    touched_experts,
    work_per_token,
)
from mlx_k3.experts.vision_sizes import stored_vision
from mlx_k3.media.processor import Processor

from .conftest import REPOSITORY
from .support.models import convert_golden

TOKEN_BYTES = 25_829_572_608
SPEEDS = Speeds(13e9, 546e9, 18e12)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception:
        raise result.exception
    return result.stdout


def facts(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(scope="module")
def k3() -> K3Config:
    return K3Config.from_file(REPOSITORY / "mlx_k3/experts/kimi-k3-config.json")


@pytest.fixture(scope="module")
def tiny(golden, tmp_path_factory):
    return convert_golden(golden, "tiny-text", tmp_path_factory.mktemp("tiny"), trunk="q8")


def bounds(k3: K3Config, budget: float | None, prompt_tokens: int = 512):
    trunk = trunk_as(k3, "q4")
    plan = plan_memory(
        k3,
        trunk,
        slot_bytes=17_547_264,
        context_tokens=32768,
        budget_bytes=budget and int(budget),
        device="metal",
        vision=stored_vision(k3, Processor()),
    )
    work = work_per_token(k3, trunk, plan, parameters(k3)["active"])
    return plan, work, estimate(k3, plan, work, SPEEDS, prompt_tokens)


def test_a_token_that_finds_nothing_reads_its_whole_working_set(k3):
    plan, work, found = bounds(k3, 50e9)
    assert plan.working_sets < 1 and found.hit_share == 0
    assert work.expert_bytes == found.read_bytes == TOKEN_BYTES
    assert found.ssd_seconds == TOKEN_BYTES / 13e9
    assert found.token_seconds == found.ssd_seconds == pytest.approx(1.987, abs=1e-3)
    assert experts_that_fit(k3, plan) == plan.slots // 92 < 16


def test_what_memory_has_to_deliver_for_a_token(k3):
    plan, work, found = bounds(k3, 50e9)
    embedding = 163840 * 7168 * 4.5 / 8
    assert work.trunk_bytes == plan.trunk_bytes - embedding
    assert work.state_bytes == 2 * plan.state_bytes + 32768 * 27_648
    read = work.trunk_bytes + TOKEN_BYTES + work.state_bytes
    assert found.memory_seconds == read / 546e9
    assert found.compute_seconds == 2 * parameters(k3)["active"] / 18e12


def test_hits_where_slots_exceed_a_token_s_experts(k3):
    plan, _, found = bounds(k3, 200e9)
    assert plan.working_sets > 5
    assert found.hit_share == plan.slots / 82_432
    assert found.read_bytes == TOKEN_BYTES * (1 - plan.slots / 82_432)


def test_nothing_is_read_when_all_is_there(k3):
    plan, _, found = bounds(k3, None)
    assert plan.resident
    assert found.read_bytes == found.ssd_seconds == found.prefill_read_bytes == 0
    assert found.token_seconds == found.memory_seconds
    assert found.prefill_seconds == found.prefill_compute_seconds
    assert experts_that_fit(k3, plan) == 896


def test_a_prompt_reads_each_expert_once_a_pass(k3):
    one = touched_experts(k3, 1)
    assert one == pytest.approx(92 * 16)
    assert touched_experts(k3, 0) == 0
    assert touched_experts(k3, 2) == pytest.approx(2 * one - 92 * 16 * 16 / 896)
    assert touched_experts(k3, 10**4) == pytest.approx(82_432)
    plan, _, found = bounds(k3, 39e9, prompt_tokens=2 * 512 + 1)
    assert plan.prompt_tokens == 512
    touched = 2 * touched_experts(k3, 512) + one
    assert found.prefill_read_bytes == pytest.approx(touched * 17_547_264)
    assert found.prefill_seconds == pytest.approx(touched * 17_547_264 / 13e9)


def test_kimi_k3_without_any_weights():
    found = facts("kimi-k3")
    assert found["minimum_bytes"] == found["trunks"]["q8"]["minimum_bytes"] < 80e9
    assert found["resident_bytes"] > 1.446e12
    assert found["expert_bytes_per_token"] == TOKEN_BYTES
    assert found["cache_bytes_per_token"] == 27_648
    assert found["longest_context"]["tokens"] == 1 << 20
    assert found["longest_context"]["cache_bytes"] == 28_991_029_248
    packed = found["longest_context"]["packed"]
    assert packed["8"]["cache_bytes"] == (1 << 20) * 24 * 648
    assert packed["4"]["cache_bytes"] == (1 << 20) * 24 * 360
    saved = found["longest_context"]["cache_bytes"] - packed["8"]["cache_bytes"]
    least = found["longest_context"]["minimum_bytes"]["q8"]
    assert least - packed["8"]["minimum_bytes"] == saved
    assert set(TRUNKS) == set(PROFILES) == set(found["trunks"])
    plans = found["plans"]
    assert len(plans) == len(TRUNKS) * len(MACS.split(","))
    for entry in plans:
        assert entry["fits"] == (entry["minimum_bytes"] <= entry["memory_bytes"])
        if entry["fits"]:
            limit = max(entry["memory_bytes"] * 3 // 4, entry["minimum_bytes"])
            assert 0 <= limit - entry["total_bytes"] < 17_547_264
            assert entry["left_free_bytes"] == entry["memory_bytes"] - entry["total_bytes"]


def test_rates_are_those_given():
    slow = facts("kimi-k3", "--memory", "64GB", "--ssd", "1GB/s", "--bandwidth", "100GB/s")
    entry = next(entry for entry in slow["plans"] if entry["trunk"] == "q4")
    assert entry["bounds"]["ssd_seconds"] == TOKEN_BYTES / 1e9
    assert entry["bounds"]["memory_seconds"] > (28e9 + TOKEN_BYTES) / 100e9
    twice = facts("kimi-k3", "--memory", "64GB", "--tflops", "36")["plans"]
    entry_twice = next(entry for entry in twice if entry["trunk"] == "q4")
    ratio = entry["bounds"]["compute_seconds"] / entry_twice["bounds"]["compute_seconds"]
    assert ratio == pytest.approx(2)


def test_the_table(k3, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("kimi-k3", "--memory", "32GB,64GB,512GB")
    least = bounds(k3, None)[0].minimum_bytes
    assert f"Memory 32 GB: too little; trunk q4 works from {format_at_least(least)}" in shown
    assert "Too large: q8, mxfp8, bf16" in shown
    assert "at 1,048,576 tokens, trunk q8: cache 29 GB" in shown
    assert "  cache packed with --kv 8: 16.3 GB, from " in shown
    assert "25.8 GB" in shown and "27.6 KB" in shown
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith(" ")]
    rows.remove("cache")
    assert rows == ["trunk", "q6*", "q4", "trunk", "q8", "mxfp8", "q6", "q4", "bf16"]
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown


def test_a_folder_is_planned_as_it_is_loaded(tiny):
    found = facts(str(tiny))
    plan = plan_folder(tiny, "auto")
    assert found["device"] == machine.device()
    assert found["minimum_bytes"] == plan.minimum_bytes
    assert found["resident_bytes"] == plan.resident_bytes
    budget = plan.minimum_bytes + 10 * plan.slot_bytes
    (entry,) = facts(str(tiny), "--memory", str(budget))["plans"]
    loaded = plan_folder(tiny, budget)
    for field in ("slots", "total_bytes", "trunk_bytes", "scratch_bytes", "left_free_bytes"):
        assert entry[field] == getattr(loaded, field), field
    assert not entry["beyond_default_limit"]


def test_memory_this_machine_does_not_have(tiny, monkeypatch):
    """Such a budget is that of a machine of that size, which needs its own share."""
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 10**9)
    monkeypatch.setattr(machine, "usable_memory_bytes", lambda: 9 * 10**8)
    here, there = facts(str(tiny), "--memory", "1GB,2GB")["plans"]
    assert here["machine_bytes"] == 10**9 and there["machine_bytes"] == 2 * 10**9


def test_a_release_is_planned_with_every_trunk(golden):
    for name in ("tiny-text", "tiny-kimi-linear"):
        found = facts(str(golden / name))
        assert set(found["trunks"]) == set(TRUNKS)
    # Kimi Linear's experts are bfloat16: three matrices of two bytes a weight.
    config = K3Config.from_file(golden / "tiny-kimi-linear")
    weights = 3 * config.expert_dim * config.moe_intermediate_size
    assert found["expert_bytes"] == 2 * weights


def test_the_converted_folder_is_what_its_release_was_planned_to_be(golden, tmp_path):
    release = facts(str(golden / "tiny-text"))["trunks"]
    for trunk in ("bf16", "q8", "mxfp8"):
        folder = convert_golden(golden, "tiny-text", tmp_path, trunk=trunk)
        assert facts(str(folder))["trunks"]["stored"] == release[trunk]


@pytest.mark.parametrize("context", [("131072", 131072), ("128k", 131072), ("1M", 1 << 20)])
def test_contexts(context):
    text, tokens = context
    assert facts("kimi-k3", "--memory", "64GB", "--context", text)["context_tokens"] == tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name a model folder"),
        (("kimi-k3", "--memory", "lots"), "'lots' is not a size"),
        (("kimi-k3", "--memory", "-5GB"), "is not a size"),
        (("kimi-k3", "--context", "0"), "'0' is not a number of tokens"),
        (("kimi-k3", "--context", "many"), "is not a number of tokens"),
        (("kimi-k3", "--ssd", "0"), "must be above 0"),
        (("kimi-k3", "--bandwidth", "fast"), "'fast' is not a size"),
        (("no-such-folder",), "no-such-folder"),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    with pytest.raises(K3Error) as refusal:
        run(*arguments)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_nothing_at_all_is_too_little():
    (plan,) = {entry["fits"] for entry in facts("kimi-k3", "--memory", "0")["plans"]}
    assert plan is False


def test_planning_the_real_model_needs_no_mlx():
    code = (
        "import sys; from typer.testing import CliRunner; from mlx_k3.cli import app;"
        "assert CliRunner().invoke(app, ['plan', 'kimi-k3']).exit_code == 0;"
        "assert 'mlx.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_measuring_reads_every_expert_once(tiny):
    speed = measure.measure_disk(tiny)
    plan = plan_folder(tiny, None)
    assert speed.read_bytes == plan.experts * plan.slot_bytes
    assert speed.mode in ("direct", "buffered")
    assert speed.bytes_per_second == speed.read_bytes / speed.seconds


def test_measuring_a_file_and_planning_with_what_came_of_it(tmp_path):
    file = tmp_path / "large"
    file.write_bytes(os.urandom(1 << 20) * 40)
    for place in (file, tmp_path):
        assert measure.measure_disk(place).read_bytes == 2 * measure.SPAN_BYTES
    found = facts("kimi-k3", "--memory", "64GB", "--measure", str(file))
    assert found["speeds"]["ssd_bytes"] == found["measured"]["bytes_per_second"] > 0
    given = facts("kimi-k3", "--memory", "64GB", "--measure", str(file), "--ssd", "2GB/s")
    assert given["speeds"]["ssd_bytes"] == 2e9
    assert f"{file}: " in run("--measure", str(file)).replace("\n", "")


def test_measuring_stops_in_time(tmp_path):
    file = tmp_path / "large"
    file.write_bytes(bytes(measure.SPAN_BYTES * 3))
    assert measure.measure_disk(file, seconds=0).read_bytes == measure.SPAN_BYTES


def test_nothing_to_measure_with(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 1000)
    for place in (tmp_path / "small", tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="name a model folder or a large file"):
            measure.measure_disk(place)
