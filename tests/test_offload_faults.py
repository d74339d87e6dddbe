"""Experts on demand when things go wrong: one clear error, nothing leaked, right again after it."""

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3 import load
from mlx_k3.errors import BudgetError, CheckpointError, K3Error
from mlx_k3.experts.budget import plan_folder
from mlx_k3.experts.lossy import Levers
from mlx_k3.loader import assemble

from .conftest import REPOSITORY
from .support.interrupts import interrupted_at
from .support.models import convert_golden
from .support.offload import (
    NAMES,
    TOP_K,
    WatchedDisk,
    answer,
    assert_nothing_in_use,
    experts_in,
    in_memory,
    offloaded,
    prompt,
)
from .support.replay import replay

NAME, K = "tiny-text", 4
PREFILL, DECODE = 300, 1  # tokens of a pass


@pytest.fixture(scope="module")
def packages(golden, tmp_path_factory):
    out = tmp_path_factory.mktemp("packages")
    return {name: convert_golden(golden, name, out) for name in NAMES}


@pytest.fixture(scope="module")
def package(packages):
    return packages[NAME]


@pytest.fixture(scope="module")
def resident(package):
    return in_memory(package)


@pytest.fixture(scope="module")
def right(resident):
    """Whether a model still gives the right answer, with nothing left over inside it."""
    want = answer(resident, prompt(7), 6)

    def check(model):
        assert mx.array_equal(answer(model, prompt(7), 6), want)
        assert_nothing_in_use(model)

    return check


class TestReads:
    @pytest.mark.parametrize("slots", [1, K, 12, 64])
    @pytest.mark.parametrize("tokens", [PREFILL, DECODE])
    @pytest.mark.parametrize("nth", [1, 3, 17])
    def test_an_error_names_file_and_offset_and_passes(self, package, right, slots, tokens, nth):
        disk = WatchedDisk()
        with offloaded(package, slots, disk) as model:
            mx.eval(model(prompt(3)))
            model.offload.resize(slots)
            model.offload.store.pool.resize(1)  # so that there is something to read
            model.offload.resize(slots)
            disk.fail(nth)
            with pytest.raises(CheckpointError) as error:
                mx.eval(model(prompt(tokens, seed=5)))
            named = re.fullmatch(
                r"(.+): reading at byte ([\d,]+) failed: Input/output error; check the drive",
                str(error.value),
            )
            offset = int(named[2].replace(",", ""))
            assert 0 < offset < Path(named[1]).stat().st_size
            disk.do(None)
            right(model)

    def test_every_read_of_a_layer_fails(self, package, right):
        """No error is kept for later: all of them belong to the pass that was told."""
        disk = WatchedDisk()
        with offloaded(package, K, disk) as model:
            for _ in range(3):
                disk.fail(*range(1, 10_000))
                with pytest.raises(CheckpointError):
                    mx.eval(model(prompt(DECODE)))
            disk.do(None)
            right(model)

    def test_a_guess_that_fails_costs_nothing(self, package, resident):
        disk = WatchedDisk()
        with offloaded(package, 12, disk) as model:
            store = model.offload.store
            layer = model.config.moe_layers[0]
            disk.fail(*range(1, 100))
            store.prefetch([(layer, expert) for expert in range(12)])
            for load in store._loads.values():
                load.ticket.wait_quietly()
            disk.do(None)
            assert mx.array_equal(model(prompt(40)), resident(prompt(40)))
            assert_nothing_in_use(model)

    @pytest.mark.parametrize("tokens", [PREFILL, DECODE])
    def test_a_file_cut_after_loading(self, package, right, tmp_path, tokens):
        folder = shutil.copytree(package, tmp_path / "package")
        with offloaded(folder, 8) as model:
            file = max(folder.glob("model-experts-*"))
            whole = file.read_bytes()
            os.truncate(file, len(whole) // 2)
            message = f"{re.escape(str(file))} ends [0-9,]+ bytes early, at byte [0-9,]+"
            with pytest.raises(CheckpointError, match=message):
                for seed in range(20):
                    mx.eval(model(prompt(tokens, seed)))
            with open(file, "r+b") as again:
                again.write(whole)
            right(model)

    def test_a_disk_that_stalls(self, package, right):
        disk = WatchedDisk()
        with offloaded(package, K, disk) as model:
            disk.do(lambda call: time.sleep(2) if call == 5 else None)
            right(model)
            assert model.offload.store.counters.stall_seconds > 1.5

    def test_one_thread_of_many_stalls(self, package, resident):
        """A read that hangs holds up whoever needs it, and nobody else."""
        disk, go_on = WatchedDisk(), threading.Event()
        with offloaded(package, 32, disk) as model:
            store, layers = model.offload.store, model.config.moe_layers
            mx.eval(model(prompt(1)))
            store.reset()
            free = next(e for e in range(16) if not store.has((layers[-1], e)))
            disk.do(lambda call: go_on.wait(10) if call == 1 else None)
            store.prefetch([(layers[-1], free)])
            start = time.perf_counter()
            mx.eval(model(prompt(1)))
            assert time.perf_counter() - start < 5
            go_on.set()
            assert mx.array_equal(model(prompt(40)), resident(prompt(40)))


class TestInterrupts:
    @pytest.mark.parametrize("slots", [K, 8, 40])
    @pytest.mark.parametrize("tokens", [PREFILL, DECODE])
    @pytest.mark.parametrize("nth", [1, 10])
    def test_ctrl_c_while_waiting_for_a_read(self, package, right, slots, tokens, nth):
        disk = WatchedDisk()

        def interrupt(call):
            if call == nth:
                os.kill(os.getpid(), signal.SIGINT)
            if call >= nth:
                time.sleep(0.1)  # still reading when the next answer begins

        with offloaded(package, slots, disk) as model:
            disk.do(interrupt)
            with pytest.raises(KeyboardInterrupt):
                mx.eval(model(prompt(tokens, seed=6)))
                time.sleep(20)  # where what is read in vain was the one
            disk.do(None)
            right(model)

    @pytest.mark.parametrize("policy", ["lru", "lfu"])
    @pytest.mark.parametrize("tokens, stride", [(DECODE, 149), (20, 499)])
    def test_an_interrupt_between_any_two_lines(self, package, right, policy, tokens, stride):
        """The next answer is right wherever Ctrl-C came, in the middle of a slot's claim too."""
        with offloaded(package, 8, policy=policy) as model:
            line, total = 1, None
            while total is None:
                with interrupted_at(line) as trace:
                    mx.eval(model(prompt(tokens, seed=line)))
                    total = trace.lines
                right(model)
                line += stride
            assert total > 3 * stride

    def test_an_interrupt_between_any_two_lines_of_a_resize(self, package, right):
        with offloaded(package, 12) as model:
            line, total = 1, None
            while total is None:
                mx.eval(model(prompt(5)))
                with interrupted_at(line, without="offload.py") as trace:
                    model.offload.resize(12 if line % 2 else 6)
                    total = trace.lines
                right(model)
                line += 5
            assert total > 50

    def test_memory_that_runs_out_in_a_resize(self, package, right, monkeypatch):
        from mlx_k3.experts import slots

        allocate, calls = slots._allocate, []

        def fail(piece, count):
            calls.append(piece)
            if len(calls) == 4:
                raise RuntimeError("[malloc] Unable to allocate")
            return allocate(piece, count)

        with offloaded(package, 8) as model:
            mx.eval(model(prompt(5)))
            for count, left in ((100, 8), (6, 6)):
                calls.clear()
                monkeypatch.setattr(slots, "_allocate", fail)
                with pytest.raises(RuntimeError, match="Unable"):
                    model.offload.resize(count)
                assert model.offload.slots == left
                monkeypatch.setattr(slots, "_allocate", allocate)
                right(model)


class TestMemory:
    def test_less_than_the_minimum_is_refused_with_numbers(self, package):
        minimum = plan_folder(package, None).minimum_bytes
        with pytest.raises(BudgetError, match=f"= {minimum:,} bytes; give at least") as error:
            load(package, memory=minimum - 1)
        assert "one layer's active experts" in str(error.value)
        given = re.search(r"give at least (\S+),", str(error.value))[1]
        load(package, memory=given)[0].offload.close()

    @pytest.mark.parametrize("nothing", [0, "0", "0GB"])
    def test_nothing_is_not_unlimited(self, package, nothing):
        with pytest.raises(BudgetError, match="a memory budget of 0"):
            load(package, memory=nothing)

    def test_less_than_nothing(self, package):
        with pytest.raises(K3Error, match="-1"):
            load(package, memory=-1)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_pool_always_holds_what_a_token_needs_of_a_layer(self, packages, name):
        plan = plan_folder(packages[name], None)
        model, _ = load(packages[name], memory=plan.minimum_bytes)
        assert TOP_K[name] == model.offload.slots
        want = answer(in_memory(packages[name]), prompt(40), 5)
        assert mx.array_equal(answer(replay(model), prompt(40), 5), want)
        model.offload.close()

    def test_a_resize_frees_the_old_arrays_as_it_goes(self, package):
        with offloaded(package, 8000) as model:
            # Every reader's thread has filled slots of the first arrays.
            mx.eval(model(prompt(300)))
            store, before = model.offload.store, mx.get_active_memory()
            pool = store.pool.nbytes
            largest = max(piece.nbytes for piece in store.pool.pieces) * 8000
            mx.reset_peak_memory()
            model.offload.resize(7900)
            assert mx.get_peak_memory() - before < 1.2 * largest
            assert abs(mx.get_active_memory() - before) < 0.1 * pool

    def test_a_model_that_is_dropped_leaves_no_threads(self, package):
        gc.collect()
        before = threading.active_count()
        model = assemble(package, slots=8)
        mx.eval(model(prompt(3)))
        assert threading.active_count() > before
        del model
        gc.collect()
        assert threading.active_count() == before


def test_two_processes_on_one_package(package, resident):
    script = (
        "import sys, mlx_k3, numpy as np, mlx.core as mx\n"
        "from pathlib import Path\n"
        "from mlx_k3.loader import assemble\n"
        "from tests.support.replay import replay\n"
        "model = replay(assemble(Path(sys.argv[1]), slots=5))\n"
        "ids = mx.array(np.array(sys.argv[2].split(',')).astype(int)[None])\n"
        "cache, rows = model.make_cache(), []\n"
        "for _ in range(60):\n"
        "    rows.append(model(ids, cache=cache)[:, -1:])\n"
        "    ids = mx.argmax(rows[-1], axis=-1)\n"
        "mx.save_safetensors(sys.argv[3], {'logits': mx.concatenate(rows, axis=1)})\n"
        "model.offload.close()\n"
    )
    wants, running = [], []
    for seed in (1, 2):
        ids, out = prompt(70, seed), package.parent / f"logits-{seed}.safetensors"
        text = ",".join(map(str, ids[0].tolist()))
        command = [sys.executable, "-c", script, str(package), text, str(out)]
        running.append((subprocess.Popen(command, cwd=REPOSITORY), out))
        wants.append(answer(resident, ids, 59)[:, 69:])
    for (process, out), want in zip(running, wants, strict=True):
        assert process.wait(timeout=120) == 0
        assert mx.array_equal(mx.load(str(out))["logits"], want)


def test_a_hundred_random_faults_leak_no_slot(package, right):
    rng, disk = random.Random(0), WatchedDisk()
    errors = 0
    with offloaded(package, 10, disk) as model:
        for _ in range(100):
            disk.fail(*rng.sample(range(1, 60), 3))
            try:
                mx.eval(model(prompt(rng.choice([1, 2, 7, 30, 80]), rng.randrange(1000))))
            except CheckpointError:
                errors += 1
            # Right away: what the failed pass began is still being read.
        assert errors > 50
        disk.do(None)
        right(model)


@pytest.mark.parametrize("seed", range(6))
def test_anything_in_any_order(packages, seed):
    """Prompts, answers, faults, interruptions, resizes and dropped passes, from a seed."""
    rng, disk = random.Random(seed), WatchedDisk()
    name = rng.choice(NAMES)
    resident = in_memory(packages[name])
    options = {
        "policy": rng.choice(["lru", "lfu"]),
        "prefetch": rng.random() < 0.7,
        "levers": Levers(),  # off
    }
    everything = experts_in(resident)

    def size():
        return rng.choice([1, TOP_K[name], rng.randint(2, 20), everything, everything + 5])

    with offloaded(packages[name], size(), disk, **options) as model:
        for _ in range(60):
            event = rng.choice(["answer", "answer", "fault", "interrupt", "resize", "drop"])
            ids = prompt(rng.choice([1, 2, 5, 17, 33, 64, 90]), rng.randrange(1000))
            if event == "fault":
                disk.fail(rng.randint(1, 20))
                try:
                    answer(model, ids, 2)
                except CheckpointError as error:
                    assert "Input/output error" in str(error)
                disk.do(None)
            elif event == "interrupt":
                with interrupted_at(rng.randint(1, 1500)):
                    answer(model, ids, 2)
            elif event == "resize":
                model.offload.resize(size())
            elif event == "drop":
                model(ids)
            else:
                steps = rng.randint(0, 6)
                got, want = answer(model, ids, steps), answer(resident, ids, steps)
                assert mx.array_equal(got, want), (seed, name, model.offload.slots)
        assert_nothing_in_use(model)
        assert np.isfinite(model.offload.usage().hit_rate)
