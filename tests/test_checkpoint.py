"""Reading and writing safetensors: headers that lie, indexes of every wrong shape, exact bytes."""

import hashlib
import json
import os
import struct

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from mlx_k3.checkpoint.direct import aligned_buffer
from mlx_k3.checkpoint.index import INDEX, LocalFolder, open_checkpoint
from mlx_k3.checkpoint.reader import TensorFile, parse_header, read_header
from mlx_k3.checkpoint.writer import ALIGNMENT, IN_FLIGHT, Layout, by_alignment, write_file
from mlx_k3.errors import CheckpointError

from .support.releases import copy_release, edit_json, read_tensors, write_tensors


def shard(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = shard({"a": entry(), "b": entry("F32", (2,), (4, 12))}, bytes(12))


def test_reads_what_safetensors_wrote(golden):
    path = golden / "tiny-text/model-00002-of-000006.safetensors"
    want = read_tensors(path)
    with TensorFile(path) as file, safe_open(path, "np") as theirs:
        assert set(file.header.tensors) == set(theirs.keys()) == set(want)
        for name, (dtype, shape, raw) in want.items():
            array = file.array(name)
            assert array.tobytes() == raw and list(array.shape) == shape
            assert file.header.tensors[name].dtype == dtype


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "has 0 bytes, too few"),
        (b"1234567", "has 7 bytes, too few"),
        (struct.pack("<Q", 2**40) + b"{}", "its header claims 1,099,511,627,776 bytes"),
        (struct.pack("<Q", 100) + b"{}", "ends 98 bytes early, inside its header"),
        (shard(b"not json"), "its header is not valid JSON"),
        (shard(b"\xff\xfe"), "its header is not valid JSON"),
        (shard(b"[" * 100_000), "its header is not valid JSON"),
        (shard([1, 2]), "its header is not a JSON object"),
        (shard(b'{"a":1,"a":2}'), "names 'a' twice"),
        (shard({"a": 1}), "entry of a is malformed"),
        (shard({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)), "entry of a is malformed"),
        (shard({"a": entry(shape=(-4,))}, bytes(4)), "entry of a is malformed"),
        (shard({"a": entry(shape=(True,), offsets=(0, 1))}, bytes(1)), "entry of a is malformed"),
        (shard({"a": entry(shape=(4.0,))}, bytes(4)), "entry of a is malformed"),
        (shard({"a": entry(offsets=(0, 4, 8))}, bytes(8)), "entry of a is malformed"),
        (shard({"a": entry("F4")}, bytes(4)), "unknown dtype 'F4'"),
        (shard({"a": entry(["U8"])}, bytes(4)), "unknown dtype"),
        (shard({"a": entry(offsets=(0, 5))}, bytes(5)), "4 bytes, but takes 5"),
        (shard({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)), "b overlaps another tensor"),
        (shard({"a": entry(), "b": entry()}, bytes(4)), "overlaps another tensor"),
        (
            shard({"a": entry(), "b": entry(offsets=(6, 10))}, bytes(10)),
            "b leaves a hole before it",
        ),
        (shard({"a": entry(offsets=(4, 8))}, bytes(8)), "a leaves a hole before it"),
        (GOOD[:-1], "ends 1 bytes early"),
        (GOOD + bytes(1_000_000), "is 1,000,000 bytes longer than its header says"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, raw, says):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert says in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_a_damaged_header_never_surprises(data):
    """Any change of any header byte is understood or refused, by one kind of error."""
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(GOOD) - 13))] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(bytes(raw), len(raw), "shard")
    except CheckpointError:
        return
    assert sum(info.nbytes for info in header.tensors.values()) == len(raw) - header.data_start


def test_a_file_cut_after_it_was_opened_is_not_read_as_zeros(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    with TensorFile(path) as file:
        os.truncate(path, len(GOOD) - 3)
        with pytest.raises(CheckpointError, match="ends 3 bytes early"):
            file.array("b")


def test_what_is_written_reads_everywhere(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "odd": rng.integers(0, 256, (3,), np.uint8),
        "wide": rng.standard_normal((5, 7)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "bf16": rng.integers(0, 2**16, (3, 3), np.uint16),
    }
    dtypes = {"odd": "U8", "wide": "F32", "empty": "F32", "bf16": "BF16"}
    stored = ((name, (dtypes[name], array.shape)) for name, array in arrays.items())
    layout = Layout(dict(sorted(stored, key=by_alignment)))
    path = tmp_path / "model.safetensors"
    blocks = [layout.header, *(arrays[name].tobytes() for name in layout.tensors)]
    digest = write_file(path, blocks)

    assert path.stat().st_size == layout.file_bytes
    assert read_header(path).tensors == layout.tensors
    assert read_header(path).data_start == ALIGNMENT
    loaded = mx.load(str(path))
    np.testing.assert_array_equal(np.array(loaded["bf16"].view(mx.uint16)), arrays["bf16"])
    for name in ("odd", "wide"):
        np.testing.assert_array_equal(np.array(loaded[name]), arrays[name])
        assert layout.tensors[name].offset % arrays[name].itemsize == 0
    with safe_open(path, "np") as theirs:
        assert theirs.get_tensor("empty").shape == (0, 4)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_producer_may_reuse_its_buffers(tmp_path):
    buffers = [bytearray(70_000) for _ in range(IN_FLIGHT + 1)]

    def blocks():
        for i in range(200):
            buffer = buffers[i % len(buffers)]
            buffer[:] = bytes([i]) * len(buffer)
            yield memoryview(buffer)

    write_file(tmp_path / "file", blocks())
    want = b"".join(bytes([i]) * 70_000 for i in range(200))
    assert (tmp_path / "file").read_bytes() == want


def test_a_failing_producer_leaves_nothing(tmp_path):
    def blocks():
        yield b"some"
        raise CheckpointError("no more")

    with pytest.raises(CheckpointError, match="no more"):
        write_file(tmp_path / "file", blocks())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("possible", [True, False])
def test_reading_past_the_cache_gives_the_same_bytes(tmp_path, monkeypatch, possible):
    """At any offset and length, to the end of the file and where direct access is refused."""
    if not possible:
        monkeypatch.setattr("mlx_k3.checkpoint.direct.set_direct", lambda fd, on: False)
    data = np.random.default_rng(0).integers(0, 256, 20_000_001, np.uint8).tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard({"a": entry(shape=(len(data),), offsets=(0, len(data)))}, data))
    with TensorFile(path) as file:
        start = file.header.data_start
        for offset, nbytes in (
            (0, len(data)),
            (1, 2**20),
            (4095, 9_000_000),
            (12_000_001, 8 * 10**6),
        ):
            buffer = bytearray(nbytes)
            file.read_into(memoryview(buffer), start + offset)
            assert buffer == data[offset : offset + nbytes]
        with pytest.raises(CheckpointError, match="ends 7 bytes early"):
            file.read_into(memoryview(bytearray(2**20 + 7)), start + len(data) - 2**20)


@pytest.mark.parametrize("possible", [True, False])
def test_writing_past_the_cache_where_it_can(tmp_path, monkeypatch, possible):
    """Aligned blocks, odd ones, and aligned ones at an odd place, in every order."""
    if not possible:
        monkeypatch.setattr("mlx_k3.checkpoint.direct.set_direct", lambda fd, on: False)
    rng = np.random.default_rng(0)
    blocks = []
    for nbytes in (16384, 2**20, 5, 2**20, 4091, 2**20, 3 * 2**20, 777):
        block = aligned_buffer(nbytes)
        block[:] = rng.integers(0, 256, nbytes, np.uint8).tobytes()
        blocks.append(block)
    write_file(tmp_path / "file", blocks)
    assert (tmp_path / "file").read_bytes() == b"".join(blocks)


INDEX_FAULTS = {
    "a list": lambda index: [1, 2],
    "a number": lambda index: 7,
    "null": lambda index: {},
    "no weight_map": lambda index: {"metadata": {}},
    "weight_map a list": lambda index: {"weight_map": list(index["weight_map"])},
    "weight_map empty": lambda index: {"weight_map": {}},
    "a number for a file": lambda index: {"weight_map": {**index["weight_map"], "x": 3}},
    "absolute": lambda index: {"weight_map": {**index["weight_map"], "x": "/etc/passwd"}},
    "parent": lambda index: {"weight_map": {**index["weight_map"], "x": "../model.safetensors"}},
    "inner parent": lambda index: {"weight_map": {**index["weight_map"], "x": "a/../../b"}},
    "backslash": lambda index: {"weight_map": {**index["weight_map"], "x": "..\\model"}},
    "empty name": lambda index: {"weight_map": {**index["weight_map"], "x": ""}},
    "nul": lambda index: {"weight_map": {**index["weight_map"], "x": "a\0b"}},
    "missing file": lambda index: {
        "weight_map": {**index["weight_map"], "x": "model-x.safetensors"}
    },
    "tensor nowhere": lambda index: {
        "weight_map": {**index["weight_map"], "x": "model-00001-of-000006.safetensors"}
    },
    "tensor unnamed": lambda index: {
        "weight_map": {k: v for k, v in index["weight_map"].items() if "lm_head" not in k}
    },
    "tensor misplaced": lambda index: {
        "weight_map": {
            k: "model-00001-of-000006.safetensors" if "lm_head" in k else v
            for k, v in index["weight_map"].items()
        }
    },
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_an_index_of_a_wrong_shape_is_refused(golden, tmp_path, fault):
    folder = copy_release(golden / "tiny-text", tmp_path / "model")
    edit_json(folder / INDEX, INDEX_FAULTS[fault])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(LocalFolder(folder))
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "nonsense", "\xff", "[" * 100_000])
def test_an_index_that_is_not_json_is_refused(golden, tmp_path, text):
    folder = copy_release(golden / "tiny-text", tmp_path / "model")
    (folder / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(LocalFolder(folder))


def test_without_an_index_the_shards_speak(golden, tmp_path):
    folder = copy_release(golden / "tiny-text", tmp_path / "model")
    with_index = open_checkpoint(LocalFolder(folder))
    (folder / INDEX).unlink()
    assert open_checkpoint(LocalFolder(folder)).files == with_index.files


def test_a_tensor_in_two_shards_names_both(golden, tmp_path):
    folder = copy_release(golden / "tiny-text", tmp_path / "model")
    one, two = (folder / f"model-0000{n}-of-000006.safetensors" for n in (1, 2))
    name, tensor = next(iter(read_tensors(one).items()))
    write_tensors(two, {**read_tensors(two), name: tensor})
    with pytest.raises(CheckpointError, match=f"is in both {one.name} and {two.name}"):
        open_checkpoint(LocalFolder(folder))


def test_two_wrong_sizes_do_not_cancel(golden, tmp_path):
    folder = copy_release(golden / "tiny-text", tmp_path / "model")
    one, two = (folder / f"model-0000{n}-of-000006.safetensors" for n in (1, 2))
    os.truncate(one, one.stat().st_size - 512)
    two.write_bytes(two.read_bytes() + bytes(512))
    with pytest.raises(CheckpointError, match=f"{one.name} ends 512 bytes early"):
        open_checkpoint(LocalFolder(folder))
