"""Replacement policies against plain models of what they promise.

Uses come in recorded order where a policy must tell experts apart by them; else in any order, at
random, or in the worst one: also what no model would ask for has to be right.
"""

import random
import time

import pytest

from mlx_k3.experts.policy import LFU, LRU, POLICIES, Policy

from .support.interrupts import interrupted_at
from .support.routing import routing

KEYS = [(layer, expert) for layer in range(4) for expert in range(10)]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


def test_only_what_is_on_offer_leaves_and_only_once(policy: Policy) -> None:
    rng = random.Random(0)
    offered = set()
    for _ in range(20_000):
        key, act = rng.choice(KEYS), rng.randrange(5)
        if act == 0:
            victim = policy.victim()
            assert (victim is None) == (not offered)
            assert victim is None or victim in offered
            offered.discard(victim)
        elif act == 1:
            policy.hold(key)
            offered.discard(key)
        elif act == 2:
            policy.offer(key)
            offered.add(key)
        else:
            policy.used(key, key in offered)
    left = set()
    while (victim := policy.victim()) is not None:
        left.add(victim)
    assert left == offered


def test_lru_against_a_list() -> None:
    rng = random.Random(1)
    policy, order = LRU(), []
    for _ in range(20_000):
        key, act = rng.choice(KEYS), rng.randrange(8)
        if act == 0:
            assert policy.victim() == (order.pop(0) if order else None)
        elif act == 1:
            policy.hold(key)
            order = [other for other in order if other != key]
        elif key in order:
            policy.used(key, True)
            order.remove(key)
            order.append(key)
        else:
            policy.used(key, False)
            policy.offer(key)
            order.append(key)


def test_lfu_against_the_sum_of_aged_uses() -> None:
    """Also with the times of use kept for experts that have left."""
    rng = random.Random(2)
    half_life = 50
    recorded = [
        (layer, expert)
        for token in routing(700, 4).tolist()
        for layer, experts in enumerate(token)
        for expert in experts
    ]
    keys = iter(recorded)
    policy, uses, offered, now = LFU(half_life), {key: [] for key in recorded}, set(), 0

    def worth(key: tuple[int, int]) -> float:
        return sum(2 ** ((then - now) / half_life) for then in uses[key])

    victims = 0
    for _ in range(10_000):
        if rng.random() < 0.2 and offered:
            victim = policy.victim()
            assert worth(victim) == pytest.approx(min(map(worth, offered)), rel=1e-9)
            offered.remove(victim)
            victims += 1
        else:
            key = next(keys)
            now += 1
            uses[key].append(now)
            policy.used(key, key in offered)
            policy.offer(key)
            offered.add(key)
    assert victims > 1000


def test_lfu_prefers_the_frequent_to_the_recent_and_forgets_with_time() -> None:
    policy = LFU(half_life=1000)
    often, once = (0, 0), (0, 1)
    for _ in range(10):
        policy.used(often, True)
    policy.used(once, False)
    policy.offer(often)
    policy.offer(once)
    assert policy.victim() == once
    policy.offer(once)
    for i in range(5000):
        policy.used((1, i), False)
    for _ in range(2):
        policy.used(once, True)
    assert policy.victim() == often


def test_lfu_does_not_overflow_after_very_many_uses() -> None:
    policy = LFU(half_life=1)
    for i in range(5000):
        policy.used((0, i % 2), True)
    policy.offer((0, 0))
    policy.offer((0, 1))
    assert policy.victim() == (0, 0)


def test_memory_does_not_grow_with_uses(policy: Policy) -> None:
    for key in KEYS:
        policy.offer(key)
    for i in range(50_000):
        policy.used(KEYS[i % len(KEYS)], True)
    sizes = [len(part) for part in vars(policy).values() if hasattr(part, "__len__")]
    assert max(sizes) <= 64 + 2 * len(KEYS) + 1


def test_ten_thousand_slots_with_half_of_them_in_use_cost_no_search(policy: Policy) -> None:
    """20,000 replacements; looking at every leased expert each time would be 10^8 steps."""
    leased = [(0, expert) for expert in range(5000)]
    for key in leased:
        policy.used(key, False)
    for expert in range(5000):
        for _ in range(2):
            policy.used((1, expert), True)
        policy.offer((1, expert))
    start = time.perf_counter()
    for expert in range(20_000):
        assert policy.victim()[0] > 0
        policy.used((2, expert), False)
        policy.offer((2, expert))
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("line", range(1, 9))
def test_what_was_cut_short_is_on_offer_again(policy: Policy, line: int) -> None:
    """Ctrl-C between any two lines of a choice, then every key offered anew, as the pool does."""
    keys = KEYS[:3]
    for key in keys:
        policy.used(key, False)
        policy.offer(key)
    with interrupted_at(line):
        policy.victim()
    for key in keys:
        policy.offer(key)
    assert sorted(policy.victim() for _ in keys) == keys
    assert policy.victim() is None
