"""The memory plan: to the byte for the real model, and against arrays that were really loaded."""

import json
import math

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_k3.checkpoint.names import layer_tensors, mlx_tensors, stem_tensors, vision_tensors
from mlx_k3.checkpoint.writer import tensor_bytes
from mlx_k3.cli.plan import trunk_as
from mlx_k3.config import K3Config
from mlx_k3.errors import BudgetError, K3Error
from mlx_k3.experts import machine, sizes
from mlx_k3.experts.budget import (
    PROMPT_SHARE,
    RESIDENT_PROMPT,
    format_at_least,
    parse_memory,
    plan_folder,
    plan_memory,
)
from mlx_k3.kernels import kda_reference
from mlx_k3.loader import load
from mlx_k3.models import bank, blocks, latent_attention, latent_cache
from mlx_k3.models.latent_cache import LatentCache
from mlx_k3.units import parse_bytes

from .conftest import REPOSITORY
from .support.models import convert_golden

EXPERT_BYTES = 17_547_264
EXPERTS = 92 * 896
GOLDEN = ("tiny-text", "tiny-multimodal", "tiny-kimi-linear")


@pytest.fixture(scope="module")
def k3() -> K3Config:
    return K3Config.from_file(REPOSITORY / "mlx_k3/experts/kimi-k3-config.json")


def plan_k3(k3: K3Config, trunk: str = "q8", budget: str | None = None, **options):
    options = {"context_tokens": 32768, "device": "metal", **options}
    return plan_memory(
        k3,
        trunk_as(k3, trunk),
        slot_bytes=EXPERT_BYTES,
        budget_bytes=None if budget is None else parse_bytes(budget),
        **options,
    )


def stored_bytes(trunk) -> int:
    return sum(tensor_bytes(*stored) for stored in trunk.values())


def test_the_bundled_configuration_is_the_release_s():
    bundled = REPOSITORY / "mlx_k3/experts/kimi-k3-config.json"
    assert json.loads(bundled.read_text()) == json.loads(
        (REPOSITORY / "tests/data/kimi-k3-config.json").read_text()
    )


def test_the_release_s_bytes_are_trunk_experts_and_vision(k3):
    vision = sum(2 * math.prod(t.shape) for t in vision_tensors(k3))
    padding = 69 * (128 - 96) * 4  # of A_log
    trunk = stored_bytes(trunk_as(k3, "bf16"))
    assert trunk + EXPERTS * EXPERT_BYTES + vision + padding == 1_560_860_324_864
    assert 112e9 < trunk < 116e9


@pytest.mark.parametrize(
    ("name", "bits"), [("mxfp8", 8 + 8 / 32), ("q8", 8.5), ("q6", 6.5), ("q4", 4.5)]
)
def test_the_trunk_of_every_profile(k3, name, bits):
    tensors = [t for i in range(93) for t in layer_tensors(k3, i)] + list(stem_tensors(k3))
    packed = sum(math.prod(t.shape) for t in tensors if t.role in ("linear", "embedding"))
    exact = sum(
        math.prod(t.shape) * (4 if t.sources[0].dtypes[0] == "F32" else 2)
        for t in tensors
        if t.role == "exact"
    )
    stored = stored_bytes(trunk_as(k3, name))
    assert stored == packed * bits / 8 + exact
    # The router's gates become float32; a pair of vectors of the residual mix becomes one of it.
    assert plan_k3(k3, name).trunk_bytes == stored + 92 * 896 * 7168 * 2


def test_the_trunk_in_float32_on_a_cpu(k3):
    tensors = [t for i in range(93) for t in layer_tensors(k3, i)] + list(stem_tensors(k3))
    folded = 7168 * (93 * 2 + 1)
    numbers = sum(math.prod(t.shape) for t in tensors) - folded
    assert plan_k3(k3, "bf16", device="cpu").trunk_bytes == 4 * numbers


def test_the_real_model_s_numbers(k3):
    plan = plan_k3(k3)
    assert plan.slot_bytes == EXPERT_BYTES == 3 * (5_505_024 + 344_064)
    assert plan.experts == 82_432 and plan.experts_per_token == 1_472
    assert plan.experts_per_token * plan.slot_bytes == 25_829_572_608
    assert plan.cache_bytes_per_token == 24 * 576 * 2 == 27_648
    assert plan.cache_bytes == 32768 * 27_648
    states, conv_inputs = 69 * 96 * 128 * 128 * 4, 69 * 3 * 3 * 12288 * 2
    assert states == 434_110_464
    assert plan.state_bytes == states + conv_inputs
    assert plan.resident and plan.working_sets == 56
    on_cpu = plan_k3(k3, device="cpu")
    assert on_cpu.cache_bytes == 2 * plan.cache_bytes
    assert on_cpu.state_bytes == states + 2 * conv_inputs


def test_a_million_tokens(k3):
    plan = plan_k3(k3, context_tokens=1 << 20)
    assert plan.cache_bytes == 28_991_029_248
    assert plan_k3(k3, context_tokens=1 << 30) == plan  # the model has no more


def test_memory_beyond_the_cache_does_not_depend_on_the_context(k3):
    plans = [plan_k3(k3, context_tokens=n, budget="128GB") for n in (32 << 10, 1 << 20)]
    assert len({plan.scratch_bytes for plan in plans}) == 1
    least = [plan.minimum_bytes - plan.cache_bytes for plan in plans]
    assert least[0] == least[1]


@pytest.mark.parametrize(("bits", "row"), [(8, 648), (4, 360)])
def test_packed_caches(k3, bits, row):
    plan = plan_k3(k3, kv_bits=bits)
    assert (plan.kv_bits, plan.cache_bytes_per_token) == (bits, 24 * row)
    assert row == latent_cache.row_bytes(512, 2, bits) + latent_cache.row_bytes(64, 2, bits)
    assert plan.cache_bytes == 32768 * 24 * row
    assert plan_k3(k3, kv_bits=bits, device="cpu").cache_bytes == plan.cache_bytes


def test_a_model_in_memory_reads_a_prompt_in_windows(k3):
    resident = plan_k3(k3).resident_bytes
    assert plan_k3(k3).prompt_tokens == RESIDENT_PROMPT == 2048
    assert plan_k3(k3, context_tokens=1000).prompt_tokens == 1000
    assert plan_k3(k3, budget=str(resident)).prompt_tokens == 512
    more = plan_k3(k3, budget=str(resident + 2 * plan_k3(k3).prompt_bytes))
    assert more.prompt_tokens == 2048 and more.total_bytes <= more.budget_bytes


def test_the_cache_grows_in_steps(k3):
    assert [plan_k3(k3, context_tokens=n).cache_bytes // 27_648 for n in (1, 256, 257)] == [
        256,
        256,
        512,
    ]


@pytest.mark.parametrize("budget", ["72.5GB", "96GB", "128GB", "1TB"])
def test_slots_take_what_is_left(k3, budget):
    plan = plan_k3(k3, budget=budget)
    assert 0 <= parse_bytes(budget) - plan.total_bytes < EXPERT_BYTES
    assert 16 <= plan.slots < plan.experts and not plan.resident
    assert plan.working_sets == plan.slots / 1472


def test_a_longer_prompt_takes_an_eighth_at_most(k3):
    least, more = plan_k3(k3, budget="65.1GB"), plan_k3(k3, budget="96GB")
    assert least.prompt_tokens == 512 == least.block_tokens
    assert more.prompt_tokens % 512 == 0 and 512 < more.prompt_tokens < 32768
    extra = more.prompt_bytes - least.prompt_bytes
    spare = more.budget_bytes - more.minimum_bytes
    step = least.prompt_bytes
    assert spare * PROMPT_SHARE - step < extra <= spare * PROMPT_SHARE
    assert plan_k3(k3, budget="500GB").prompt_tokens == 32768


def test_the_minimum_works_and_a_byte_less_does_not(k3):
    minimum = plan_k3(k3).minimum_bytes
    plan = plan_k3(k3, budget=str(minimum))
    assert plan.slots == 16 and plan.total_bytes == minimum == plan.minimum_bytes
    with pytest.raises(BudgetError) as refusal:
        plan_k3(k3, budget=str(minimum - 1))
    text = str(refusal.value)
    assert f"= {minimum:,} bytes" in text and "trunk 62.1 GB" in text and "281 MB" in text
    assert "\n" not in text and format_at_least(minimum) in text


def test_nothing_is_not_unlimited(k3):
    with pytest.raises(BudgetError, match="budget of 0 B is too little"):
        plan_k3(k3, budget="0")
    assert plan_k3(k3, budget=None).resident


def test_all_experts_from_the_resident_budget_on(k3):
    resident = plan_k3(k3).resident_bytes
    assert plan_k3(k3, budget=str(resident)).resident
    assert not plan_k3(k3, budget=str(resident - 1)).resident


def test_the_system_keeps_its_part(k3):
    limits = {"machine_bytes": 128 * 10**9, "usable_bytes": 96 * 10**9}
    capped = plan_k3(k3, budget="128GB", **limits)
    assert capped.slots == plan_k3(k3, budget="96GB").slots
    assert 32e9 <= capped.left_free_bytes < 32e9 + EXPERT_BYTES
    assert capped.budget_bytes == 128 * 10**9
    # Who gives just enough gets what works, though it is more than usual.
    minimum = capped.minimum_bytes
    small = {"machine_bytes": minimum, "usable_bytes": minimum // 2}
    assert plan_k3(k3, budget=str(minimum), **small).total_bytes == minimum


def test_a_cuda_device_holds_no_process(k3):
    on_mac, on_cuda = plan_k3(k3), plan_k3(k3, device="cuda")
    assert on_mac.process_bytes > 0 == on_cuda.process_bytes
    assert on_mac.minimum_bytes - on_cuda.minimum_bytes == on_mac.process_bytes


def test_constants_are_the_model_s():
    assert sizes.BLOCK_TOKENS == blocks.BLOCK_TOKENS
    assert sizes.PAIRS_AT_ONCE == bank.PAIRS_AT_ONCE
    assert latent_cache.STEP_ROWS == sizes.CACHE_STEP
    assert latent_cache.BLOCK_ROWS == sizes.CACHE_BLOCK
    assert latent_cache.GROUP == sizes.CACHE_GROUP
    assert latent_cache.KV_BITS == sizes.KV_BITS
    assert latent_attention.QUERY_BLOCK == sizes.QUERY_BLOCK
    assert latent_attention.SCORE_BYTES == sizes.SCORE_BYTES
    assert latent_attention.LEAST_TILE == sizes.LEAST_TILE
    assert sizes.TILE_BYTES["cpu"] == latent_attention.CPU_TILE_BYTES
    on_gpu = latent_attention.TILE_BYTES + latent_attention.PENDING_BYTES
    assert {sizes.TILE_BYTES[device] for device in ("metal", "cuda")} == {on_gpu}
    assert sizes.KDA_CHUNK == kda_reference.CHUNK
    assert sizes.KDA_SCRATCH_BYTES == kda_reference.SCRATCH_BYTES


@pytest.fixture(scope="module")
def loaded(golden, tmp_path_factory):
    """Name and trunk -> folder and model, converted and loaded once."""
    known = {}

    def get(name: str, trunk: str):
        if (name, trunk) not in known:
            folder = convert_golden(golden, name, tmp_path_factory.mktemp("models"), trunk=trunk)
            known[name, trunk] = folder, load(folder)[0]
        return known[name, trunk]

    return get


@pytest.mark.parametrize("trunk", ["bf16", "q8", "q4", "mxfp8"])
@pytest.mark.parametrize("name", GOLDEN)
def test_weights_take_what_the_plan_says(loaded, name, trunk):
    folder, model = loaded(name, trunk)
    plan = plan_folder(folder, None)
    parameters = tree_flatten(model.parameters())
    experts = sum(array.nbytes for key, array in parameters if ".switch_mlp." in key)
    assert plan.trunk_bytes == sum(array.nbytes for _, array in parameters) - experts
    assert plan.pool_bytes == experts


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", GOLDEN)
def test_caches_take_what_the_plan_says(loaded, name, bits):
    folder, model = loaded(name, "bf16")
    plan = plan_folder(folder, None, context_tokens=300, kv_bits=bits)
    model.kv_bits = bits
    cache = model.make_cache()
    mx.eval(model(mx.arange(257)[None] % 64, cache=cache))
    states = sum(array.nbytes for c in cache if not isinstance(c, LatentCache) for array in c.cache)
    latents = sum(c.nbytes for c in cache if isinstance(c, LatentCache))
    assert plan.state_bytes == states
    assert plan.cache_bytes == latents


@pytest.mark.parametrize("name", GOLDEN)
def test_both_forms_of_a_folder_have_one_plan(golden, tmp_path, name):
    copy = convert_golden(golden, name, tmp_path)
    reference = convert_golden(golden, name, tmp_path, experts="reference")
    assert plan_folder(copy, None) == plan_folder(reference, None)


def test_float_copies_of_experts_are_kept_where_there_is_room(loaded, monkeypatch):
    folder, _ = loaded("tiny-text", "bf16")
    if machine.device() != "cpu":
        pytest.skip("only a CPU keeps them")
    config, unlimited = K3Config.from_file(folder), plan_folder(folder, None)
    weights = 3 * config.expert_dim * config.moe_intermediate_size
    assert unlimited.expanded_bytes == 4 * 16 * weights * 4
    resident = unlimited.resident_bytes
    assert plan_folder(folder, resident).expanded_bytes == 0
    enough = resident + unlimited.expanded_bytes
    assert plan_folder(folder, enough).expanded_bytes == unlimited.expanded_bytes
    assert plan_folder(folder, enough - 1).expanded_bytes == 0
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 8 * unlimited.expanded_bytes - 8)
    assert plan_folder(folder, None).expanded_bytes == 0


def test_a_folder_s_minimum_is_refused_below(loaded):
    folder, _ = loaded("tiny-text", "q8")
    minimum = plan_folder(folder, None).minimum_bytes
    assert plan_folder(folder, minimum).slots == 4
    for too_little in (0, "0", "1MB", minimum - 1):
        with pytest.raises(BudgetError):
            plan_folder(folder, too_little)


def test_float_experts_are_wider_in_the_model_than_in_slots(loaded):
    if machine.device() != "cpu":
        pytest.skip("only a CPU recasts them")
    folder, _ = loaded("tiny-kimi-linear", "bf16")
    whole = plan_folder(folder, None)
    fewer = plan_folder(folder, whole.resident_bytes - 1)
    assert whole.resident and not fewer.resident
    assert whole.slot_bytes == 2 * fewer.slot_bytes
    assert fewer.slots == fewer.experts and fewer.total_bytes < whole.resident_bytes


def test_a_recast_model_is_priced_as_recast(loaded):
    folder, _ = loaded("tiny-text", "bf16")
    wide, narrow = (plan_folder(folder, None, dtype=d) for d in ("float32", "bfloat16"))
    model, _ = load(folder, dtype="bfloat16")
    parameters = tree_flatten(model.parameters())
    trunk = sum(array.nbytes for key, array in parameters if ".switch_mlp." not in key)
    assert narrow.trunk_bytes == trunk < wide.trunk_bytes
    assert narrow.cache_bytes * 2 == wide.cache_bytes


def test_memory_as_people_write_it(monkeypatch):
    monkeypatch.setattr(machine, "auto_budget_bytes", lambda: 12345)
    assert parse_memory(None) is None
    assert parse_memory(0) == 0 == parse_memory("0")
    assert parse_memory("24GB") == 24 * 10**9
    assert parse_memory("auto") == 12345
    for nonsense in ("-1GB", "much", -1):
        with pytest.raises(K3Error):
            parse_memory(nonsense)


@given(st.integers(0, 1 << 45))
def test_a_size_to_type_suffices(nbytes):
    shown = parse_bytes(format_at_least(nbytes))
    assert nbytes <= shown <= nbytes * 1.02 + 10_000


def test_every_tensor_is_either_trunk_or_expert_or_vision(k3):
    names = {t.name for t in mlx_tensors(k3, "mxfp4")}
    trunk = set(trunk_as(k3, "bf16"))
    rest = {n for n in names if ".switch_mlp." in n or n.startswith(("vision_", "mm_"))}
    assert names == trunk | rest and not trunk & rest
