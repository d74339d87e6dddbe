"""A folder as a source: what it lists, exact ranges, and no way out of it."""

import os
from pathlib import Path

import pytest

from mlx_k3.convert.source import FolderSource, is_model_file, open_source
from mlx_k3.errors import CheckpointError, UnsupportedError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b'{"a": 1}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4)
    return folder


def test_lists_what_belongs_to_a_model_and_its_sizes(model: Path) -> None:
    (model / "LICENSE").write_bytes(b"free")
    (model / "modeling_kimi.py").write_bytes(b"import os")
    (model / ".cache").mkdir()
    (model / ".cache" / "other.json").write_bytes(b"{}")
    (model / "vision").mkdir()
    (model / "vision" / "extra.safetensors").write_bytes(b"12")
    (model / "notes.json").mkdir()
    assert FolderSource(model).files() == {
        "LICENSE": 4,
        "config.json": 8,
        "model.safetensors": 1024,
        "vision/extra.safetensors": 2,
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model-00001-of-000096.safetensors", True),
        ("tiktoken.model", True),
        ("chat_template.jinja", True),
        ("LICENSE", True),
        ("README.md", True),
        ("tokenization_kimi.py", False),
        ("license.py", False),
        ("pytorch_model.bin", False),
        (".git/config.json", False),
        ("../config.json", False),
        ("a/b/config.json", False),
    ],
)
def test_only_weights_and_texts_belong_to_a_model(name: str, wanted: bool) -> None:
    assert is_model_file(name) is wanted


def test_reads_exact_ranges(model: Path) -> None:
    source = FolderSource(model)
    assert source.read("model.safetensors", 250, 10) == bytes(
        [250, 251, 252, 253, 254, 255]
    ) + bytes(range(4))
    assert source.read("model.safetensors", 1024, 0) == b""
    with pytest.raises(CheckpointError, match=r"model.safetensors ends 6 bytes early"):
        source.read("model.safetensors", 1020, 10)


def test_fetch_gives_the_file_and_release_leaves_it(model: Path) -> None:
    source = FolderSource(model)
    assert source.fetch("config.json") == model / "config.json"
    source.release("config.json")
    assert (model / "config.json").is_file()


def test_follows_a_symlinked_folder(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(model, target_is_directory=True)
    source = open_source(link)
    assert source.files() == FolderSource(model).files()
    assert source.read("config.json", 0, 8) == b'{"a": 1}'
    assert source.label == str(link)


@pytest.mark.parametrize(
    "name",
    ["../secret.json", "/etc/passwd", "a/../../secret.json", "", ".", "a//b", "a\\b", "a\0b"],
)
def test_a_name_cannot_leave_the_folder(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.json").write_bytes(b"secret")
    source = FolderSource(model)
    with pytest.raises(CheckpointError, match="not the name of a file"):
        source.fetch(name)
    with pytest.raises(CheckpointError, match="not the name of a file"):
        source.read(name, 0, 1)


def test_a_link_cannot_leave_the_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_bytes(b"secret")
    (model / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    source = FolderSource(model)
    for action in (source.files, lambda: source.fetch("tokenizer.json")):
        with pytest.raises(CheckpointError, match="outside the model's folder"):
            action()


def test_a_link_within_the_folder_is_fine(model: Path) -> None:
    (model / "model-00001-of-00001.safetensors").symlink_to("model.safetensors")
    assert FolderSource(model).files()["model-00001-of-00001.safetensors"] == 1024


def test_links_to_nothing_or_to_themselves_are_missing_files(model: Path) -> None:
    (model / "gone.json").symlink_to("nowhere")
    (model / "loop.txt").symlink_to("loop.txt")
    source = FolderSource(model)
    for name in ("gone.json", "loop.txt"):
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            source.fetch(name)


def test_the_hubs_cache_is_a_folder_too(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "abc").write_bytes(b"{}")
    (repo / "secret").write_bytes(b"secret")
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    source = FolderSource(snapshot)
    assert source.files() == {"config.json": 2}
    # With its own name, which ends in what it is, not the blob's.
    assert source.fetch("config.json") == snapshot / "config.json"
    (snapshot / "evil.json").symlink_to("../../secret")
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        source.files()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_one_line(model: Path) -> None:
    (model / "config.json").chmod(0)
    with pytest.raises(CheckpointError, match=r"config.json cannot be read: Permission denied"):
        FolderSource(model).read("config.json", 0, 1)


def test_open_source_refuses_what_cannot_act(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--revision works with a Hub id only"):
        open_source(model, revision="main")
    with pytest.raises(UnsupportedError, match="--free-source works with a Hub id only"):
        open_source(model, free_source=True)
    for text in (str(tmp_path / "nothing"), "nothing", "a/b/c", "x" * 5000, "bad\0name"):
        with pytest.raises(CheckpointError, match="no such folder, and not a Hub id"):
            open_source(text)
    with pytest.raises(CheckpointError, match="no such folder"):
        FolderSource(tmp_path / "nothing")
