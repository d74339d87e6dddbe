"""Experts on demand give what resident experts give, to the bit, whatever happens in between.

Both are routed as the bundled model was; test_offload.py has models with routers of their own.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from .support.models import convert_golden
from .support.offload import NAMES, TOP_K, answer, experts_in, in_memory, offloaded, prompt

STEPS = 200


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def packages(golden, tmp_path_factory, name):
    out = tmp_path_factory.mktemp(name)
    return {form: convert_golden(golden, name, out, experts=form) for form in ("copy", "reference")}


@pytest.fixture(scope="module")
def package(packages):
    return packages["copy"]


@pytest.fixture(scope="module")
def resident(package):
    return in_memory(package)


@pytest.fixture(scope="module")
def long_answer(resident):
    return answer(resident, prompt(5), STEPS)


@pytest.mark.parametrize("form, prefetch", [("copy", True), ("reference", False)])
@pytest.mark.parametrize("pool", [1, 2, None])
def test_a_long_answer(packages, resident, long_answer, name, form, prefetch, pool):
    slots = pool * TOP_K[name] if pool else experts_in(resident)
    with offloaded(packages[form], slots, prefetch=prefetch) as model:
        assert mx.array_equal(answer(model, prompt(5), STEPS), long_answer)


def test_a_pool_smaller_than_a_token_needs(package, long_answer):
    with offloaded(package, 1) as model:
        assert mx.array_equal(answer(model, prompt(5), 8), long_answer[:, :13])


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_resizes_between_tokens(package, resident, long_answer, name, policy):
    k, everything = TOP_K[name], experts_in(resident)
    with offloaded(package, 2 * k, policy=policy) as model:
        cache, rows, sizes = model.make_cache(), [], [everything, k, 3 * k, 1, 2 * k]
        ids = prompt(5)
        for step in range(60):
            if step % 12 == 5:
                model.offload.resize(sizes[step // 12])
                assert model.offload.slots == sizes[step // 12]
            rows.append(model(ids, cache=cache))
            ids = mx.argmax(rows[-1][:, -1:], axis=-1)
        assert mx.array_equal(mx.concatenate(rows, axis=1), long_answer[:, :64])


def test_experts_survive_a_resize(package, resident):
    with offloaded(package, 16) as model:
        mx.eval(model(prompt(2)))
        store = model.offload.store
        store.reset()
        before = set(store.pool.resident())
        model.offload.resize(experts_in(resident))
        assert set(store.pool.resident()) == before
        model.offload.resize(3)
        assert set(store.pool.resident()) < before
        assert len(store.pool.resident()) == 3
        assert mx.array_equal(model(prompt(9)), resident(prompt(9)))


def test_a_batch_with_left_padding(package, resident, name):
    def batch(model):
        cache = [
            type(c).merge([type(c)(2) if hasattr(c, "lengths") else type(c)() for _ in range(2)])
            for c in model.make_cache()
        ]
        for layer_cache in cache:
            layer_cache.left_padding = mx.array([0, 6])
            if hasattr(layer_cache, "offset"):
                layer_cache.offset = layer_cache.offset - layer_cache.left_padding
        ids = mx.concatenate([prompt(11), mx.pad(prompt(5), [(0, 0), (6, 0)])])
        return answer(model, ids, 20, cache)

    want = batch(resident)
    for slots in (2 * TOP_K[name], experts_in(resident)):
        with offloaded(package, slots) as model:
            assert mx.array_equal(batch(model), want)


def test_two_conversations_in_turn(package, resident, name):
    prompts = [prompt(70, seed=1), prompt(3, seed=2)]
    wants = [answer(resident, ids, 30) for ids in prompts]
    with offloaded(package, TOP_K[name]) as model:
        caches = [model.make_cache() for _ in prompts]
        rows = [[model(ids, cache=cache)] for ids, cache in zip(prompts, caches, strict=True)]
        for _ in range(30):
            for got, cache in zip(rows, caches, strict=True):
                got.append(model(mx.argmax(got[-1][:, -1:], axis=-1), cache=cache))
        for got, want in zip(rows, wants, strict=True):
            assert mx.array_equal(mx.concatenate(got, axis=1), want)


def test_passes_whose_results_come_late_or_never(package, resident, name):
    """What a pass left uncomputed must not read slots that a later pass has refilled."""
    with offloaded(package, TOP_K[name]) as model:
        late = [model(prompt(n, seed=3)) for n in (1, 2, 40)]
        for n in (3, 1, 66):
            model(prompt(n, seed=4))
        assert mx.array_equal(answer(model, prompt(4), 10), answer(resident, prompt(4), 10))
        for n, logits in zip((1, 2, 40), late, strict=True):
            assert mx.array_equal(logits, resident(prompt(n, seed=3)))


def test_generation_on_other_threads(package, resident, long_answer, name):
    """As mlx-lm's server does; what one thread leaves unfinished is no obstacle to another."""

    def ids_of(model, n):
        return [int(token) for token, _ in generate_step(prompt(5)[0], model, max_tokens=n)]

    want = mx.argmax(long_answer[0, 4:44], axis=-1).tolist()
    with offloaded(package, 2 * TOP_K[name]) as model:
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(ids_of, model, 40).result() == want
        dropped = threading.Thread(target=lambda: model(prompt(6)))
        dropped.start()
        dropped.join()
        assert ids_of(model, 40) == want
        with ThreadPoolExecutor(1) as thread:
            model(prompt(7))
            assert thread.submit(ids_of, model, 40).result() == want
