"""The slot pool: arrays that share their bytes, leases that hold, generations that tell."""

import itertools
import os
import random
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.checkpoint.extents import Piece
from mlx_k3.experts import slots as slots_module
from mlx_k3.experts.policy import LFU, LRU
from mlx_k3.experts.slots import ALIGNMENT, SlotPool

from .support.disks import address

K3_LIKE = (Piece("gate_proj.weight", "U32", (64, 64)), Piece("gate_proj.scales", "U8", (1024, 16)))
ODD = (
    Piece("a", "U32", (5, 3)),
    Piece("b", "U8", (7,)),
    Piece("c", "BF16", (3, 5)),
    Piece("d", "F16", (2, 1)),
    Piece("e", "F32", (1, 1, 3)),
)


def pool_of(slots: int, pieces: tuple[Piece, ...] = ODD) -> SlotPool:
    return SlotPool(pieces, slots, LRU())


def put(pool: SlotPool, key: tuple[int, int]) -> int:
    """Claim a slot for ``key`` and fill it with bytes that only this expert has."""
    slot = pool.claim(key)
    assert slot is not None
    for buffer, expected in zip(pool.buffers(slot), content(pool, key), strict=True):
        buffer[:] = expected
    pool.filled(slot)
    return slot


def content(pool: SlotPool, key: tuple[int, int]) -> list[bytes]:
    rng = np.random.default_rng(key)
    return [rng.bytes(piece.nbytes) for piece in pool.pieces]


def in_arrays(pool: SlotPool, slot: int) -> list[bytes]:
    """The slot's bytes as MLX sees them."""
    rows = [pool.arrays[piece.name][slot].reshape(-1).view(mx.uint8) for piece in pool.pieces]
    return [bytes(memoryview(mx.contiguous(row))) for row in rows]


@pytest.mark.parametrize("pieces", [ODD, K3_LIKE])
@pytest.mark.parametrize("limit", [2**31 - 1, 0])
def test_arrays_share_their_bytes_with_the_buffers(pieces, limit, monkeypatch) -> None:
    monkeypatch.setattr(slots_module, "MAX_ELEMENTS", limit)
    pool = pool_of(5, pieces)
    assert list(pool.arrays) == [piece.name for piece in pieces]
    for piece in pieces:
        array = pool.arrays[piece.name]
        assert array.shape == (5, *piece.shape)
        assert array.dtype == slots_module.DTYPES[piece.dtype]
        assert not mx.any(array.view(mx.uint8)).item()
    for expert in range(8):  # the last three replace the first
        slot = put(pool, (3, expert))
        assert in_arrays(pool, slot) == content(pool, (3, expert))
    for key in pool.resident():
        assert in_arrays(pool, pool.find(key)) == content(pool, key)
    assert len(pool) == 5 and pool.nbytes == 5 * sum(piece.nbytes for piece in pieces)


def test_slots_are_aligned_for_direct_reads() -> None:
    pool = pool_of(7, K3_LIKE)
    for slot in range(7):
        for buffer, piece in zip(pool.buffers(slot), pool.pieces, strict=True):
            assert address(buffer) % ALIGNMENT == 0
            assert len(buffer) == piece.nbytes == 16_384
    # Pieces of odd sizes begin on a boundary at least.
    assert all(address(buffer) % ALIGNMENT == 0 for buffer in pool_of(3).buffers(0))


def test_products_see_a_refill() -> None:
    """What MLX computes from the arrays is the slot's present content, without a copy."""
    pool = SlotPool((Piece("w", "F32", (8, 16)),), 2, LRU())
    x = mx.ones((1, 16))
    for expert in range(6):
        slot = pool.claim((0, expert))
        memory = np.frombuffer(pool.buffers(slot)[0], np.float32)
        memory[:] = np.arange(128) * (expert + 1)
        pool.filled(slot)
        ids = mx.array([[slot]])
        y = mx.gather_mm(x[None], pool.arrays["w"].swapaxes(-1, -2), rhs_indices=ids)
        expected = memory.reshape(8, 16).sum(axis=1)
        assert np.array_equal(np.array(y).reshape(-1), expected)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_is_taken_at_once() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    pool = SlotPool((Piece("w", "U32", (1024, 1024)),), 32, LRU())
    assert resident_bytes() - before >= 0.98 * pool.nbytes


def test_the_life_of_a_slot() -> None:
    pool = pool_of(2)
    slot = pool.claim((1, 1))
    assert pool.find((1, 1)) is None and pool.resident() == []
    with pytest.raises(ValueError, match="has a slot already"):
        pool.claim((1, 1))
    with pytest.raises(ValueError, match="not filled"):
        pool.lease([slot])
    pool.filled(slot)
    assert pool.find((1, 1)) == slot and pool.resident() == [(1, 1)]
    for act in (pool.filled, pool.abandon):
        with pytest.raises(ValueError, match="not loading"):
            act(slot)
    with pytest.raises(ValueError, match="has a slot already"):
        pool.claim((1, 1))

    other = pool.claim((1, 2))
    assert other != slot
    pool.abandon(other)
    assert pool.find((1, 2)) is None
    with pytest.raises(ValueError, match="not loading"):
        pool.filled(other)
    with pytest.raises(ValueError, match="not filled"):
        pool.lease([slot, other])
    # The failed lease left nothing behind: both slots can still be had.
    assert {pool.claim((2, 1)), pool.claim((2, 2))} == {slot, other}
    assert pool.resident() == []


def test_no_slot_is_given_while_all_are_loading_or_leased() -> None:
    pool = pool_of(3)
    first, second = put(pool, (0, 0)), put(pool, (0, 1))
    loading = pool.claim((0, 2))
    lease, again = pool.lease([first, second]), pool.lease([first])
    assert pool.claim((0, 3)) is None
    lease.release()
    assert pool.claim((0, 3)) == second
    assert pool.claim((0, 4)) is None
    again.release()
    assert pool.claim((0, 4)) == first
    pool.abandon(loading)
    assert pool.claim((0, 5)) == loading


def test_releasing_twice_releases_once() -> None:
    pool = pool_of(1)
    slot = put(pool, (0, 0))
    kept = pool.lease([slot])
    with pool.lease([slot, slot]) as lease:
        lease.release()
        lease.release()
    assert pool.claim((0, 1)) is None
    kept.check()
    kept.release()
    assert pool.claim((0, 1)) == slot


def test_a_lease_tells_when_its_slot_was_refilled() -> None:
    pool = pool_of(1)
    lease = pool.lease([put(pool, (0, 0))])
    lease.check()
    lease.release()
    lease.check()
    put(pool, (0, 1))
    with pytest.raises(RuntimeError, match="slot 0 was refilled while in use"):
        lease.check()
    # The same expert again is another filling, too.
    lease = pool.lease([0])
    lease.release()
    put(pool, (0, 0))
    put(pool, (0, 1))
    with pytest.raises(RuntimeError, match="refilled"):
        lease.check()


def test_a_lease_ends_with_its_block_also_on_an_error() -> None:
    pool = pool_of(1)
    with pytest.raises(ZeroDivisionError), pool.lease([put(pool, (0, 0))]):
        assert pool.claim((0, 1)) is None
        raise ZeroDivisionError
    assert pool.claim((0, 1)) == 0


def test_the_policy_decides_who_leaves() -> None:
    pool = pool_of(3)
    for expert in range(3):
        put(pool, (0, expert))
    pool.touch((0, 0))
    put(pool, (0, 3))
    assert set(pool.resident()) == {(0, 0), (0, 2), (0, 3)}

    pool = SlotPool(ODD, 3, LFU())
    for expert in range(3):
        put(pool, (0, expert))
    for expert in (0, 0, 1, 1):
        pool.touch((0, expert))
    put(pool, (0, 3))
    put(pool, (0, 4))
    assert set(pool.resident()) == {(0, 0), (0, 1), (0, 4)}


@pytest.mark.parametrize("slots", [1, 3, 5, 9])
def test_resizing_keeps_the_best(slots: int) -> None:
    pool = pool_of(5)
    for expert in range(7):
        put(pool, (2, expert))
    pool.touch((2, 3))
    before = dict(pool.arrays)
    pool.resize(slots)
    best = [(2, 3), (2, 6), (2, 5), (2, 4), (2, 2)][:slots]
    assert sorted(pool.resident()) == sorted(best)
    assert all(pool.arrays[name] is not before[name] for name in before)
    assert len(pool) == slots and pool.arrays["a"].shape == (slots, 5, 3)
    for key in best:
        assert in_arrays(pool, pool.find(key)) == content(pool, key)
        pool.lease([pool.find(key)]).release()
    # Goes on as before: every slot can be filled, each with its own expert.
    for expert in range(20, 20 + slots):
        put(pool, (2, expert))
    assert sorted(pool.resident()) == [(2, 20 + i) for i in range(slots)]
    for key in pool.resident():
        assert in_arrays(pool, pool.find(key)) == content(pool, key)


def test_resizing_is_refused_while_slots_are_in_use() -> None:
    pool = pool_of(2)
    slot = put(pool, (0, 0))
    with pool.lease([slot]), pytest.raises(ValueError, match="leased or loading"):
        pool.resize(3)
    loading = pool.claim((0, 1))
    with pytest.raises(ValueError, match="leased or loading"):
        pool.resize(3)
    pool.abandon(loading)
    for slots in (0, -1):
        with pytest.raises(ValueError, match="at least one slot"):
            pool.resize(slots)
        with pytest.raises(ValueError, match="at least one slot"):
            pool_of(slots)
    # What was refused changed nothing.
    assert len(pool) == 2 and pool.resident() == [(0, 0)]
    assert in_arrays(pool, slot) == content(pool, (0, 0))
    pool.resize(3)
    assert pool.resident() == [(0, 0)]


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_no_slot_is_refilled_while_it_is_leased(policy) -> None:
    """32 threads fill, use and abandon 8 slots; whoever holds a lease sees only its expert.

    Experts at random, and three times as many as slots, so that most of them are missing.
    """
    pool = SlotPool((Piece("w", "U8", (512,)),), 8, policy())
    faults, leased = [], itertools.count()
    start = threading.Barrier(32)

    def user(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        for _ in range(400):
            expert = rng.randrange(24)
            slot = pool.find((0, expert))
            if slot is None:
                try:
                    slot = pool.claim((0, expert))
                except ValueError:  # Somebody else reads it just now.
                    continue
                if slot is None:
                    continue
                pool.buffers(slot)[0][:] = bytes([expert]) * 512
                if rng.random() < 0.1:
                    pool.abandon(slot)
                    continue
                pool.filled(slot)
            else:
                pool.touch((0, expert))
            try:
                lease = pool.lease([slot])
            except ValueError:  # Taken in the meantime, and loading now.
                continue
            with lease:
                if pool.find((0, expert)) != slot:
                    continue  # Taken in the meantime, and filled with another.
                next(leased)
                for _ in range(3):
                    if bytes(pool.buffers(slot)[0]) != bytes([expert]) * 512:
                        faults.append(expert)
                lease.check()

    users = [threading.Thread(target=user, args=[seed]) for seed in range(32)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    assert not faults
    assert next(leased) > 500
    assert not any(pool._leases)
    # All slots are still there to be had.
    assert None not in [pool.claim((1, expert)) for expert in range(8)]
    assert pool.claim((1, 8)) is None
