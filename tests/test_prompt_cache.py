"""What the prompt cache keeps, finds, gives up and refuses, in memory and in a folder."""

import errno
import fcntl
import logging
import os
import random
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from mlx_k3.chat import cache_files, prefix_tree, prompt_cache, reading
from mlx_k3.chat.cache_files import read_arrays, write_arrays
from mlx_k3.chat.cache_folder import CacheFolder, free_bytes
from mlx_k3.chat.cache_parts import layout, state_arrays
from mlx_k3.chat.prefix_tree import Place, PrefixTree
from mlx_k3.chat.prompt_cache import Found, PromptCache
from mlx_k3.errors import CheckpointError

from .support.prompts import FakeModel, content

IDENTITY = "0123456789abcdef" * 4
MODEL = FakeModel()
BLOCK = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (prefix_tree, prompt_cache, reading):
        monkeypatch.setattr(module, "BLOCK_TOKENS", BLOCK)


def ids_of(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=n)


def read(ids):
    return MODEL.read(ids, MODEL.make_cache())


def opened(folder=None, identity=IDENTITY, **options) -> PromptCache:
    return PromptCache(MODEL, identity, folder=folder, **options)


def files(folder):
    return sorted(folder.iterdir())


# What is found.


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 100])
def test_a_stored_cache_comes_back_as_it_was(tmp_path, n, on_disk):
    ids = ids_of(n)
    prompts = opened(tmp_path, memory_bytes=0 if on_disk else None)
    prompts.store(ids, read(ids))
    if on_disk:
        prompts = opened(tmp_path)
    cache, rest = prompts.fetch([*ids, 5, 6])
    assert rest == [5, 6]
    assert content(cache) == content(read(ids))
    assert cache[1].offset == n


def test_the_longest_beginning_is_found_and_only_beginnings():
    prompts, ids = opened(), ids_of(50)
    for n in (3, 20, 40):
        prompts.store(ids[:n], read(ids[:n]))
    for asked, found in ((50, 40), (41, 40), (40, 20), (21, 20), (20, 3), (4, 3), (3, 0), (1, 0)):
        cache, rest = prompts.fetch(ids[:asked])
        assert asked - len(rest) == found
        assert cache[1].offset == found
    other = [*ids[:30], 1001, *ids[31:]]
    assert len(prompts.fetch(other)[1]) == 30
    assert len(prompts.fetch([1001, *ids])[1]) == 51


def test_the_last_id_is_always_left_to_read():
    prompts, ids = opened(), ids_of(10)
    prompts.store(ids, read(ids))
    assert prompts.fetch(ids)[1] == ids


def test_a_fetched_cache_is_the_caller_s(tmp_path):
    prompts, ids = opened(tmp_path), ids_of(20)
    cache = read(ids)
    prompts.store(ids, cache)
    MODEL.read([1, 2, 3], cache)
    fetched, _ = prompts.fetch([*ids, 9])
    MODEL.read([4, 5, 6], fetched)
    assert content(prompts.fetch([*ids, 9])[0]) == content(read(ids))


def test_texts_that_begin_alike_share_what_belongs_to_tokens():
    prompts, ids = opened(), ids_of(80)
    prompts.store(ids, read(ids))
    before = prompts.usage().memory_bytes
    other = [*ids[:64], *ids_of(17, seed=1)]
    prompts.store(other, read(other))
    block = BLOCK * (8 + 1) * 4
    # Of 81 tokens 64 are there; there are two blocks more, and a state with a tail of one token.
    assert prompts.usage().memory_bytes - before == 2 * block + (9 * 4) + (2 + 4)
    assert content(prompts.fetch([*other, 1])[0]) == content(read(other))


def test_a_state_on_the_way_takes_the_tokens_from_a_longer_cache():
    prompts, ids = opened(), ids_of(30)
    cache = read(ids[:13])
    state = state_arrays(cache)
    MODEL.read(ids[13:], cache)
    prompts.keep(Found(ids[:13], cache, state))
    assert content(prompts.fetch(ids)[0]) == content(read(ids[:13]))


def test_a_cache_of_other_tokens_is_refused():
    prompts, ids = opened(), ids_of(10)
    for wrong in (ids[:9], [*ids, 1], []):
        with pytest.raises(ValueError):
            prompts.store(wrong, read(ids))


def test_what_a_cache_belongs_to_includes_its_kind():
    plain = [ArraysCache(2), KVCache()]
    packed = [ArraysCache(2), QuantizedKVCache(64, 8)]
    assert len({layout(c) for c in (plain, packed, [ArraysCache(2), QuantizedKVCache(64, 4)])}) == 3


@pytest.mark.parametrize("kind", [KVCache, lambda: QuantizedKVCache(32, 4)])
def test_caches_of_mlx_lm_are_taken_apart_as_well(kind):
    class Model:
        def make_cache(self):
            return [kind()]

    prompts = PromptCache(Model(), IDENTITY)
    rows, ids = mx.random.normal((1, 1, 30, 64)), ids_of(30)
    cache = [kind()]
    cache[0].update_and_fetch(rows, rows * 2)
    prompts.store(ids, cache)
    fetched, rest = prompts.fetch([*ids, 1])
    assert rest == [1]
    for one, two in zip(
        fetched[0].update_and_fetch(rows, rows),
        cache[0].update_and_fetch(rows, rows),
        strict=True,
    ):
        for x, y in zip(*((a,) if isinstance(a, mx.array) else a for a in (one, two)), strict=True):
            assert mx.array_equal(x, y)


# What is given up.


def test_the_oldest_goes_first_and_takes_what_only_it_needed():
    texts = [ids_of(3 * BLOCK + 1, seed) for seed in range(4)]
    size = opened()
    size.store(texts[0], read(texts[0]))
    one = size.usage().memory_bytes
    prompts = opened(memory_bytes=3 * one)
    for ids in texts[:3]:
        prompts.store(ids, read(ids))
    prompts.fetch([*texts[0], 1])  # now used last
    prompts.store(texts[3], read(texts[3]))
    kept = [len(prompts.fetch([*ids, 1])[1]) == 1 for ids in texts]
    assert kept == [True, False, True, True]
    assert prompts.usage().memory_bytes == 3 * one


def test_a_block_stays_as_long_as_something_behind_it_does():
    ids = ids_of(5 * BLOCK)
    prompts = opened(memory_bytes=5 * BLOCK * 36 + 100)
    prompts.store(ids[: 2 * BLOCK], read(ids[: 2 * BLOCK]))
    prompts.store(ids, read(ids))
    prompts.fetch([*ids, 1])
    prompts.store([7], read([7]))
    # The first state has gone; the blocks before it are still those of the second.
    assert len(prompts.fetch([*ids, 1])[1]) == 1


@pytest.mark.parametrize("memory_bytes", [0, 100])
def test_what_does_not_fit_is_not_begun(tmp_path, memory_bytes):
    prompts, ids = opened(tmp_path, memory_bytes=memory_bytes), ids_of(40)
    prompts.store(ids, read(ids))
    assert prompts.usage().memory_bytes == 0
    assert prompts.fetch([*ids, 1])[1] == [1]  # from the folder
    assert prompts.usage().memory_bytes == 0


def test_room_is_made_for_states_on_their_way():
    texts = [ids_of(5, seed) for seed in range(4)]
    prompts = opened(memory_bytes=4 * 186, state_bytes=186)
    for ids in texts:
        prompts.store(ids, read(ids))
    assert prompts.usage().memory_states == 4
    assert prompts.make_room(3) == 3
    assert prompts.usage().memory_states == 1
    assert prompts.make_room(9) == 4
    assert opened(memory_bytes=0, state_bytes=186).make_room(3) == 1
    assert opened().make_room(9) == 9


def test_any_order_of_places_ends_within_the_limit():
    rng = random.Random(1)
    tree = PrefixTree(1000)
    for _ in range(3000):
        depth = rng.randrange(6)
        key = f"{depth}-{rng.randrange(2**depth)}"
        parent = f"{depth - 1}-{rng.randrange(2 ** max(depth - 1, 0))}" if depth else "root"
        tree.add(Place(key, parent, depth + 1, rng.random() < 0.5), rng.randrange(1, 200))
        tree.shrink()
        if rng.random() < 0.2:
            tree.prune(rng.choice([*tree._nodes, "nothing"]))
        assert tree.nbytes == sum(node.nbytes for node in tree._nodes.values()) <= 1000
        states = [node.place.end for node in tree._nodes.values() if node.place.is_state]
        assert tree.states == tree.ends.total() == len(states) and set(tree.ends) == set(states)


def test_forgetting_a_state_leaves_the_others():
    prompts, ids = opened(), ids_of(40)
    keys = [prompts.store(ids[:n], read(ids[:n])) for n in (10, 20, 40)]
    assert prompts.states_of(ids) == keys
    prompts.forget(keys[2])
    assert prompts.states_of(ids) == keys[:2]
    prompts.forget(keys[0])
    assert len(prompts.fetch(ids)[1]) == 20


# The folder.


def test_a_later_process_finds_what_was_kept(tmp_path):
    ids = ids_of(100)
    opened(tmp_path).store(ids, read(ids))
    later = opened(tmp_path)
    assert later.usage().memory_bytes == 0 < later.usage().disk_bytes
    assert content(later.fetch([*ids, 1])[0]) == content(read(ids))
    # Once read, it is in memory.
    shutil.rmtree(tmp_path)
    assert content(later.fetch([*ids, 1])[0]) == content(read(ids))


def test_the_folder_is_nobody_else_s(tmp_path):
    opened(tmp_path / "a" / "b").store([1], read([1]))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in files(tmp_path / "a" / "b")} == {0o600}


def test_files_are_plain_safetensors(tmp_path):
    opened(tmp_path).store(ids_of(9), read(ids_of(9)))
    arrays = {k: v for file in files(tmp_path) for k, v in mx.load(str(file)).items()}
    assert arrays["0.0.0"].dtype == mx.bfloat16
    assert {"0.0.1", "1.0", "1.1", "sha256"} <= arrays.keys()


@pytest.mark.parametrize("victim", ["state", "block"])
def test_any_flipped_bit_is_noticed(tmp_path, victim, caplog):
    ids = ids_of(20)
    opened(tmp_path).store(ids, read(ids))
    (path, *_) = (file for file in files(tmp_path) if victim in file.name)
    data = path.read_bytes()
    # Everywhere in the header's text and in the data, and at a few places of the padding.
    header = data.rindex(b"}}") + 2
    places = [*range(header), *range(header, 16384, 1001), *range(16384, len(data))]
    for place in random.Random(0).sample(places, 60):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        cache, rest = opened(tmp_path).fetch([*ids, 1])
        assert rest == [*ids, 1] and content(cache) == content(MODEL.make_cache())
        assert not path.exists()  # Not asked a second time.
    assert "checksum" in caplog.text
    path.write_bytes(data)
    assert opened(tmp_path).fetch([*ids, 1])[1] == [1]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, 16384, -1, -32, -33])
def test_a_shortened_file_is_noticed(tmp_path, cut):
    ids = ids_of(5)
    opened(tmp_path).store(ids, read(ids))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    assert opened(tmp_path).fetch([*ids, 1])[1] == [*ids, 1]


def test_a_file_in_another_s_place_is_noticed(tmp_path):
    one, two = ids_of(5, 1), ids_of(5, 2)
    for ids in (one, two):
        opened(tmp_path).store(ids, read(ids))
    first, second = files(tmp_path)
    second.write_bytes(first.read_bytes())
    lacking = [len(opened(tmp_path).fetch([*ids, 1])[1]) for ids in (one, two)]
    assert sorted(lacking) == [1, 6]


def test_another_model_s_or_version_s_states_are_not_used(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ids = ids_of(20)
    opened(tmp_path).store(ids, read(ids))
    other = opened(tmp_path, identity="f" * 64)
    assert "of another model or version, not used" in caplog.text
    assert other.fetch([*ids, 1])[1] == [*ids, 1]
    # Under the other's name neither.
    for file in files(tmp_path):
        file.rename(file.with_name(file.name.replace(IDENTITY[:16], "f" * 16)))
    assert opened(tmp_path, identity="f" * 64).fetch([*ids, 1])[1] == [*ids, 1]


def test_another_model_s_states_make_room(tmp_path):
    ids = ids_of(5)
    opened(tmp_path).store(ids, read(ids))
    size = files(tmp_path)[0].stat().st_size
    other = opened(tmp_path, identity="f" * 64, disk_bytes=size)
    other.store(ids, read(ids))
    assert [file.name[:16] for file in files(tmp_path)] == ["f" * 16]


def test_the_folder_stays_within_its_limit(tmp_path):
    prompts = opened(tmp_path, disk_bytes=200_000)
    for seed in range(30):
        ids = ids_of(20, seed)
        prompts.store(ids, read(ids))
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 200_000
    assert prompts.usage().disk_bytes == sum(file.stat().st_size for file in files(tmp_path))
    # A later process goes on with the same order: the last are there.
    later = opened(tmp_path, disk_bytes=200_000)
    assert later.fetch([*ids_of(20, 29), 1])[1] == [1]
    assert len(later.fetch([*ids_of(20, 0), 1])[1]) == 21
    # A smaller limit is kept at once.
    opened(tmp_path, disk_bytes=60_000)
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 60_000


def test_a_use_is_remembered_by_later_processes(tmp_path):
    texts = [ids_of(5, seed) for seed in range(3)]
    for n, ids in enumerate(texts):
        opened(tmp_path).store(ids, read(ids))
        for file in files(tmp_path):
            os.utime(file, (n, n)) if file.stat().st_mtime > 100 else None
    size = files(tmp_path)[0].stat().st_size
    opened(tmp_path).fetch([*texts[0], 1])
    small = opened(tmp_path, disk_bytes=2 * size)
    assert [len(small.fetch([*ids, 1])[1]) == 1 for ids in texts] == [True, False, True]


def test_files_may_vanish_at_any_time(tmp_path):
    rng, ids = random.Random(3), ids_of(60)
    prompts = opened(tmp_path, memory_bytes=0)
    for _ in range(40):
        n = rng.randrange(1, 60)
        prompts.store(ids[:n], read(ids[:n]))
        for file in files(tmp_path):
            if rng.random() < 0.3:
                file.unlink()
        asked = rng.randrange(1, 60)
        cache, rest = prompts.fetch(ids[:asked])
        assert content(cache) == content(
            read(ids[: asked - len(rest)]) if len(rest) < asked else MODEL.make_cache()
        )
    shutil.rmtree(tmp_path)
    assert prompts.fetch(ids)[1] == ids
    prompts.store(ids[:30], read(ids[:30]))
    assert len(opened(tmp_path).fetch(ids)[1]) == 30


def test_foreign_files_are_left_alone(tmp_path):
    tmp_path.joinpath("notes.txt").write_text("mine")
    tmp_path.joinpath("model.safetensors").write_text("mine")
    tmp_path.joinpath("folder").mkdir()
    opened(tmp_path, disk_bytes=1).store([1], read([1]))
    assert [file.name for file in files(tmp_path)] == ["folder", "model.safetensors", "notes.txt"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_is_not_asked_again(tmp_path, monkeypatch, caplog, error):
    prompts, ids = opened(tmp_path), ids_of(20)
    prompts.store(ids[:5], read(ids[:5]))
    tries = []

    class FullDisk:
        def __init__(self, fd):
            self.written = 0

        def write(self, block):
            self.written += 1
            if self.written > 1:
                tries.append(1)
                raise OSError(error, os.strerror(error))

    monkeypatch.setattr(cache_files, "DirectWriter", FullDisk)
    for n in (10, 15, 20):
        prompts.store(ids[:n], read(ids[:n]))
    assert len(tries) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(error) in caplog.text and "no longer kept" in caplog.text
    assert len(files(tmp_path)) == 1  # Nothing half written.
    # All of it is still in memory, and what was on the disk before is still used.
    assert prompts.fetch([*ids, 1])[1] == [1]
    assert len(opened(tmp_path).fetch(ids)[1]) == 15


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid(), reason="mounting takes root on Linux")
def test_a_disk_that_is_full_in_truth(tmp_path, caplog):
    """A file system of 300 KB: what fitted is right, what did not is gone, memory goes on."""
    disk, ids = tmp_path / "disk", ids_of(60)
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if subprocess.run(mount).returncode:
        pytest.skip("this machine does not allow mounting")
    try:
        prompts = opened(disk / "prompts", disk_bytes=10**9)
        for n in range(5, 61, 5):
            prompts.store(ids[:n], read(ids[:n]))
        assert "no longer kept" in caplog.text
        assert prompts.fetch([*ids, 1])[1] == [1]
        assert not any(file.suffix == ".partial" for file in files(disk / "prompts"))
        cache, rest = opened(disk / "prompts").fetch([*ids, 1])
        kept = 61 - len(rest)
        assert 0 < kept < 60 and content(cache) == content(read(ids[:kept]))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_made_only_means_no_folder(tmp_path, caplog):
    tmp_path.joinpath("file").write_text("")
    prompts, ids = opened(tmp_path / "file" / "prompts"), ids_of(20)
    prompts.store(ids, read(ids))
    assert prompts.fetch([*ids, 1])[1] == [1]
    assert "no longer kept" in caplog.text


def test_unfinished_files_of_the_dead_are_removed_and_of_the_living_kept(tmp_path):
    dead, living = tmp_path / "a.123.partial", tmp_path / "b.124.partial"
    dead.write_bytes(b"x")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        opened(tmp_path)
        assert files(tmp_path) == [living]


def test_no_folder_for_0_bytes(tmp_path):
    prompts = opened(tmp_path / "no", disk_bytes=0)
    prompts.store([1], read([1]))
    assert not (tmp_path / "no").exists()
    assert free_bytes(tmp_path / "no" / "such") == pytest.approx(
        shutil.disk_usage(tmp_path).free, rel=0.1
    )


def test_sizes_and_deletion_without_a_model(tmp_path):
    ids = ids_of(40)
    prompts = opened(tmp_path)
    keys = [prompts.store(ids[:n], read(ids[:n])) for n in (20, 40)]
    folder = CacheFolder(tmp_path, "", None)
    assert folder.bytes_of(keys) == sum(file.stat().st_size for file in files(tmp_path))
    assert 0 < folder.bytes_of(keys[:1]) < folder.bytes_of(keys)
    assert folder.bytes_of(["f" * 32]) == 0
    folder.forget(keys[1])
    assert folder.bytes_of(keys) == sum(file.stat().st_size for file in files(tmp_path)) > 0
    folder.forget(keys[0])
    assert files(tmp_path) == []


def test_arrays_of_every_kind_come_back_to_the_bit(tmp_path):
    kinds = (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8, mx.int32)
    arrays = {str(i): (mx.random.normal((3, 5)) * 100).astype(kind) for i, kind in enumerate(kinds)}
    mx.eval(arrays)
    path = tmp_path / "x.safetensors"
    assert write_arrays(path, "seal", arrays) == path.stat().st_size
    back = read_arrays(path, "seal")
    assert back.keys() == arrays.keys()
    for name, x in arrays.items():
        assert back[name].dtype == x.dtype and mx.array_equal(back[name], x)
    with pytest.raises(CheckpointError, match="checksum"):
        read_arrays(path, "another seal")
