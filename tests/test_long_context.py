"""Long texts: memory beyond the cache, numbers, prompts in windows with a bar, and recall."""

import io
import json
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear

from mlx_k3 import load, nano, tasks
from mlx_k3.chat.generation import stream_generate
from mlx_k3.cli import terminal
from mlx_k3.cli.loading import Loading, open_model
from mlx_k3.errors import K3Error, UnsupportedError
from mlx_k3.experts.budget import plan_folder
from mlx_k3.models.latent_attention import latent_attention
from mlx_k3.models.latent_cache import LatentCache
from mlx_k3.training.data import tokenize

from .conftest import REPOSITORY
from .support.measure import relative_error
from .support.models import convert_golden

LONG = 128 * 1024
BEYOND_CACHE_BYTES = 256 << 20
RECALLED = 0.75  # of the answers' tokens, by the bundled model, at every length it was trained for


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    return convert_golden(golden, "tiny-text", tmp_path_factory.mktemp("long"))


# 128 k tokens, a layer of K3's head sizes.


@pytest.mark.parametrize("bits", [None, 8])
def test_memory_is_the_cache_and_little_more(bits):
    """In a process of its own, so that its peak is this layer's; a prompt's block, then tokens."""
    job = {"tokens": str(LONG), "form": bits, "heads": 2, "dtype": "float32", "prompts": 1}
    command = [sys.executable, REPOSITORY / "scripts/bench_context.py", "--one", json.dumps(job)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found = json.loads(run.stdout)
    row = 576 * 4 if bits is None else 648
    assert found["cache_bytes"] == (LONG + 256) * row  # some tokens after the 128 k
    assert 0 < found["mlx_bytes"] < BEYOND_CACHE_BYTES
    assert found["process_bytes"] < BEYOND_CACHE_BYTES


@pytest.mark.parametrize(
    ("queries", "heads", "dtype"), [(1, 2, np.float64), (7, 2, np.float64), (180, 1, np.float32)]
)
def test_tiles_give_what_all_keys_at_once_give(queries, heads, dtype):
    """Against one softmax over all keys by numpy."""
    mx.random.seed(queries)
    rank, nope, shared, v = 512, 128, 64, 128
    cache = LatentCache()
    latents = cache.append(
        mx.random.normal((1, 1, LONG, rank)), mx.random.normal((1, 1, LONG, shared))
    )
    assert len(latents.blocks) == LONG // 8192
    q = mx.random.normal((1, heads, queries, nope + shared)) * 0.3
    embed_q, unembed_out = MultiLinear(nope, rank, heads), MultiLinear(rank, v, heads)
    got = latent_attention(q, latents, embed_q, unembed_out)

    arrays = cache.keys[0, 0], cache.values[0, 0], q[0], embed_q.weight, unembed_out.weight
    latent, key, q, up_k, up_v = (np.array(array, dtype) for array in arrays)
    unseen = np.arange(LONG) > np.arange(LONG - queries, LONG)[:, None]
    for head in range(heads):
        scores = q[head, :, :nope] @ up_k[head].T @ latent.T + q[head, :, nope:] @ key.T
        scores[unseen] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = weights @ latent / weights.sum(-1, keepdims=True) @ up_v[head].T
        assert relative_error(got[0, head], mx.array(want)) < 1e-5


def test_packed_caches_of_a_whole_model(folder):
    """Logits after 128 k tokens in every MLA layer, off by a share of the largest one."""
    model, _ = load(folder, dtype="float32")
    widths = model.config.kv_lora_rank, model.config.qk_rope_head_dim
    logits = {}
    for bits in (None, 8, 4):
        model.kv_bits = bits
        cache = model.make_cache()
        mx.random.seed(0)
        for layer in cache:
            for _ in range(LONG // 8192 if isinstance(layer, LatentCache) else 0):
                layer.append(*(mx.random.normal((1, 1, 8192, width)) for width in widths))
                mx.eval(layer.state[:2])
        logits[bits] = np.array(model(mx.arange(20, 28)[None], cache=cache)[0])
    scale = np.abs(logits[None]).max()
    assert 0 < np.abs(logits[8] - logits[None]).max() / scale < 1e-3
    assert 0 < np.abs(logits[4] - logits[None]).max() / scale < 2e-2


# Prompts in windows.


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("memory", ["all", "few slots"])
def test_a_long_prompt_shows_how_far_it_is(folder, memory, monkeypatch):
    """Model in memory: after every window. Experts on demand: after every layer."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(terminal, "BAR_AFTER_SECONDS", 0.0)
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    least = plan_folder(folder, None).minimum_bytes
    budget = None if memory == "all" else str(least + 100_000)
    seen = []
    with open_model(folder, Loading(memory=budget)) as (model, _), terminal.PromptBar() as bar:
        assert model.plan.resident == (memory == "all")
        model.prompt_tokens = 512

        def progress(done: int, total: int) -> None:
            seen.append(done)
            bar.update(done, total)
            if bar._progress is not None:
                bar._progress.refresh()

        ids = [(7 * i) % 490 for i in range(1700)]
        list(stream_generate(model, None, ids, max_tokens=1, prompt_progress_callback=progress))
    assert seen == sorted(seen) and seen[-1] == 1700
    assert {0, 512, 1024, 1536, 1699} <= set(seen)
    layers = 0 if memory == "all" else len(model.config.moe_layers)
    assert len(set(seen)) >= 6 + 3 * max(layers - 1, 0)
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", screen.getvalue())
    assert "reading the prompt" in shown and "1024/1700 tokens, time left " in shown
    assert re.search(r"time left \d:\d\d:\d\d", shown)


def test_a_model_in_memory_reads_in_the_windows_of_its_plan(folder):
    model, _ = load(folder)
    assert model.prompt_tokens == model.plan.prompt_tokens == 2048
    sizes = []
    embed = model.model.embed_tokens
    model.model.embed_tokens = lambda ids: (sizes.append(ids.shape[1]), embed(ids))[1]
    list(stream_generate(model, None, [(7 * i) % 490 for i in range(3000)], max_tokens=1))
    assert sizes == [2048, 951, 1, 1]  # the last token alone, and mlx-lm's one ahead


# Packed caches.


def test_kv_is_an_option_of_load_and_of_commands(folder):
    model, _ = load(folder, kv_bits=8)
    assert model.plan.kv_bits == 8
    assert [c.bits for c in model.make_cache() if isinstance(c, LatentCache)] == [8, 8]
    with open_model(folder, Loading(kv=4)) as (model, _):
        assert model.plan.kv_bits == model.make_cache()[3].bits == 4
    with pytest.raises(K3Error, match="--kv 5: there are 8 and 4"):
        Loading(kv=5)
    with pytest.raises(UnsupportedError, match="there are 8 and 4"):
        load(folder, kv_bits=16)


def test_a_model_without_mla_has_nothing_to_pack(folder, monkeypatch):
    plan = SimpleNamespace(cache_bytes=0)
    monkeypatch.setattr("mlx_k3.loader.plan_folder", lambda *_, **__: plan)
    with pytest.raises(UnsupportedError, match="has no MLA layer"):
        load(folder, kv_bits=8)


# Needles.


def needles(family: str, items: int, least: int, tokenizer) -> list[tuple[mx.array, np.ndarray]]:
    """Held-out conversations that ask for a fact from far back, and where the answers stand."""
    rng, found = random.Random(7), []
    while len(found) < items:
        tokens = tokenize(tasks.example(family, rng, "held-out"), tokenizer)
        if least <= len(tokens.ids) <= 1536:
            found.append((mx.array(tokens.ids)[None], np.flatnonzero(tokens.predicted) - 1))
    return found


@pytest.mark.parametrize(
    ("family", "items", "least"),
    [("recall_short", 8, 0), ("recall", 4, 512), ("recall_long", 3, 1200)],
)
def test_a_packed_cache_recalls_what_a_plain_one_recalls(family, items, least):
    """The likeliest tokens of the answers, each after the right ones before it."""
    model, tokenizer = load(nano.converted(), dtype="float32")
    said, wanted = {None: [], 8: [], 4: []}, []
    for ids, places in needles(family, items, least, tokenizer):
        wanted += np.array(ids[0])[places + 1].tolist()
        for bits, tokens in said.items():
            model.kv_bits = bits
            logits = model(ids, cache=model.make_cache())
            tokens += np.array(mx.argmax(logits[0], axis=-1))[places].tolist()
    shares = {bits: np.mean(np.array(tokens) == wanted) for bits, tokens in said.items()}
    assert shares[None] > RECALLED
    assert abs(shares[8] - shares[None]) < 0.01 and abs(shares[4] - shares[None]) < 0.02
    assert np.mean(np.array(said[8]) == said[None]) > 0.99
