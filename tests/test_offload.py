"""Experts on demand give what resident experts give, to the bit, with the model's own router.

The bundled model's is trained. Those of the random models choose evenly, and their guesses are
worth little: they are here because all of the path is theirs, while other tests replay routing.
"""

import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3 import nano, tasks
from mlx_k3.chat.tokenizer import load_tokenizer
from mlx_k3.convert.stream import convert
from mlx_k3.loader import assemble
from mlx_k3.training.data import tokenize

from .support.models import convert_golden

NAMES = ["tiny-text", "tiny-kimi-linear", "tiny-multimodal"]
TOP_K = {"tiny-text": 4, "tiny-kimi-linear": 2, "tiny-multimodal": 3}
FAMILIES = ["addition", "recall", "about"]
EXPERTS = {"tiny-text": 64, "tiny-kimi-linear": 40, "tiny-multimodal": 32}


@pytest.fixture(scope="module")
def packages(golden, tmp_path_factory):
    out = tmp_path_factory.mktemp("packages")
    return {
        (name, form): convert_golden(golden, name, out, experts=form)
        for name in NAMES
        for form in ("copy", "reference")
    }


@pytest.fixture
def offloaded():
    """``assemble`` with a number of slots; closed at the end."""
    opened = []

    def assemble_with(folder, slots, **options):
        model = assemble(folder, slots=slots, **options)
        opened.append(model.offload)
        return model

    yield assemble_with
    for offload in opened:
        offload.close()


def prompt(n):
    return mx.array(np.random.default_rng(n).integers(0, 490, (1, n)))


def logits_of(model, ids, decode):
    """Logits of the prompt, and of ``decode`` greedy steps with their ids."""
    cache = model.make_cache()
    rows = [model(ids, cache=cache)]
    greedy = []
    for _ in range(decode):
        token = mx.argmax(rows[-1][:, -1:], axis=-1)
        greedy.append(token.item())
        rows.append(model(token, cache=cache))
    return mx.concatenate(rows, axis=1), greedy


@pytest.mark.parametrize("form", ["copy", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_equals_resident_to_the_bit(packages, offloaded, name, form):
    resident = assemble(packages[name, form])
    wants = {n: logits_of(resident, prompt(n), 8) for n in (1, 2, 7, 64, 65, 300)}
    for slots in (TOP_K[name], 2 * TOP_K[name], EXPERTS[name]):
        for prefetch in (True, False):
            model = offloaded(packages[name, form], slots, prefetch=prefetch)
            for n, (want, want_ids) in wants.items():
                got, ids = logits_of(model, prompt(n), 8)
                assert ids == want_ids, (slots, prefetch, n)
                assert mx.array_equal(got, want), (slots, prefetch, n)


@pytest.mark.parametrize("form", ["copy", "reference"])
def test_the_bundled_model_answers_the_same(tmp_path, offloaded, form):
    """Also with the guesses of a trained router: many come true, unlike a random one's."""
    convert(nano.path(), tmp_path / "nano", trunk="bf16", experts=form)
    resident, rng = assemble(tmp_path / "nano"), random.Random(3)
    tokenizer = load_tokenizer(tmp_path / "nano")
    texts = [tokenize(tasks.example(f, rng, "held-out"), tokenizer).ids for f in FAMILIES]
    prompts = [mx.array(ids)[None, : len(ids) // 2] for ids in texts]
    wants = [logits_of(resident, ids, 30) for ids in prompts]
    config = resident.config
    k, layers = config.num_experts_per_token, len(config.moe_layers)
    for slots, prefetch in ((k, True), (2 * k * layers, True), (2 * k * layers, False)):
        model = offloaded(tmp_path / "nano", slots, prefetch=prefetch)
        for ids, (want, want_ids) in zip(prompts, wants, strict=True):
            got, got_ids = logits_of(model, ids, 30)
            assert got_ids == want_ids, (slots, prefetch)
            assert mx.array_equal(got, want), (slots, prefetch)
    model.offload.store.reset()
    # Twice what a token needs, a fourth of all: an even choice would find a fifth of them there.
    assert model.offload.store.counters.hit_rate > 0.25
