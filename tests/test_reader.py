"""The reader: exact bytes from any place, in any order of priority, and what happens on faults."""

import itertools
import mmap
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from mlx_k3.errors import CheckpointError, UnsupportedError
from mlx_k3.experts import disk as disk_module
from mlx_k3.experts.disk import ALIGNMENT, BLOCK_BYTES, BOUNCE_BYTES, MAX_BUFFERS
from mlx_k3.experts.reader import ExpertReader, Ticket

from .support.disks import FaultyDisk, address

FILE_BYTES = 3 * BLOCK_BYTES + 5_001
DATA = np.random.default_rng(0).bytes(FILE_BYTES)
SHARED_MEMORY = Path("/dev/shm")
UNREADABLE_DIRECTLY = Path("/proc/version")


@pytest.fixture(scope="module", params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The data as a file, on the disk and on tmpfs."""
    if request.param == "disk":
        file = tmp_path_factory.mktemp("reader") / "experts.bin"
    elif SHARED_MEMORY.is_dir():
        file = SHARED_MEMORY / f"mlx-k3-test-{os.getpid()}.bin"
    else:
        pytest.skip("no /dev/shm here")
    file.write_bytes(DATA)
    yield str(file)
    file.unlink()


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The first megabyte as a file of its own."""
    file = tmp_path / "small.bin"
    file.write_bytes(DATA[: 2**20])
    return str(file)


def aligned(nbytes: int) -> memoryview:
    """Zeroed memory at the start of a page."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def read(reader: ExpertReader, path: str, offset: int, sizes: list[int]) -> bytes:
    """Buffers of ``sizes`` that lie in one piece of memory, with a guard behind them."""
    total = sum(sizes)
    memory = aligned(total + 64)
    memory[total:] = b"\xa5" * 64
    ends = list(itertools.accumulate(sizes))
    buffers = [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    ticket = reader.submit([(path, offset, buffers)])
    assert ticket.wait(30)
    assert ticket.nbytes == total
    assert bytes(memory[total:]) == b"\xa5" * 64
    return bytes(memory[:total])


SIZES = {
    "one page": [ALIGNMENT],
    "an expert": [5_505_024, 344_064] * 3,
    "odd pieces": [1, 4095, 0, 70_001, 8192, 3],
    "more than one block": [2 * BLOCK_BYTES + 4097],
    "more buffers than a call takes": [16] * (2 * MAX_BUFFERS + 3),
    "more than one bounce": [BOUNCE_BYTES, 5],
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, ALIGNMENT, 16_384 + 8, 12_345, 1])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_exact_bytes(path: str, sizes: list[int], offset: int, direct: bool) -> None:
    with ExpertReader(3, direct) as reader:
        assert read(reader, path, offset, sizes) == DATA[offset : offset + sum(sizes)]
        assert reader.read_bytes == sum(sizes)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tail", [1, 4095, 4096, 5_001, BLOCK_BYTES + 1])
def test_up_to_the_last_byte(path: str, tail: int, direct: bool) -> None:
    with ExpertReader(3, direct) as reader:
        assert read(reader, path, FILE_BYTES - tail, [tail]) == DATA[-tail:]


def test_aligned_reads_go_straight_into_the_buffers(path: str) -> None:
    disk = FaultyDisk()
    buffers = [aligned(5_505_024), aligned(344_064)]
    with ExpertReader(2, True, disk=disk) as reader:
        reader.mode(path)
        disk.reads.clear()
        reader.submit([(path, 16_384, buffers)]).wait()
        calls = reader.read_calls
    assert disk.reads == [(16_384, 5_849_088, address(buffers[0]))]
    assert calls == 1


@pytest.mark.parametrize("offset", [12_345, 8192])
def test_no_byte_of_a_run_is_read_twice(path: str, offset: int) -> None:
    nbytes = 2 * BLOCK_BYTES + 777
    disk = FaultyDisk()
    with ExpertReader(4, True, disk=disk) as reader:
        reader.mode(path)
        disk.reads.clear()
        read(reader, path, offset, [nbytes])
        assert len(disk.reads) == reader.read_calls
    spans = sorted((start, start + asked) for start, asked, _ in disk.reads)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    # Nothing but what is needed, up to the drive's blocks at both ends.
    assert spans[0][0] == offset // ALIGNMENT * ALIGNMENT
    assert spans[-1][1] - (offset + nbytes) < ALIGNMENT
    assert max(end - start for start, end in spans) <= BLOCK_BYTES


def test_a_large_run_is_shared_between_threads(path: str) -> None:
    disk = FaultyDisk()
    with ExpertReader(3, False, disk=disk) as reader:
        disk.gate.clear()
        ticket = reader.submit([(path, 0, [aligned(3 * BLOCK_BYTES)])])
        for _ in range(3):
            assert disk.waiting.acquire(timeout=30)
        disk.gate.set()
        ticket.wait()
    assert {asked for _, asked, _ in disk.reads} == {BLOCK_BYTES}


@pytest.mark.parametrize(("direct", "unit"), [(True, ALIGNMENT), (False, 1), (False, 777)])
@pytest.mark.parametrize("offset", [0, 12_345])
def test_short_reads_are_continued(path: str, direct: bool, unit: int, offset: int) -> None:
    disk = FaultyDisk(short=unit)
    sizes = [8192, 123_457, 40_960]
    with ExpertReader(2, direct, disk=disk) as reader:
        assert read(reader, path, offset, sizes) == DATA[offset : offset + sum(sizes)]
        assert reader.read_calls > 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signals_do_not_disturb(path: str) -> None:
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with ExpertReader(4) as reader:
            for _ in range(10):
                assert read(reader, path, 0, [2 * BLOCK_BYTES]) == DATA[: 2 * BLOCK_BYTES]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert fired


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("unaligned", [0, 8])
def test_a_file_cut_after_it_was_opened(small: str, direct: bool, unaligned: int) -> None:
    with ExpertReader(2, direct) as reader:
        assert read(reader, small, unaligned, [8192]) == DATA[unaligned : unaligned + 8192]
        os.truncate(small, 500_000)
        buffer = aligned(65_536)
        ticket = reader.submit([(small, 458_752 + unaligned, [buffer])])
        with pytest.raises(CheckpointError) as error:
            ticket.wait(30)
        missing = 458_752 + unaligned + 65_536 - 500_000
        assert str(error.value).startswith(f"{small} ends {missing:,} bytes early, at byte 500,000")
        assert "\n" not in str(error.value)
        # Beyond the end altogether, and then again something that is there.
        with pytest.raises(CheckpointError, match=r"ends 4,096 bytes early, at byte 999,424"):
            reader.submit([(small, 999_424, [aligned(4096)])]).wait(30)
        assert read(reader, small, 4096, [8192]) == DATA[4096 : 4096 + 8192]


def test_a_read_error(small: str) -> None:
    disk = FaultyDisk(fail_at=[1])
    with ExpertReader(1, False, disk=disk) as reader:
        assert read(reader, small, 0, [4096]) == DATA[:4096]
        ticket = reader.submit([(small, 8192, [aligned(4096)])])
        with pytest.raises(CheckpointError) as error:
            ticket.wait(30)
        assert str(error.value) == (
            f"{small}: reading at byte 8,192 failed: Input/output error; check the drive"
        )
        assert ticket.done and ticket.error is error.value
        assert read(reader, small, 8192, [4096]) == DATA[8192 : 8192 + 4096]


def test_a_failed_ticket_is_over_only_when_nothing_writes_any_more(small: str) -> None:
    disk = FaultyDisk(fail_at=[1])
    disk.gate.clear()
    buffers = [aligned(4096) for _ in range(3)]
    with ExpertReader(2, False, disk=disk) as reader:
        ticket = reader.submit([(small, i * 8192, [b]) for i, b in enumerate(buffers)])
        assert disk.waiting.acquire(timeout=30)  # One read stands still; the other fails.
        deadline = time.monotonic() + 30
        while ticket.error is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert isinstance(ticket.error, CheckpointError)
        assert not ticket.done and not ticket.wait(0.02)
        disk.gate.set()
        with pytest.raises(CheckpointError, match="Input/output error"):
            ticket.wait(30)
        first = disk.reads[0][0]
        assert bytes(buffers[first // 8192]) == DATA[first : first + 4096]
    assert len(disk.reads) == 2


def test_the_rest_of_a_failed_ticket_is_not_read(small: str) -> None:
    disk = FaultyDisk(fail_at=[0])
    with ExpertReader(1, False, disk=disk) as reader:
        ticket = reader.submit([(small, i * 8192, [aligned(4096)]) for i in range(20)])
        assert ticket.wait_quietly(30)
        assert isinstance(ticket.error, CheckpointError)
        read(reader, small, 0, [1])
    assert len(disk.reads) == 2


def test_a_missing_file(tmp_path: Path) -> None:
    with ExpertReader(1) as reader:
        path = str(tmp_path / "gone.bin")
        with pytest.raises(CheckpointError, match=r"gone\.bin.*No such file"):
            reader.submit([(path, 0, [aligned(10)])]).wait(30)
        with pytest.raises(CheckpointError, match=r"gone\.bin cannot be read: No such file"):
            reader.mode(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died(small: str) -> None:
    class Broken(FaultyDisk):
        def read(self, fd, buffers, offset):
            if offset == 4096:
                raise ZeroDivisionError
            return super().read(fd, buffers, offset)

    with ExpertReader(2, False, disk=Broken()) as reader:
        with pytest.raises(CheckpointError, match="a reader thread died"):
            reader.submit([(small, 4096, [aligned(10)])]).wait(30)
        assert read(reader, small, 0, [10]) == DATA[:10]


class Held:
    """A reader of one thread that stands still in a first read until :meth:`go`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.disk = FaultyDisk()
        self.reader = ExpertReader(1, False, disk=self.disk)
        self.disk.gate.clear()
        self.first_buffer = aligned(4096)
        self.first = self.reader.submit([(path, 0, [self.first_buffer])])
        assert self.disk.waiting.acquire(timeout=30)

    def submit(self, offset: int, **how: bool) -> Ticket:
        return self.reader.submit([(self.path, offset, [aligned(16)])], **how)

    def go(self) -> list[int]:
        """Read what is queued; the offsets in the order of reading."""
        self.disk.gate.set()
        read(self.reader, self.path, 0, [1])
        deadline = time.monotonic() + 30
        while self.reader._prefetch and time.monotonic() < deadline:
            time.sleep(0.001)
        self.reader.close()
        return [offset for offset, asked, _ in self.disk.reads[1:] if asked == 16]


@pytest.fixture
def held(small: str):
    held = Held(small)
    yield held
    held.disk.gate.set()
    held.reader.close()


def test_demand_goes_before_prefetch(held: Held) -> None:
    for offset, urgent in ((100, False), (200, True), (300, False), (400, True)):
        held.submit(offset, urgent=urgent)
    assert held.go() == [200, 400, 100, 300]


def test_promoted_prefetch_goes_with_the_demand(held: Held) -> None:
    tickets = {offset: held.submit(offset, urgent=False) for offset in (100, 200, 300)}
    held.submit(400)
    tickets[300].promote()
    tickets[300].promote()
    held.first.promote()  # is being read: nothing to do
    assert held.go() == [400, 300, 100, 200]
    tickets[300].promote()  # is over: nothing to do


@pytest.mark.parametrize("urgent", [True, False])
def test_cancelling(held: Held, urgent: bool) -> None:
    buffer = aligned(16)
    dropped = held.reader.submit([(held.path, 100, [buffer])], urgent=urgent)
    kept = held.submit(200, urgent=urgent)
    assert dropped.cancel()
    assert dropped.done and not dropped.cancel()
    with pytest.raises(CancelledError):
        dropped.wait(0)
    assert not held.first.cancel() and not held.first.done
    assert held.go() == [200]
    assert bytes(buffer) == bytes(16)
    assert kept.wait() and held.first.wait()
    assert bytes(held.first_buffer) == DATA[:4096]
    assert not kept.cancel() and kept.error is None


def test_waiting_for_a_disk_that_stalls(held: Held) -> None:
    start = time.perf_counter()
    assert not held.first.wait(0.05) and not held.first.wait_quietly(0.05)
    assert time.perf_counter() - start >= 0.1
    held.go()
    assert held.first.wait(30)
    assert held.first.ended - held.first.began >= 0.1
    assert held.reader.busy_seconds >= 0.1


def test_closing_finishes_what_was_begun_and_drops_the_rest(held: Held) -> None:
    waiting = held.submit(100), held.submit(200, urgent=False)
    fd = held.reader._files.get(held.path).fd
    closing = threading.Thread(target=held.reader.close)
    closing.start()
    for ticket in waiting:
        with pytest.raises(CancelledError, match="closed"):
            ticket.wait(30)
    held.disk.gate.set()
    closing.join(30)
    assert held.first.wait(0) and bytes(held.first_buffer) == DATA[:4096]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        held.submit(0)
    held.reader.close()


def test_a_file_is_opened_once(small: str) -> None:
    disk = FaultyDisk()
    with ExpertReader(8, True, disk=disk) as reader:
        for ticket in [reader.submit([(small, 0, [aligned(4096)])]) for _ in range(40)]:
            ticket.wait(30)
    assert disk.opened == [(small, True)] * 2  # the probe, and for good
    assert len(disk.reads) == 41


def test_mode(path: str, tmp_path: Path) -> None:
    with ExpertReader(1) as reader:
        assert reader.mode(path) == "direct"
    with ExpertReader(1, False) as reader:
        assert reader.mode(path) == "buffered"
    refuses = FaultyDisk(direct=False)
    with ExpertReader(1, disk=refuses) as reader:
        assert reader.mode(path) == "buffered"
        assert read(reader, path, 12_345, [10_000]) == DATA[12_345 : 12_345 + 10_000]
    with (
        ExpertReader(1, True, disk=refuses) as reader,
        pytest.raises(UnsupportedError, match="no direct reads"),
    ):
        reader.mode(path)


@pytest.mark.skipif(not UNREADABLE_DIRECTLY.exists(), reason="needs Linux")
def test_a_file_system_without_direct_reads() -> None:
    path, expected = str(UNREADABLE_DIRECTLY), UNREADABLE_DIRECTLY.read_bytes()
    with ExpertReader(1) as reader:
        assert reader.mode(path) == "buffered"
        assert read(reader, path, 0, [len(expected)]) == expected
    with ExpertReader(1, True) as reader, pytest.raises(UnsupportedError, match="no direct reads"):
        reader.submit([(path, 0, [aligned(4096)])]).wait(30)


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages of Linux's cache")
def test_direct_reads_leave_the_cache_alone(tmp_path: Path) -> None:
    file = tmp_path / "cold.bin"
    with open(file, "wb") as f:
        f.write(DATA)
        f.flush()
        os.fsync(f.fileno())
    for direct, cached in ((True, False), (False, True)):
        with open(file, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with ExpertReader(2, direct) as reader:
            read(reader, str(file), 12_345, [2 * BLOCK_BYTES])
        fd = os.open(file, os.O_RDONLY)
        try:
            # Only what lies in the cache can be read without waiting.
            got = os.preadv(fd, [bytearray(4096)], BLOCK_BYTES, os.RWF_NOWAIT)
        except BlockingIOError:
            got = 0
        finally:
            os.close(fd)
        assert (got == 4096) == cached, direct


def test_buffers_must_be_writable_and_contiguous(small: str) -> None:
    with ExpertReader(1) as reader:
        for buffer in (memoryview(bytes(8)), memoryview(bytearray(8))[::2]):
            with pytest.raises(ValueError, match="writable and contiguous"):
                reader.submit([(small, 0, [buffer])])
        wide = memoryview(np.zeros((4, 8), np.uint32))
        reader.submit([(small, 4, [wide])]).wait(30)
        assert bytes(wide) == DATA[4:132]


def test_nothing_to_read(small: str) -> None:
    with ExpertReader(1) as reader:
        for runs in ([], [(small, 0, [])], [(small, 0, [aligned(1)[:0]])]):
            ticket = reader.submit(runs)
            assert ticket.done and ticket.wait(0) and ticket.nbytes == 0
        assert reader.read_calls == 0


def test_many_threads_on_one_reader(path: str) -> None:
    """Submit, promote and cancel from 32 threads: what was not cancelled is there, exactly."""
    failures = []

    def user(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            runs, expected = [], []
            for _ in range(rng.randint(1, 3)):
                size = rng.choice([5, 4096, 65_536, 200_001])
                offset = rng.choice([rng.randrange(FILE_BYTES - size), 4096 * rng.randrange(500)])
                runs.append((path, offset, [aligned(size)]))
                expected.append(DATA[offset : offset + size])
            ticket = reader.submit(runs, urgent=rng.random() < 0.5)
            if rng.random() < 0.3:
                ticket.promote()
            cancelled = rng.random() < 0.3 and ticket.cancel()
            if not ticket.wait_quietly(60):
                failures.append("lost")
            elif cancelled != isinstance(ticket.error, CancelledError):
                failures.append(ticket.error)
            elif not cancelled and [bytes(run[2][0]) for run in runs] != expected:
                failures.append(runs)

    with ExpertReader(8) as reader:
        users = [threading.Thread(target=user, args=[seed]) for seed in range(32)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join()
        assert not reader._flying and not reader._urgent and not reader._prefetch
    assert not failures


def test_blocks_are_far_below_what_one_call_may_ask_for() -> None:
    assert disk_module.BLOCK_BYTES <= 2**30
    assert os.sysconf("SC_IOV_MAX") >= MAX_BUFFERS
