"""MLA's cache and the attention over it, against plain attention over all keys at once."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from mlx_lm.models.mla import MultiLinear

from mlx_k3 import load, nano
from mlx_k3.models import latent_attention as attention
from mlx_k3.models import latent_cache
from mlx_k3.models.latent_attention import expanding_is_cheaper
from mlx_k3.models.latent_cache import BatchLatentCache, LatentCache, Latents, row_bytes

from .support.measure import relative_error
from .support.models import convert_golden
from .test_models import _Tokenizer, greedy

HEADS, RANK, NOPE, SHARED, VALUE = 3, 64, 24, 16, 20
FORMS = (None, 8, 4)
WAYS = {"absorbed": False, "expanded": True}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Many blocks, tiles and blocks of queries, none of which fit into each other."""
    monkeypatch.setattr(latent_cache, "BLOCK_ROWS", 320)
    monkeypatch.setattr(latent_cache, "STEP_ROWS", 16)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 100)
    monkeypatch.setattr(attention, "LEAST_TILE", 72)
    monkeypatch.setattr(attention, "CPU_TILE_BYTES", 1)
    monkeypatch.setattr(attention, "TILE_BYTES", 1)
    monkeypatch.setattr(attention, "PENDING_BYTES", 100_000)


def rows(n: int, batch: int = 1) -> tuple[mx.array, mx.array]:
    """Random latents and shared keys."""
    return mx.random.normal((batch, 1, n, RANK)), mx.random.normal((batch, 1, n, SHARED))


def filled(n: int, bits: int | None = None, batch: int = 1) -> LatentCache:
    cache = LatentCache(bits)
    cache.append(*rows(n, batch))
    return cache


def everything(latents: Latents) -> list[np.ndarray]:
    """All latents and all shared keys, as queries see them."""
    tiles = [parts for _, *parts in latents.tiles(50)]
    return [np.array(mx.concatenate(parts, axis=2)) for parts in zip(*tiles, strict=True)]


def plain_attention(q, latents: Latents, embed_q, unembed_out, starts) -> np.ndarray:
    """All keys at once, for every head by itself, in float64."""
    latent, key = (x.astype(np.float64) for x in everything(latents))
    q, up_k, up_v = (np.array(x, np.float64) for x in (q, embed_q.weight, unembed_out.weight))
    k = np.concatenate([latent @ up_k, np.broadcast_to(key, (len(q), HEADS, *key.shape[2:]))], -1)
    scores = q @ k.swapaxes(-1, -2)
    T, S = scores.shape[2:]
    seen = np.arange(S) <= np.arange(S - T, S)[:, None]
    seen = seen & (np.arange(S) >= np.array(starts)[:, None, None, None])
    scores = np.where(seen, scores, -1e300)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ (latent @ up_v.swapaxes(-1, -2))


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [0, 1, 319, 700])
@pytest.mark.parametrize("queries", [1, 2, 7, 512, 513])
def test_attention_in_tiles_is_attention(queries, before, way, bits, monkeypatch):
    mx.random.seed(queries + before)
    monkeypatch.setattr(attention, "expanding_is_cheaper", lambda *_: WAYS[way])
    cache = LatentCache(bits)
    if before:
        cache.append(*rows(before))
    latents = cache.append(*rows(queries))
    q = mx.random.normal((1, HEADS, queries, NOPE + SHARED)) * 0.5
    up = MultiLinear(NOPE, RANK, HEADS), MultiLinear(RANK, VALUE, HEADS)
    got = attention.latent_attention(q, latents, *up)
    assert relative_error(got, plain_attention(q, latents, *up, [0])) < 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("queries", [1, 7, 513])
def test_no_text_of_a_batch_sees_its_padding(queries, way, monkeypatch):
    mx.random.seed(queries)
    monkeypatch.setattr(attention, "expanding_is_cheaper", lambda *_: WAYS[way])
    lengths = [0, 3, 170, 400]
    texts = [filled(n) if n else LatentCache() for n in lengths]
    latents = LatentCache.merge(texts).append(*rows(queries, len(texts)))
    starts = [400 - n for n in lengths]
    assert latents.starts.tolist() == starts
    q = mx.random.normal((len(texts), HEADS, queries, NOPE + SHARED)) * 0.5
    up = MultiLinear(NOPE, RANK, HEADS), MultiLinear(RANK, VALUE, HEADS)
    got = attention.latent_attention(q, latents, *up)
    assert relative_error(got, plain_attention(q, latents, *up, starts)) < 1e-5


def test_rows_that_see_nothing_stay_finite():
    """Padding on the left is read with the text; what comes of it is of no use, but a number."""
    cache = BatchLatentCache([90, 0])
    latents = cache.append(*rows(150, 2))
    up = MultiLinear(NOPE, RANK, HEADS), MultiLinear(RANK, VALUE, HEADS)
    q = mx.random.normal((2, HEADS, 150, NOPE + SHARED))
    assert mx.isfinite(attention.latent_attention(q, latents, *up)).all()


def test_scores_far_apart_do_not_overflow():
    latents = filled(300).append(*rows(2))
    up = MultiLinear(NOPE, RANK, HEADS), MultiLinear(RANK, VALUE, HEADS)
    q = mx.random.normal((1, HEADS, 2, NOPE + SHARED)) * 1000
    got = attention.latent_attention(q, latents, *up)
    assert relative_error(got, plain_attention(q, latents, *up, [0])) < 1e-4


def test_the_cheaper_way_is_taken():
    """For K3: a prompt's block expands, a few tokens do not, and a text's beginning always does."""
    k3 = {"rank": 512, "nope": 128, "v": 128}
    assert not expanding_is_cheaper(1, 1000, **k3)
    assert not expanding_is_cheaper(170, 128 * 1024, **k3)
    assert expanding_is_cheaper(172, 128 * 1024, **k3)
    assert expanding_is_cheaper(512, 1 << 20, **k3)
    assert all(expanding_is_cheaper(n, n, **k3) for n in (1, 2, 100, 512))
    # The count behind it, for 200 queries and 1000 keys.
    T, S = 200, 1000
    pairs = sum(S - T + 1 + t for t in range(T))
    absorbed = pairs * (512 + 64 + 512) + T * 512 * 256
    expanded = pairs * (128 + 64 + 128) + S * 512 * 256
    assert expanding_is_cheaper(T, S, **k3) == (expanded < absorbed)


@pytest.mark.parametrize("bits", FORMS)
def test_pieces_make_one_text(bits):
    latent, key = rows(1000, 2)
    whole = everything(LatentCache(bits).append(latent, key))
    cache, start = LatentCache(bits), 0
    for n in (1, 1, 14, 300, 4, 5, 640, 35):
        latents = cache.append(latent[:, :, start : start + n], key[:, :, start : start + n])
        start += n
    assert cache.size() == cache.offset == start == latents.length == 1000
    assert all(map(np.array_equal, everything(latents), whole))
    # Blocks are full but for the last one, which has no more than a step to spare.
    assert [block[0].shape[2] for block in cache._blocks] == [320, 320, 320, 48]
    sizes = row_bytes(RANK, 4, bits) + row_bytes(SHARED, 4, bits)
    assert cache.nbytes == 2 * 1008 * sizes
    for first, last in ((0, 1), (0, 320), (319, 321), (100, 1000)):
        got = LatentCache(bits)
        got.set_rows(*cache.rows(first, last))
        more = everything(got.append(latent[:, :, :5], key[:, :, :5]))
        want = [np.concatenate([x[:, :, first:last], x[:, :, :5]], axis=2) for x in whole]
        assert all(map(np.array_equal, more, want))


def test_full_blocks_are_never_touched_again():
    cache = filled(640)
    before = list(cache._blocks)
    cache.append(*rows(1000))
    assert all(old is new for old, new in zip(before, cache._blocks, strict=False))


@pytest.mark.parametrize("bits", FORMS)
def test_a_state_stays_what_it_is(bits):
    cache = filled(330, bits)
    state, copied = cache.state, copy.deepcopy(cache)
    want = [np.array(x) for x in cache.rows(0, 330)]
    cache.trim(20)
    cache.append(*rows(50))
    for other in (LatentCache.from_state(state), copied):
        assert (other.bits, other.size()) == (bits, 330)
        assert all(map(np.array_equal, map(np.array, other.rows(0, 330)), want))


@pytest.mark.parametrize("left", [0, 1, 319, 320, 321, 650])
def test_trimmed_and_gone_on_with(left):
    latent, key = rows(651)
    cache = LatentCache()
    assert cache.empty() and cache.trim(3) == 0
    cache.append(latent, key)
    assert cache.is_trimmable() and cache.trim(651 - left) == 651 - left
    assert cache.size() == left and cache.empty() == (left == 0)
    latents = cache.append(latent[:, :, left:], key[:, :, left:])
    assert np.array_equal(everything(latents)[0], np.array(latent))


@pytest.mark.parametrize("bits", FORMS)
def test_batches_and_single_texts_exchange_rows(bits):
    latent, key = rows(500)
    parts = [(0, 0), (10, 60), (0, 400)]
    texts = []
    for first, last in parts:
        texts.append(LatentCache(bits))
        if first != last:
            texts[-1].append(latent[:, :, first:last], key[:, :, first:last])
    batch = LatentCache.merge(texts)
    assert isinstance(batch, BatchLatentCache) and batch.bits == bits
    batch.append(*(mx.concatenate([x[:, :, 400:403]] * 3) for x in (latent, key)))
    batch.filter([0, 1])
    batch.extend(LatentCache.merge([texts[2]]))
    wanted = [(0, 0, 3), (10, 60, 3), (0, 400, 0)]
    for i, (first, last, more) in enumerate(wanted):
        text = batch.extract(i)
        assert (text.size(), text.bits) == (last - first + more, bits)
        alone = LatentCache(bits)
        for a, b in ((first, last), (400, 400 + more), (0, 1)):
            if a != b:
                want = alone.append(latent[:, :, a:b], key[:, :, a:b])
        got = text.append(latent[:, :, :1], key[:, :, :1])
        assert all(map(np.array_equal, everything(got), everything(want)))


def test_an_empty_batch_is_one_of_ours():
    batch = LatentCache.merge([LatentCache(8), LatentCache(8)])
    assert isinstance(batch, BatchLatentCache) and batch.bits == 8 and batch.empty()
    assert batch.extract(1).empty()


@pytest.mark.parametrize(("bits", "steps"), [(8, 255), (4, 15)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("width", [8, 32, 48, 512])
def test_packed_rows_are_nearly_the_same(bits, steps, dtype, width):
    x = (mx.random.normal((2, 1, 70, width)) * 3).astype(dtype)
    packed = latent_cache._pack(x, bits)
    assert packed.dtype == mx.uint32 and packed.shape[-1] * 4 == row_bytes(width, 2, bits)
    got = latent_cache._unpack(packed, width, bits, dtype)
    assert got.dtype == dtype and got.shape == x.shape
    # Half a step of the range a group spans (a little more: MLX puts zero on the grid), and the
    # rounding of scales and numbers.
    rounding = 0.002 if dtype == mx.float32 else 0.01
    bound = mx.abs(x).max().item() * (1.3 / steps + rounding)
    assert mx.abs(got.astype(mx.float32) - x.astype(mx.float32)).max().item() < bound


def test_packed_rows_never_become_infinite():
    x = mx.array([[[[1e30, -1e30, *[0.0] * 30]]]])
    assert mx.isfinite(latent_cache._unpack(latent_cache._pack(x, 8), 32, 8, mx.float32)).all()


def test_k3_s_rows():
    """Of 576 numbers in bfloat16, 8 and 4 bit."""
    assert [row_bytes(512, 2, b) + row_bytes(64, 2, b) for b in FORMS] == [1152, 648, 360]


@pytest.mark.parametrize("bits", FORMS)
def test_saved_with_mlx_lm_s_functions(golden, tmp_path, bits):
    model, _ = load(convert_golden(golden, "tiny-text", tmp_path), dtype="float32")
    model.kv_bits = bits
    ids = mx.array([[(7 * i) % 490 for i in range(700)]])
    cache = model.make_cache()
    model(ids, cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    read = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [type(c) for c in read] == [type(c) for c in cache]
    assert mx.array_equal(model(ids[:, :9], cache=read), model(ids[:, :9], cache=cache))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["tiny-text", "tiny-kimi-linear"])
def test_packed_caches_in_mlx_lm_s_batches(golden, tmp_path, name, bits):
    model, _ = load(convert_golden(golden, name, tmp_path), dtype="float32")
    model.kv_bits = bits
    ids = [(7 * i) % 490 for i in range(60)]
    prompts = [ids, ids[3:40], ids[10:11]]
    want = [greedy(model, prompt, 8) for prompt in prompts]
    result = batch_generate(model, _Tokenizer(), prompts, max_tokens=8, return_logprobs=False)
    texts = [_Tokenizer().decode(ids[: ids.index(498)] if 498 in ids else ids) for ids in want]
    assert result.texts == texts
    assert model.make_cache()[3].bits == bits


# What packing costs: at most half of the tokens have a logit that is off by more than this share of
# the largest one. (Where a router is undecided between two experts, single tokens differ more.)
WITHIN = {8: 1e-3, 4: 2e-2}


@pytest.mark.parametrize("name", ["tiny-text", "tiny-kimi-linear", "tiny-multimodal", "nano"])
def test_packed_caches_give_nearly_the_same_logits(golden, tmp_path, name):
    is_nano = name == "nano"
    folder = nano.converted() if is_nano else convert_golden(golden, name, tmp_path)
    model, tokenizer = load(folder, dtype="float32")
    if is_nano:
        text = "Anna's number is 4711. Bert's number is 8812. Carl's number is 9921. " * 8
        text = [{"role": "user", "content": f"{text} What is Bert's number?"}]
        ids = tokenizer.apply_chat_template(text)
    else:
        ids = np.random.default_rng(0).integers(0, 490, 300).tolist()
    logits = {}
    for bits in FORMS:
        model.kv_bits = bits
        cache = model.make_cache()
        parts = [model(mx.array([part]), cache=cache) for part in (ids[:-8], *zip(ids[-8:]))]
        logits[bits] = np.array(mx.concatenate(parts, axis=1)[0])
    scale = np.abs(logits[None]).max()
    for bits, bound in WITHIN.items():
        worst = np.abs(logits[bits] - logits[None]).max(-1) / scale
        assert 0 < np.median(worst) < bound
