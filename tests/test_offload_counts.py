"""What experts on demand read, counted at the read call, against what they say they read."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.checkpoint.extents import merge
from mlx_k3.experts.bank import OffloadedBank
from mlx_k3.experts.trace import TraceWriter, read_trace

from .support.models import convert_golden
from .support.offload import WatchedDisk, answer, experts_in, offloaded, prompt

NAME, K = "tiny-text", 4


@pytest.fixture(scope="module", params=["copy", "reference"])
def package(golden, tmp_path_factory, request):
    out = tmp_path_factory.mktemp("package")
    return convert_golden(golden, NAME, out, experts=request.param)


@pytest.fixture
def visits(monkeypatch):
    """Fills with (layer, ids that its router chose), one for each call of a bank."""
    seen, call = [], OffloadedBank.__call__

    def note(bank, z, indices, *rest):
        seen.append((bank._layer, np.unique(np.array(indices)).tolist()))
        return call(bank, z, indices, *rest)

    monkeypatch.setattr(OffloadedBank, "__call__", note)
    return seen


def ranges(model, keys):
    """How often each byte range is read if each expert of ``keys`` is read as often as it is."""
    experts = model.offload.store.experts
    return Counter(run[:3] for key in keys for run in merge(experts.extents(*key)))


def expert_bytes(model):
    return model.offload.store.experts.expert_bytes(model.config.moe_layers[0])


@pytest.mark.parametrize("slots", [1, K, 2 * K, 40])
def test_a_long_prompt_reads_each_expert_once(package, visits, slots):
    disk = WatchedDisk()
    with offloaded(package, slots, disk) as model:
        mx.eval(model(prompt(300)))
        chosen = [(layer, expert) for layer, experts in visits for expert in experts]
        assert len(visits) == len(model.config.moe_layers)
        assert Counter(disk.reads) == ranges(model, chosen)
        counters = model.offload.store.counters
        assert counters.demand_bytes == len(chosen) * expert_bytes(model)
        assert counters.hit_bytes == counters.prefetch_bytes == 0


@pytest.mark.parametrize("slots", [K, 2 * K, 20, 40])
def test_a_second_prompt_reads_what_is_missing_and_no_more(package, visits, slots):
    disk = WatchedDisk()
    with offloaded(package, slots, disk) as model:
        mx.eval(model(prompt(300)))
        model.offload.store.reset()
        there = set(model.offload.store.pool.resident())
        disk.reads.clear(), visits.clear()
        mx.eval(model(prompt(300, seed=1)))
        chosen = [(layer, expert) for layer, experts in visits for expert in experts]
        read = Counter(disk.reads)
        assert max(read.values()) == 1
        assert read.keys() <= ranges(model, chosen).keys()
        assert read.keys() >= ranges(model, set(chosen) - there).keys()


def test_a_pool_that_nearly_holds_everything_reads_little(package, visits):
    """Least recently used first, a pool a little too small would lose what comes next each time."""
    disk = WatchedDisk()
    with offloaded(package, 60, disk) as model:
        for seed in range(3):
            disk.reads.clear()
            mx.eval(model(prompt(300, seed)))
        store = model.offload.store
        assert experts_in(model) == 64
        assert len(Counter(disk.reads)) <= 4 * 6 * len(model.config.moe_layers)
        assert store.counters.hit_bytes > 90 * expert_bytes(model)


def test_a_pool_that_holds_everything_reads_everything_once(package, visits):
    disk = WatchedDisk()
    with offloaded(package, 64, disk) as model:
        answer(model, prompt(300), 5)
        answer(model, prompt(30), 5)
        assert set(Counter(disk.reads).values()) == {1}


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("slots", [K, 24, 64])
@pytest.mark.parametrize("tokens", [1, 40])
def test_hits_and_reads_are_the_bytes_asked_for(package, visits, prefetch, slots, tokens):
    disk = WatchedDisk()
    with offloaded(package, slots, disk, prefetch=prefetch) as model:
        answer(model, prompt(tokens), 20)
        store = model.offload.store
        store.reset()
        counters, asked = store.counters, sum(len(experts) for _, experts in visits)
        needed_reads = counters.demand_bytes + counters.used_prefetch_bytes
        assert counters.hit_bytes + needed_reads == asked * expert_bytes(model)
        assert counters.read_bytes == sum(n for _, _, n in disk.reads) == store.reader.read_bytes
        assert 0 <= counters.used_prefetch_bytes <= counters.prefetch_bytes
        if not prefetch or slots == K:
            assert counters.prefetch_bytes == 0
        elif slots < experts_in(model):
            assert counters.prefetch_bytes > 0
        assert counters.hit_rate == counters.hit_bytes / (asked * expert_bytes(model))


def test_the_first_use_of_what_was_read_ahead_is_no_hit(package):
    with offloaded(package, 8, prefetch=False) as model:
        store, layer, size = model.offload.store, model.config.moe_layers[0], expert_bytes(model)
        counters = store.counters

        def read_ahead(expert):
            store.prefetch([(layer, expert)])
            store._loads[layer, expert].ticket.wait()

        def use(expert):
            store.begin(layer, np.array([[expert]]), np.ones((1, 1), np.float32))
            store.hold((layer, expert))
            store.release_after(store.wait([(layer, expert)]), mx.zeros(1))
            store.end()

        read_ahead(3)
        use(3)
        assert (counters.prefetch_bytes, counters.used_prefetch_bytes) == (size, size)
        assert (counters.hit_bytes, counters.demand_bytes) == (0, 0)
        use(3)
        assert (counters.hit_bytes, counters.used_prefetch_bytes) == (size, size)

        # What leaves unused and is read ahead once more is no hit either.
        read_ahead(4)
        model.offload.resize(1)
        read_ahead(5)
        assert store.pool.find((layer, 4)) is None
        model.offload.resize(8)
        read_ahead(4)
        use(4)
        assert (counters.prefetch_bytes, counters.used_prefetch_bytes) == (4 * size, 2 * size)
        assert (counters.hit_bytes, counters.demand_bytes) == (size, 0)


def test_a_failed_read_counts_as_no_bytes_asked_for_or_read(package):
    disk = WatchedDisk()
    with offloaded(package, 16, disk) as model:
        answer(model, prompt(5), 3)
        store = model.offload.store
        store.reset()
        before = store.counters.read_bytes
        calls = store.reader.read_calls
        disk.fail(*range(1, 1000))
        with pytest.raises(Exception, match="Input/output error"):
            mx.eval(model(prompt(40)))
        store.reset()
        assert (store.counters.read_bytes, store.reader.read_calls) == (before, calls)


def test_a_trace_records_what_was_chosen_and_read(package, visits, tmp_path):
    file = tmp_path / "trace"
    with offloaded(package, 12, WatchedDisk(), trace=file) as model:
        answer(model, prompt(6), 4)
        model.offload.store.reset()
        counters, layers = model.offload.store.counters, model.config.moe_layers
    trace = read_trace(file)
    assert isinstance(model.offload.store.trace, TraceWriter)
    assert trace.calls["layer"].tolist() == [layer for layer, _ in visits]
    positions = [0, 6, 7, 8, 9]
    assert trace.calls["position"].tolist() == [p for p in positions for _ in layers]
    assert int(trace.reads["nbytes"].sum()) == counters.read_bytes
