"""Expert slots: which expert occupies which slot of the pool.

Owns residency, leases and the arrays. Knows nothing about files, routing or time.
"""

import threading
from collections.abc import Iterable
from types import TracebackType

import mlx.core as mx
import numpy as np

from ..checkpoint.extents import Piece
from .policy import Key, Policy

# A page of Apple silicon, and a multiple of what direct reads ask for anywhere.
ALIGNMENT = 16384
# MLX counts the elements of a strided view in 32 bits.
MAX_ELEMENTS = 2**31 - 1
DTYPES = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "U8": mx.uint8,
    "U32": mx.uint32,
}
_CARRIERS = (mx.uint64, mx.uint32, mx.uint16, mx.uint8)


class SlotPool:
    """``slots`` places for experts made of ``pieces``, in one array a piece that stays for good.

    A slot is free, loading (claimed, being written), or filled. Only a filled slot that nobody
    leases is ever claimed for another expert; every claim moves the slot's generation on. All
    methods may be called from any thread.

    >>> slot = pool.claim((3, 17))
    >>> read_into(pool.buffers(slot)); pool.filled(slot)
    >>> with pool.lease([slot]) as lease:
    ...     mx.eval(use(pool.arrays, slot)); lease.check()
    """

    def __init__(self, pieces: tuple[Piece, ...], slots: int, policy: Policy) -> None:
        _check(slots)
        self.pieces = pieces
        self.arrays: dict[str, mx.array] = {}
        """Piece name -> [slots, *piece.shape]; replaced by :meth:`resize`."""
        self._policy = policy
        self._lock = threading.Lock()
        self._memory: list[memoryview] = []
        self._slot_of: dict[Key, int] = {}  # filled
        self._set_up(slots)
        for piece in pieces:
            array, memory = _allocate(piece, slots)
            self.arrays[piece.name] = array
            self._memory.append(memory)

    def _set_up(self, slots: int) -> None:
        self._keys: list[Key | None] = [None] * slots
        self._loading: dict[Key, int] = {}
        self._leases = [0] * slots
        self._generations = [0] * slots
        self._free = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        """How many slots there are."""
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        """Size of all slots."""
        return len(self) * sum(piece.nbytes for piece in self.pieces)

    def buffers(self, slot: int) -> list[memoryview]:
        """The bytes of a loading ``slot``, writable, one buffer a piece in the pieces' order."""
        return [
            memory[slot * piece.nbytes : (slot + 1) * piece.nbytes]
            for piece, memory in zip(self.pieces, self._memory, strict=True)
        ]

    def find(self, key: Key) -> int | None:
        """The filled slot of ``key``."""
        return self._slot_of.get(key)

    def touch(self, key: Key) -> None:
        """``key`` was asked for and was there."""
        with self._lock:
            self._policy.used(key, True)

    def claim(self, key: Key) -> int | None:
        """A slot to read ``key`` into, loading from now on; None if every slot is in use.

        Ends in :meth:`filled` or :meth:`abandon`. The expert that lay there is forgotten.

        Raises:
            ValueError: ``key`` has a slot already.
        """
        with self._lock:
            if key in self._slot_of or key in self._loading:
                raise ValueError(f"expert {key} has a slot already")
            if self._free:
                slot = self._free.pop()
            else:
                victim = self._policy.victim()
                if victim is None:
                    return None
                slot = self._slot_of.pop(victim)
            self._policy.used(key, False)
            self._generations[slot] += 1
            self._keys[slot] = key
            self._loading[key] = slot
            return slot

    def filled(self, slot: int) -> None:
        """The expert that ``slot`` was claimed for lies in it."""
        with self._lock:
            key = self._loaded(slot)
            self._slot_of[key] = slot
            self._policy.offer(key)

    def abandon(self, slot: int) -> None:
        """The read into ``slot`` failed or was cancelled, and nothing writes there any more."""
        with self._lock:
            self._loaded(slot)
            self._keys[slot] = None
            self._free.append(slot)

    def release_all(self) -> None:
        """End every lease and every loading, once nothing reads or writes a slot any more.

        Also puts right what was left half done where an exception cut a method short.
        """
        with self._lock:
            self._tidy()

    def _tidy(self) -> None:
        """Make everything follow from the arrays and from what is filled."""
        slots = min(map(len, self.arrays.values()))
        for name, array in self.arrays.items():
            if len(array) > slots:
                self.arrays[name] = array[:slots]
        mx.eval(self.arrays)
        self._set_up(slots)
        for key, slot in self._slot_of.items():
            self._keys[slot] = key
            self._policy.offer(key)
        self._free = [slot for slot in self._free if self._keys[slot] is None]

    def _loaded(self, slot: int) -> Key:
        key = self._keys[slot]
        if key is None or self._loading.get(key) != slot:
            raise ValueError(f"slot {slot} is not loading")
        del self._loading[key]
        return key

    def lease(self, slots: Iterable[int]) -> "Lease":
        """Keep filled ``slots`` as they are until the lease is released. Leases add up.

        Raises:
            ValueError: a slot is not filled.
        """
        slots = tuple(slots)
        with self._lock:
            for slot in slots:
                if self._slot_of.get(self._keys[slot]) != slot:
                    raise ValueError(f"slot {slot} is not filled")
            for slot in slots:
                if not self._leases[slot]:
                    self._policy.hold(self._keys[slot])
                self._leases[slot] += 1
            return Lease(self, slots, tuple(self._generations[slot] for slot in slots))

    def _release(self, slots: tuple[int, ...]) -> None:
        with self._lock:
            for slot in slots:
                self._leases[slot] -= 1
                if not self._leases[slot]:
                    self._policy.offer(self._keys[slot])

    def resident(self) -> list[Key]:
        """The experts that lie in filled slots."""
        with self._lock:
            return list(self._slot_of)

    def resize(self, slots: int) -> None:
        """Change to ``slots`` slots, in new arrays; the experts worth most stay, in other slots.

        One piece at a time, so that at most one piece's old and new array exist together.

        Raises:
            ValueError: a slot is leased or loading, or ``slots`` is less than one.
        """
        with self._lock:
            if self._loading or any(self._leases):
                raise ValueError("slots that are leased or loading cannot move")
            _check(slots)
            while len(self._slot_of) > slots:
                self._slot_of.pop(self._policy.victim())
            residents, self._slot_of = self._slot_of, {}
            try:
                for i in range(len(self.pieces)):
                    self._move(i, slots, residents.values())
                    mx.clear_cache()  # else MLX keeps the old array's memory for another use
                self._slot_of = {key: slot for slot, key in enumerate(residents)}
            finally:
                # Where memory ran out half-way: as many slots as every piece has, all empty.
                for key in residents.keys() - self._slot_of.keys():
                    self._policy.hold(key)
                self._tidy()

    def _move(self, piece: int, slots: int, kept: Iterable[int]) -> None:
        """Give one piece ``slots`` slots in a new array; the ``kept`` ones come first."""
        array, memory = _allocate(self.pieces[piece], slots)
        old, new = (_rows(m, self.pieces[piece]) for m in (self._memory[piece], memory))
        for to, slot in enumerate(kept):
            np.copyto(new[to], old[slot])
        self.arrays[self.pieces[piece].name], self._memory[piece] = array, memory


class Lease:
    """Slots that stay as they are until :meth:`release`, which leaving a ``with`` block calls."""

    def __init__(self, pool: SlotPool, slots: tuple[int, ...], generations: tuple[int, ...]):
        self.slots = slots
        self._pool, self._generations, self._over = pool, generations, False

    def check(self) -> None:
        """Make sure that the slots were not refilled.

        Raises:
            RuntimeError: one was; what was computed from it is wrong. A fault of the program.
        """
        for slot, generation in zip(self.slots, self._generations, strict=True):
            now = self._pool._generations[slot]
            if now != generation:
                raise RuntimeError(f"slot {slot} was refilled while in use ({generation}, {now})")

    def release(self) -> None:
        """Let the slots go; releasing twice is allowed."""
        if not self._over:
            self._over = True
            self._pool._release(self.slots)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _check(slots: int) -> None:
    if slots < 1:
        raise ValueError(f"a pool needs at least one slot, not {slots}")


def _allocate(piece: Piece, slots: int) -> tuple[mx.array, memoryview]:
    """An array [slots, *piece.shape] on a 16 KiB boundary, and its bytes, writable.

    Writing zeros now makes the system hand over the memory now, not in the middle of a run.
    """
    spare = -(-ALIGNMENT // piece.nbytes)
    whole = mx.zeros((slots + spare, piece.nbytes), dtype=mx.uint8)
    mx.eval(whole)
    memory = memoryview(whole).cast("B")
    shift = -_address(memory) % ALIGNMENT
    # A view in wider elements has fewer of them.
    row_bytes = piece.nbytes // max(1, int(np.prod(piece.shape[:-1])))
    carrier = next(t for t in _CARRIERS if not (row_bytes % t.size or shift % t.size))
    shape = (slots, *piece.shape[:-1], row_bytes // carrier.size)
    if shift and (slots + spare) * piece.nbytes // carrier.size > MAX_ELEMENTS:
        shift = 0  # Unaligned: a reader then goes through a buffer of its own.
    if shift:
        strides = [1]
        for n in reversed(shape[1:]):
            strides.insert(0, strides[0] * n)
        array = mx.as_strided(whole.view(carrier), shape, strides, shift // carrier.size)
    else:
        array = whole[:slots].view(carrier).reshape(shape)
    array = array.view(DTYPES[piece.dtype])
    mx.eval(array)
    return array, memory[shift : shift + slots * piece.nbytes]


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


def _rows(memory: memoryview, piece: Piece) -> np.ndarray:
    return np.frombuffer(memory, np.uint8).reshape(-1, piece.nbytes)
