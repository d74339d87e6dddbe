"""What the lossy levers keep, drop and count."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3 import K3Error
from mlx_k3.experts.lossy import Levers
from mlx_k3.experts.trace import KINDS, read_trace
from mlx_k3.loader import assemble

from .support.models import convert_golden
from .support.replay import replay

IDS = np.array([[7, 2, 9, 4]])
WEIGHTS = np.array([[0.4, 0.1, 0.3, 0.2]], np.float32)


def test_off_by_default():
    levers = Levers()
    ids, weights = levers.apply(IDS, WEIGHTS, lambda e: False)
    assert ids is IDS and weights is WEIGHTS and levers.dropped_share == 0


def test_active_experts_keeps_the_heaviest_and_the_sum():
    levers = Levers(active_experts=2)
    ids, weights = levers.apply(IDS, WEIGHTS, lambda e: True)
    assert ids.tolist() == [[7, 9]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)
    assert levers.dropped_pairs == 2
    assert levers.dropped_share == pytest.approx(0.3)


def test_drop_missed_takes_the_lightest_misses_only():
    levers = Levers(drop_missed=0.35)
    ids, weights = levers.apply(IDS, WEIGHTS, lambda e: e == 2)
    # 2 is light but there; of the misses 4 (0.2) goes, 9 (0.3) would exceed the share with it.
    assert ids.tolist() == [[7, 2, 9, 7]]
    np.testing.assert_allclose(weights, [[0.5, 0.125, 0.375, 0]], rtol=1e-6)
    assert (levers.dropped_pairs, levers.dropped_share) == (1, pytest.approx(0.2))


def test_the_heaviest_expert_stays_whatever_the_share():
    _, weights = Levers(drop_missed=0.99).apply(
        np.array([[3, 1]]), np.array([[0.1, 0.1]], np.float32), lambda e: False
    )
    assert np.count_nonzero(weights) >= 1
    assert weights.sum() == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [{"active_experts": 0}, {"drop_missed": 1.0}, {"drop_missed": -1}])
def test_levers_that_make_no_sense_are_refused(bad):
    with pytest.raises(K3Error):
        Levers(**bad)


def test_a_trace_tells_what_was_left_out(golden, tmp_path):
    folder = convert_golden(golden, "tiny-text", tmp_path)
    trace = tmp_path / "run.trace"
    levers = Levers(active_experts=2)
    model = replay(assemble(folder, slots=16, trace=trace, levers=levers, prefetch=False))
    cache = model.make_cache()
    for token in range(5):
        mx.eval(model(mx.array([[token + 1]]), cache=cache))
    model.offload.close()
    dropped = read_trace(trace).reads["kind"] == KINDS.index("drop")
    # Two of four experts, in each of four layers, for each of five tokens.
    assert dropped.sum() == levers.dropped_pairs == 40
    assert 0 < levers.dropped_share < 0.5
