"""Traces: the file, the figures, the simulated pools and the command.

Routing is recorded from the bundled model, except where the definition of a figure or a pool is to
hold for any requests there can be: these are made up by hand or by hypothesis.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mlx_k3.cli import app
from mlx_k3.errors import CheckpointError, K3Error
from mlx_k3.experts import trace as trace_module
from mlx_k3.experts.policy import LRU, POLICIES
from mlx_k3.experts.simulate import (
    Requests,
    decode_requests,
    optimal_hits,
    simulate,
    stack_distances,
)
from mlx_k3.experts.trace import TraceWriter, read_trace
from mlx_k3.experts.trace_plot import residency
from mlx_k3.experts.trace_report import measure, report, simulate_pools

from .conftest import REPOSITORY
from .support.routing import routing, write_decode

HEADER = {"expert_bytes": 100, "slots": 8, "layers": [1, 2]}


class Clock:
    """Stands in for the ``time`` module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trace_module, "time", clock)
    return clock


def route(writer: TraceWriter, position: int, layer: int, experts: list) -> None:
    """Record a call with equal weights; ``experts`` is one token's list, or several tokens'."""
    ids = np.atleast_2d(np.array(experts))
    writer.route(position, layer, ids, np.full(ids.shape, 1 / ids.shape[1], np.float32))


def requests_of(*calls: list[int]) -> Requests:
    """Each call on its own is a token."""
    starts = np.cumsum([0, *map(len, calls)])
    experts = np.array([e for call in calls for e in call], np.int32)
    names = [(0, e) for e in range(1 + int(experts.max(initial=-1)))]
    return Requests(experts, starts, names, len(calls))


# The file


def test_reads_back_what_was_written(tmp_path: Path, clock: Clock) -> None:
    rng = np.random.default_rng(0)
    prompt, answer = rng.integers(0, 896, (5, 16)), rng.integers(0, 896, (1, 4))
    weights = rng.random((5, 16)).astype(np.float32)
    with TraceWriter(tmp_path / "a", HEADER | {"model": "tiny"}) as writer:
        writer.io(1, 7, 100, "prefetch", 999.5, 0.25)
        clock.now += 2
        writer.route(0, 1, prompt, weights)
        writer.io(1, 895, 2**33, "demand", 1002.5, 0.125)
        writer.stall(1, 0.5)
        clock.now += 1
        writer.route(5, 92, answer, weights[:1, :4])
        writer.io(92, 3, 100, "hit", 1003, 0)
    trace = read_trace(tmp_path / "a")
    assert trace.header == HEADER | {"model": "tiny"}
    assert trace.closed
    assert trace.calls.tolist() == [(0, 1, 16, 5, 2.0), (5, 92, 4, 1, 3.0)]
    for call, (experts, w) in enumerate([(prompt, weights), (answer, weights[:1, :4])]):
        assert trace.choices(call)[0].tolist() == experts.tolist()
        assert np.array_equal(trace.choices(call)[1], w.astype(np.float16))
    assert trace.reads.tolist() == [
        (-1, 1, 7, 1, 100, -0.5, 0.25),
        (0, 1, 895, 0, 2**33, 2.5, 0.125),
        (1, 92, 3, 2, 100, 3.0, 0.0),
    ]
    assert trace.stalls.tolist() == [(0, 1, 0.5)]


def test_an_array_may_change_after_it_was_recorded(tmp_path: Path) -> None:
    experts, weights = np.array([[3, 5]], np.uint16), np.array([[0.25, 0.75]], np.float16)
    with TraceWriter(tmp_path / "a", HEADER) as writer:
        writer.route(0, 1, experts, weights)
        experts[:], weights[:] = 9, 0
    ids, kept = read_trace(tmp_path / "a").choices(0)
    assert ids.tolist() == [[3, 5]] and kept.tolist() == [[0.25, 0.75]]


def test_choices_that_are_no_table_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a", HEADER) as writer, pytest.raises(ValueError, match="tokens"):
        writer.route(0, 1, np.zeros((1, 4)), np.zeros((1, 3)))
    assert len(read_trace(tmp_path / "a").calls) == 0


@pytest.mark.parametrize("bad", [{}, {"expert_bytes": 0}, {"expert_bytes": 1, "slots": 0}])
def test_a_header_must_say_what_figures_need(tmp_path: Path, bad: dict) -> None:
    with pytest.raises(ValueError, match=r"expert_bytes|slots"):
        TraceWriter(tmp_path / "a", bad)
    assert not (tmp_path / "a").exists()


def test_events_reach_the_file_without_more_calls(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "a", HEADER)
    try:
        route(writer, 0, 1, [1, 2])
        deadline = time.monotonic() + 1
        while not len(read_trace(tmp_path / "a").calls):
            assert time.monotonic() < deadline, "not written within a second"
            time.sleep(0.02)
        assert not read_trace(tmp_path / "a").closed
    finally:
        writer.close()


def test_a_killed_process_leaves_all_but_its_last_second(tmp_path: Path) -> None:
    code = """
import sys, time
import numpy as np
from mlx_k3.experts.trace import TraceWriter
writer = TraceWriter(sys.argv[1], {"expert_bytes": 1, "slots": None})
for position in range(1_000_000):
    writer.route(position, 1, np.array([[1, 2]]), np.array([[.5, .5]]))
    print(position, time.time(), flush=True)
    time.sleep(.01)
"""
    path = tmp_path / "a"
    run = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        lines = [process.stdout.readline() for _ in range(180)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
    trace = read_trace(path)
    times = [float(line.split()[1]) for line in lines if line.endswith("\n")]
    safe = sum(moment < times[-1] - 1 for moment in times)
    assert safe > 20, "the process ran too short a time to tell"
    assert not trace.closed
    assert safe <= len(trace.calls) <= len(times) + 1
    assert trace.calls["position"].tolist() == list(range(len(trace.calls)))


def test_every_beginning_of_a_file_reads(tmp_path: Path) -> None:
    path = write_decode(tmp_path / "a", routing(3, 2))
    data = path.read_bytes()
    start = data.index(b"\n") + 1
    counts = set()
    for end in range(start, len(data)):
        path.write_bytes(data[:end])
        trace = read_trace(path)
        assert not trace.closed
        counts.add(len(trace.calls))
    assert counts == {0, 6}


def test_damage_before_the_end_is_reported(tmp_path: Path) -> None:
    path = write_decode(tmp_path / "a", routing(3, 2))
    data = bytearray(path.read_bytes())
    start = data.index(b"\n") + 1
    data[start + 20] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"damaged at byte {start:,}"):
        read_trace(path)
    data[start] = ord("?")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"damaged at byte {start:,}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trace"),
        (b"\x00\xff\n", "is not a trace"),
        (b"[1, 2]\n", "is not a trace"),
        (b'{"a": 1}\n', "is not a trace"),
        (b'{"mlx_k3_trace": 2}\n', "version 2"),
        (b'{"mlx_k3_trace": 1, "expert_bytes": "x"}\n', "damaged header"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_trace(tmp_path / "a")


def test_a_full_disk_ends_the_recording_but_not_the_run() -> None:
    writer = TraceWriter("/dev/full", HEADER) if Path("/dev/full").exists() else None
    if writer is None:
        pytest.skip("no /dev/full here")
    for position in range(10):
        route(writer, position, 1, [1, 2])
    with pytest.raises(K3Error, match="/dev/full: the trace is cut short: No space left"):
        writer.close()
    assert not any(t.name == "trace" for t in threading.enumerate())


def test_a_file_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(K3Error, match="cannot record a trace: No such file"):
        TraceWriter(tmp_path / "no" / "a", HEADER)


def test_a_token_of_k3_takes_few_bytes_and_little_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    choices = routing(20, 92, 896, 16)
    weights = rng.random((20, 92, 1, 16)).astype(np.float32)
    writer = TraceWriter(tmp_path / "a", {"expert_bytes": 17_547_264, "slots": 1472})
    start = time.process_time()
    for position, token in enumerate(choices):
        for layer, experts in enumerate(token):
            writer.route(position, layer, experts[None], weights[position, layer])
            for expert in experts[::2].tolist():
                writer.io(layer, expert, 17_547_264, "demand", time.perf_counter(), 0.002)
            writer.stall(layer, 0.002)
    seconds = (time.process_time() - start) / 20
    writer.close()
    assert (tmp_path / "a").stat().st_size / 20 < 20_000
    assert seconds < 0.02, "two per cent of a token that takes a second"


# The figures


def test_measures_a_hand_made_run(tmp_path: Path, clock: Clock) -> None:
    """A prompt of two tokens, then two tokens; two layers of which each token uses two experts."""
    with TraceWriter(tmp_path / "a", HEADER) as writer:
        route(writer, 0, 1, [[0, 1], [1, 2]])  # needs three
        for expert in (0, 1, 2):
            writer.io(1, expert, 100, "demand", clock.now, 0.5)
        clock.now += 1
        route(writer, 0, 2, [[0, 1], [0, 1]])  # needs two, one of them was read ahead
        writer.io(2, 0, 100, "prefetch", clock.now, 0.1)
        writer.io(2, 1, 100, "demand", clock.now, 0.1)
        clock.now += 2
        route(writer, 2, 1, [0, 3])  # one there, one read
        writer.io(1, 3, 100, "demand", clock.now, 1.0)
        writer.stall(1, 1.0)
        writer.io(2, 7, 100, "prefetch", clock.now + 0.5, 1.0)  # never used
        writer.io(2, 5, 100, "prefetch", clock.now + 0.5, 1.0)
        clock.now += 2
        route(writer, 2, 2, [0, 5])  # one there, one read ahead: no hit
        clock.now += 2
        route(writer, 3, 1, [0, 3])  # both there
        clock.now += 1
        route(writer, 3, 2, [1, 6])  # one there, one left out
        writer.io(2, 6, 0, "drop", clock.now, 0.0)
        clock.now += 1000  # someone types
        route(writer, 4, 1, [[0, 1], [1, 2]])
        clock.now += 1
        route(writer, 4, 2, [[0, 1], [1, 0]])
    trace = read_trace(tmp_path / "a")
    decode = measure(trace, decode=True)
    assert decode.pop("stall_share") == pytest.approx(1 / 5)
    assert decode.pop("read_bytes_per_second") == pytest.approx(300 / 1.5)
    assert decode == {
        "tokens": 2,
        "seconds": pytest.approx(5),
        "tokens_per_second": pytest.approx(2 / 5),
        "needed_bytes": 700,
        "read_bytes": 300,
        "demand_bytes": 100,
        "prefetch_bytes": 200,
        "useful_prefetch_bytes": 100,
        "dropped_experts": 1,
        "hit_rate": pytest.approx(5 / 7),
        "needed_bytes_per_token": 350,
        "read_bytes_per_token": 150,
        "stall_seconds": 1.0,
    }
    prefill = measure(trace, decode=False)
    assert prefill["tokens"] == 4
    assert prefill["needed_bytes"] == 1000
    assert prefill["read_bytes"] == 500
    assert prefill["useful_prefetch_bytes"] == 100
    assert prefill["hit_rate"] == pytest.approx(1 / 2)
    assert prefill["seconds"] == pytest.approx(4)
    assert prefill["stall_share"] == 0


def test_what_was_read_ahead_is_no_hit_whenever_it_is_used(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a", HEADER) as writer:
        writer.io(1, 5, 100, "prefetch", 0, 0.1)  # useful, two tokens later
        writer.io(1, 6, 100, "prefetch", 0, 0.1)  # evicted before its use
        writer.io(2, 5, 100, "prefetch", 0, 0.1)  # the same number in another layer: unused
        for position, experts in enumerate([[1, 2], [1, 2], [5, 6], [5, 6]]):
            route(writer, position, 1, experts)
            for expert in {0: [1, 2], 2: [6]}.get(position, []):
                writer.io(1, expert, 100, "demand", 0, 0.1)
    decode = measure(read_trace(tmp_path / "a"), decode=True)
    assert (decode["demand_bytes"], decode["useful_prefetch_bytes"]) == (300, 100)
    assert decode["hit_rate"] == 4 / 8


def test_an_empty_trace_has_figures(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "a", HEADER).close()
    facts = report(read_trace(tmp_path / "a"))
    assert facts["decode"]["hit_rate"] is None and facts["prefill"]["tokens"] == 0
    assert facts["simulation"]["pools"] == [] and facts["complete"]
    json.dumps(facts)


def test_decode_requests_leave_out_prefill_and_repetition(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a", HEADER) as writer:
        route(writer, 0, 1, [[0, 1], [2, 3]])
        route(writer, 2, 1, [9, 4])
        route(writer, 2, 3, [4, 4])
        route(writer, 3, 1, [4, 0])
    requests = decode_requests(read_trace(tmp_path / "a"))
    assert requests.names == [(1, 0), (1, 4), (1, 9), (3, 4)]
    assert requests.experts.tolist() == [1, 2, 3, 0, 1]
    assert requests.starts.tolist() == [0, 2, 3, 5]
    assert (requests.tokens, requests.largest_call) == (2, 2)


def test_the_last_tokens_are_whole(tmp_path: Path) -> None:
    choices = routing(9, 3)
    requests = decode_requests(read_trace(write_decode(tmp_path / "a", choices)))
    last = requests.last_tokens(2)
    assert (last.tokens, last.working_set, len(last.starts)) == (2, 12, 7)
    expected = [(layer, e) for token in choices[-2:] for layer in range(3) for e in token[layer]]
    assert [last.names[e] for e in last.experts] == expected
    assert requests.last_tokens(100).experts.tolist() == requests.experts.tolist()


# Reuse and simulation


def brute_distances(experts: list[int]) -> list[int]:
    result = []
    for i, expert in enumerate(experts):
        earlier = [j for j in range(i) if experts[j] == expert]
        result.append(len(set(experts[earlier[-1] + 1 : i])) if earlier else -1)
    return result


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=120), st.sampled_from([1, 2, 7, 16, 256]))
def test_stack_distances_are_those_of_the_definition(experts: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_k3.experts.simulate._BLOCK", block)
        found = stack_distances(np.array(experts, np.int32))
    assert found.tolist() == brute_distances(experts)


def test_stack_distances_of_known_sequences() -> None:
    assert stack_distances(np.array([0, 1, 2, 0, 0, 2, 1])).tolist() == [-1, -1, -1, 2, 0, 1, 2]
    cycle = np.tile(np.arange(100), 30)
    assert set(stack_distances(cycle)[100:].tolist()) == {99}


def test_optimum_of_known_sequences() -> None:
    # The textbook's: 20 references, three frames, nine faults.
    pages = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]
    assert optimal_hits(requests_of(*([p] for p in pages)), 3) == 11
    assert simulate(requests_of(*([p] for p in pages)), 3, LRU()).hits == 8
    # A cycle of four through three slots: LRU never hits, the optimum two times of three.
    cycle = requests_of(*([i % 4] for i in range(31)))
    assert simulate(cycle, 3, LRU()).hits == 0
    assert optimal_hits(cycle, 3) == 18
    # A call's experts must be there together: 0 cannot stay while 1 and 2 are used, one of which
    # then stays.
    assert optimal_hits(requests_of([0], [1, 2], [0], [1, 2]), 2) == 1
    assert optimal_hits(requests_of([0], [1, 2], [0], [1, 2]), 3) == 3


def exhaustive_hits(requests: Requests, slots: int) -> int:
    """The most hits over all possible evictions."""
    best = {frozenset(): 0}
    for start, end in pairwise(requests.starts):
        call = frozenset(requests.experts[start:end].tolist())
        after: dict[frozenset, int] = {}
        for pool, hits in best.items():
            others = pool - call
            keep = min(len(others), slots - len(call))
            for kept in combinations(sorted(others), keep):
                now = frozenset(kept) | call
                after[now] = max(after.get(now, 0), hits + len(pool & call))
        best = after
    return max(best.values())


calls = st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=3).map(sorted), max_size=14)


@settings(deadline=None)
@given(calls, st.integers(3, 6))
def test_the_optimum_is_the_best_of_all_decisions(calls: list[list[int]], slots: int) -> None:
    requests = requests_of(*calls)
    assert optimal_hits(requests, slots) == exhaustive_hits(requests, slots)


many_calls = st.lists(st.sets(st.integers(0, 30), min_size=4, max_size=4).map(sorted), max_size=60)


@settings(deadline=None)
@given(many_calls, st.integers(4, 32))
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_beats_the_optimum(name: str, calls: list[list[int]], slots: int) -> None:
    requests = requests_of(*calls)
    hits = simulate(requests, slots, POLICIES[name]()).hits
    best = optimal_hits(requests, slots)
    assert hits <= best
    first_uses = len(set(requests.experts.tolist()))
    everything_fits = len(requests.experts) - first_uses
    assert best <= everything_fits
    if slots >= first_uses:
        assert hits == everything_fits


@settings(deadline=None)
@given(many_calls, st.integers(4, 32))
def test_lru_is_the_pool_of_the_most_recent(calls: list[list[int]], slots: int) -> None:
    requests, recent, hits = requests_of(*calls), [], 0
    for call in calls:
        hits += len(set(call) & set(recent[:slots]))
        recent = call[::-1] + [expert for expert in recent if expert not in call]
    assert simulate(requests, slots, LRU()).hits == hits


def test_too_few_slots_for_a_call_are_refused() -> None:
    for run in (lambda r: optimal_hits(r, 2), lambda r: simulate(r, 2, LRU())):
        with pytest.raises(ValueError, match="2 slots cannot hold the 3"):
            run(requests_of([1, 2, 3]))


def test_residency_of_a_known_sequence() -> None:
    # With two slots, after each call: 0 | 0 1 | 0 2 | 3 2; expert 4 belongs to other calls.
    requests = requests_of([0], [1], [0, 2], [3])
    requests.names.append((5, 4))
    layers, shares = residency(requests, 2, "lru")
    assert layers == [0, 5]
    assert shares[0, :4].tolist() == [0.75, 0.25, 0.5, 0.25]
    assert np.isnan(shares[0, 4]) and np.isnan(shares[1]).all()


def test_pools_by_size(tmp_path: Path) -> None:
    trace = read_trace(write_decode(tmp_path / "a", routing(60, 6)))
    pools = simulate_pools(decode_requests(trace), trace.header | {"slots": 40})
    assert [p["slots"] for p in pools] == [6, 12, 24, 36, 40, 48, 72, 96]
    assert pools[2]["working_sets"] == 1 and pools[2]["pool_bytes"] == 24_000
    for name in pools[0]["hit_rate"]:
        rates = [p["hit_rate"][name] for p in pools]
        assert rates[0] < rates[-1] < 1
        assert all(p["hit_rate"][name] <= p["hit_rate"]["optimal"] for p in pools)
    below_a_token = pools[0]["hit_rate"]
    assert below_a_token["lru"] == 0 < below_a_token["optimal"]


def test_several_processes_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read_trace(write_decode(tmp_path / "a", routing(20, 3)))
    requests = decode_requests(trace)
    monkeypatch.setattr("mlx_k3.experts.trace_report._FEW_STEPS", 0)
    alone = simulate_pools(requests, trace.header)
    assert alone and simulate_pools(requests, trace.header, processes=2) == alone


# The command


def test_command_prints_figures_and_draws(tmp_path: Path) -> None:
    path = write_decode(tmp_path / "run.trace", routing(30, 4))
    picture = tmp_path / "run.png"
    result = CliRunner().invoke(app, ["trace", str(path), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "A token needs 16 experts, 16 KB" in result.stdout
    assert "the last 30 tokens" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["trace", str(path), "--json", "--tokens", "10"])
    facts = json.loads(result.stdout)
    assert facts["simulation"]["tokens"] == 10 and facts["reuse"]["accesses"] == 480
    assert facts["decode"]["tokens"] == 30 and facts["decode"]["hit_rate"] == 1


@pytest.mark.parametrize(
    ("plot", "message"), [("a.docx", "cannot draw .docx"), ("no/such/a.png", "is no folder")]
)
def test_command_refuses_a_picture_it_cannot_draw(tmp_path: Path, plot: str, message: str) -> None:
    path = write_decode(tmp_path / "run.trace", routing(3, 2))
    result = CliRunner().invoke(app, ["trace", str(path), "--plot", str(tmp_path / plot)])
    assert isinstance(result.exception, K3Error) and message in str(result.exception)


def test_command_says_what_is_missing_to_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decode(tmp_path / "run.trace", routing(3, 2))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["trace", str(path), "--plot", str(tmp_path / "a.png")])
    assert isinstance(result.exception, K3Error) and "mlx-k3[plot]" in str(result.exception)


def test_command_reads_without_mlx(tmp_path: Path) -> None:
    path = write_decode(tmp_path / "run.trace", routing(3, 2))
    code = (
        "import sys; from mlx_k3.cli import app; app(['trace', sys.argv[1]], standalone_mode=False)"
        "; sys.exit('mlx.core' in sys.modules)"
    )
    run = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(run, cwd=REPOSITORY, stdout=subprocess.DEVNULL).returncode == 0
