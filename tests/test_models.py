"""The model on converted golden checkpoints: outputs, inner states, caches, batches."""

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.utils import load_model as mlx_lm_load_model

from mlx_k3 import load

from .support.measure import relative_error
from .support.models import convert_golden, record

TEXT_MODELS = ["tiny-text", "tiny-kimi-linear", "tiny-multimodal"]


@pytest.fixture(scope="module")
def packages(golden, tmp_path_factory):
    """Every golden checkpoint in both forms: (name, form) -> folder."""
    out = tmp_path_factory.mktemp("packages")
    return {
        (name, form): convert_golden(golden, name, out, experts=form)
        for name in TEXT_MODELS
        for form in ("copy", "reference")
    }


@pytest.fixture(params=["tiny-text", "tiny-kimi-linear"])
def name(request):
    return request.param


@pytest.fixture
def model(packages, name):
    return load(packages[name, "copy"], dtype="float32")[0]


@pytest.fixture
def expected(golden, name):
    return mx.load(str(golden / name / "expected.safetensors"))


@pytest.mark.parametrize("form", ["copy", "reference"])
def test_prompt_and_decode_match_golden(packages, expected, name, form):
    model, tokenizer = load(packages[name, form], dtype="float32")
    assert tokenizer is None
    cache = model.make_cache()
    logits = model(expected["input_ids"], cache=cache)
    assert relative_error(logits, expected["logits"]) < 1e-4
    for i, layer in enumerate(model.layers):
        if not layer.is_kda:
            continue
        conv, state = cache[i][0], cache[i][1]
        want = mx.concatenate([expected[f"kda.{i}.conv_{x}"] for x in "qkv"], axis=-1)
        assert relative_error(conv, want) < 2e-5
        # The reference keeps [key, value], this model [value, key].
        assert relative_error(state.swapaxes(-1, -2), expected[f"kda.{i}.state"]) < 2e-5
    for t in range(expected["decode_ids"].shape[1]):
        logits = model(expected["decode_ids"][:, t : t + 1], cache=cache)[:, 0]
        assert relative_error(logits, expected["decode_logits"][:, t]) < 1e-4


def test_inner_states_match_golden(model, expected):
    states = record(model)
    model(expected["input_ids"])
    checked = 0
    for key, want in expected.items():
        kind = key.split(".")[0]
        if kind in ("attn_in", "mlp_in", "final_mix"):  # first row, first eight tokens
            assert relative_error(states[key][:1, :8], want) < 1e-4, key
        elif kind in ("hidden", "final_norm"):
            assert relative_error(states[key], want) < 1e-4, key
        elif key.endswith("topk_idx"):
            assert mx.array_equal(states[key], want), key
        elif kind == "router":
            assert relative_error(states[key], want) < 3e-5, key
        else:
            continue
        checked += 1
    assert checked >= 3 * len(model.layers) + 2


def test_text_of_the_multimodal_checkpoint_matches_golden(golden, packages):
    """Embeddings in, so that no picture is needed."""
    model, _ = load(packages["tiny-multimodal", "copy"], dtype="float32")
    expected = mx.load(str(golden / "tiny-multimodal" / "expected.safetensors"))
    for prompt in ("image", "clip", "mixed"):
        part = {
            k.removeprefix(f"prompt.{prompt}."): v
            for k, v in expected.items()
            if k.startswith(f"prompt.{prompt}.")
        }
        cache = model.make_cache()
        embeddings = part["inputs_embeds"]
        ids = mx.zeros(embeddings.shape[:2], mx.int32)
        logits = model(ids, cache=cache, input_embeddings=embeddings)
        assert relative_error(logits, part["logits"]) < 1e-4
        for t in range(part["decode_ids"].shape[1]):
            logits = model(part["decode_ids"][:, t : t + 1], cache=cache)[:, 0]
            assert relative_error(logits, part["decode_logits"][:, t]) < 1e-4


@pytest.mark.parametrize("pieces", [[13, 1, 16, 3], [1] * 33, [32, 1], [5, 28]])
def test_prefill_in_pieces_equals_whole(model, expected, pieces):
    ids = expected["input_ids"]
    cache, start, parts = model.make_cache(), 0, []
    for n in pieces:
        parts.append(model(ids[:, start : start + n], cache=cache))
        start += n
    assert start == ids.shape[1]
    assert relative_error(mx.concatenate(parts, axis=1), model(ids)) < 1e-4


@pytest.mark.parametrize("block", [5, 16])
def test_prefill_in_blocks_equals_whole(model, expected, monkeypatch, block):
    ids = mx.concatenate([expected["input_ids"], expected["decode_ids"]], axis=1)
    want, cache = model(ids), model.make_cache()
    for module in ("blocks", "kimi", "residual"):
        monkeypatch.setattr(f"mlx_k3.models.{module}.BLOCK_TOKENS", block)
    assert relative_error(model(ids[:, :30], cache=cache), want[:, :30]) < 1e-4
    assert relative_error(model(ids[:, 30:], cache=cache), want[:, 30:]) < 1e-4


def test_left_padded_row_equals_the_row_alone(model, expected):
    ids = expected["input_ids"]
    pad = 9
    caches = [
        type(c).merge([type(c)(2) if hasattr(c, "lengths") else type(c)() for _ in range(2)])
        for c in model.make_cache()
    ]
    for cache in caches:
        cache.left_padding = mx.array([pad, 0])
        if hasattr(cache, "offset"):
            cache.offset = cache.offset - cache.left_padding
    short = mx.concatenate([mx.full((1, pad), 7), ids[:1, : 33 - pad]], axis=1)
    logits = model(mx.concatenate([short, ids[1:]]), cache=caches)
    assert relative_error(logits[0, pad:], model(ids[:1, : 33 - pad])[0]) < 1e-4
    assert relative_error(logits[1], model(ids[1:])[0]) < 1e-4
    # and it goes on right, one token at a time
    step = model(mx.stack([ids[0, 33 - pad : 34 - pad], ids[0, :1]]), cache=caches)
    alone = model(ids[:1, : 34 - pad])
    assert relative_error(step[0, 0], alone[0, -1]) < 1e-4


class _Tokenizer:
    """As much of a tokenizer as mlx-lm's batches ask for when prompts are ids."""

    eos_token_id = 498
    eos_token_ids = frozenset({498})
    bos_token = None
    chat_template = None
    clean_up_tokenization_spaces = False

    def get_vocab(self):
        return {}

    def decode(self, ids):
        return "".join(chr(33 + i % 90) for i in ids)


def greedy(model, prompt, n):
    cache, ids = model.make_cache(), mx.array([prompt])
    out = []
    for _ in range(n):
        ids = mx.argmax(model(ids, cache=cache)[:, -1:], axis=-1)
        out.append(ids.item())
    return out


def test_mlx_lm_generates_with_it(model, expected):
    prompt = expected["input_ids"][0].tolist()
    want = greedy(model, prompt, 20)
    steps = generate_step(mx.array(prompt), model, max_tokens=20, prefill_step_size=7)
    assert [token for token, _ in steps] == want


def test_mlx_lm_batches_with_it(model, expected):
    rows = expected["input_ids"].tolist()
    prompts = [rows[0], rows[1][:5], rows[0][3:20], rows[1][:1]]
    want = [greedy(model, prompt, 12) for prompt in prompts]
    result = batch_generate(model, _Tokenizer(), prompts, max_tokens=12, return_logprobs=False)
    texts = [_Tokenizer().decode(ids[: ids.index(498)] if 498 in ids else ids) for ids in want]
    assert result.texts == texts


def test_stock_mlx_lm_opens_the_package_and_agrees(golden, packages, expected, name):
    """K3 to 1e-4. For Kimi Linear mlx-lm's inner norms use the wrong eps; ours match the golden."""
    theirs, _ = mlx_lm_load_model(packages[name, "copy"])
    theirs.set_dtype(mx.float32)
    ours, _ = load(packages[name, "copy"], dtype="float32")
    ids = expected["input_ids"]
    bound = 1e-4 if name == "tiny-text" else 1e-2
    assert relative_error(ours(ids), theirs(ids)) < bound
    release, _ = mlx_lm_load_model(golden / name)
    release.set_dtype(mx.float32)
    assert relative_error(ours(ids), release(ids)) < bound


def test_zero_experts_leave_the_shared_path(model):
    """Routed experts of zero add nothing but what the shared experts and the norm give."""
    moe = model.layers[1].mlp
    x = mx.random.normal((1, 5, model.config.hidden_size))
    for proj in ("gate_proj", "up_proj", "down_proj"):
        weight = moe.switch_mlp[proj].weight
        moe.switch_mlp[proj].weight = mx.zeros_like(weight)
    assert mx.array_equal(moe(x), moe.shared_experts(x))


def test_permuting_router_bias_and_experts_together_changes_nothing(model, expected):
    ids = expected["input_ids"]
    want = model(ids)
    for layer in model.layers:
        if "switch_mlp" not in layer.mlp:
            continue
        moe = layer.mlp
        order = mx.array([(7 * e + 3) % len(moe.gate.weight) for e in range(len(moe.gate.weight))])
        assert sorted(order.tolist()) == list(range(order.size))
        moe.gate.weight = moe.gate.weight[order]
        moe.e_score_correction_bias = moe.e_score_correction_bias[order]
        for proj in ("gate_proj", "up_proj", "down_proj"):
            for part in ("weight", "scales"):
                if part in moe.switch_mlp[proj]:
                    moe.switch_mlp[proj][part] = moe.switch_mlp[proj][part][order]
            if proj in moe.switch_mlp._expanded:
                moe.switch_mlp._expanded[proj] = moe.switch_mlp._expanded[proj][order]
    assert relative_error(model(ids), want) < 1e-5
