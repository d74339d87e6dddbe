"""What every test may ask for. Loads OpenBLAS before any test module imports MLX."""

import os
import signal
from pathlib import Path

import pytest

import mlx_k3  # noqa: F401  # Loads OpenBLAS, before any test module imports MLX.

REPOSITORY = Path(__file__).resolve().parent.parent

# Ctrl-C is tested; who runs tests in a shell's background has it ignored, by us and our children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Float32 means float32 here: some GPUs would else round what they multiply to TF32.
os.environ["MLX_ENABLE_TF32"] = "0"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def golden() -> Path:
    """Checkpoints and operator cases with outputs of the published reference.

    The whole set where it lies beside the checkout, else the part that travels with it.
    """
    beside = REPOSITORY.parent / "shared" / "golden"
    return beside if beside.is_dir() else REPOSITORY / "tests" / "data" / "golden"


@pytest.fixture(scope="session")
def start(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a small training run starts from: a configuration and a vocabulary."""
    from .support.training import write_start

    return write_start(tmp_path_factory.mktemp("start"), golden / "tiny-text")


@pytest.fixture(scope="session")
def seeing_start(start: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a vision tower."""
    from .support.training import write_seeing_start

    return write_seeing_start(tmp_path_factory.mktemp("seeing"), start, golden / "tiny-multimodal")


@pytest.fixture(scope="session")
def vocabulary(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``start``'s tokenizer, converted."""
    from mlx_k3.convert.tokenizer import write_tokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    write_tokenizer(start, folder)
    return folder
