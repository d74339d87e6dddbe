"""A run's configuration: what it may say, and one line for everything that makes no sense."""

import importlib.util
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_k3 import nano
from mlx_k3.checkpoint.names import vision_tensors
from mlx_k3.cli import main
from mlx_k3.config import K3Config
from mlx_k3.media.processor import Processor
from mlx_k3.training import checkpoints
from mlx_k3.training.checkpoints import Saved
from mlx_k3.training.config import TrainConfig
from mlx_k3.training.data import BEGINNING
from mlx_k3.training.step import State
from mlx_k3.training.trainer import Trainer

from .conftest import REPOSITORY
from .support.releases import edit_json
from .support.training import RANKS, threads_for_processes, write_run


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[Path], str]:
    """Give ``mlx-k3 train`` the file; returns the one line it must end with."""
    threads_for_processes(monkeypatch)

    def run(path: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["mlx-k3", "train", str(path)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert end.value.code == 2 and out == ""
        assert err.startswith("mlx-k3: ") and err.count("\n") == 1
        return err

    return run


def test_what_is_not_said_has_a_default_and_paths_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "start"\nout = "../out"\nsteps = 10\nlengths = [512, 128]\ndecay = 0\n'
    )
    config = TrainConfig.from_file(path)
    assert config == TrainConfig(
        model=tmp_path / "start", out=tmp_path / "../out", steps=10, lengths=(128, 512), decay=0.0
    )
    assert type(config.decay) is float


def test_the_recipe_of_the_bundled_model_is_one() -> None:
    config = TrainConfig.from_file(REPOSITORY / "scripts" / "nano.toml")
    assert config.balance == "quantile" and config.optimizer == "muon"


def test_so_is_that_of_its_eyes_which_goes_on_from_there() -> None:
    text = TrainConfig.from_file(REPOSITORY / "scripts" / "nano.toml")
    eyes = TrainConfig.from_file(REPOSITORY / "scripts" / "nano_eyes.toml")
    assert eyes.initialize_from == text.out / "model" and text.initialize_from is None
    assert eyes.pictures > 0 == text.pictures and eyes.lengths == text.lengths
    assert eyes.tower_learning_rate > eyes.learning_rate
    assert eyes.seed != text.seed  # Other conversations.


def test_the_bundled_model_with_eyes_stays_small(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "train_nano", REPOSITORY / "scripts" / "train_nano.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.prepare_eyes(tmp_path, nano.path())
    assert not [*tmp_path.glob("*.safetensors*")]
    assert (tmp_path / "tiktoken.model").exists()
    config = K3Config.from_file(tmp_path)
    tensors = list(vision_tensors(config))
    vision_bytes = 2 * sum(math.prod(tensor.shape) for tensor in tensors)
    total_bytes = sum(path.stat().st_size for path in nano.path().iterdir())
    if K3Config.from_file(nano.path()).vision_config is None:
        total_bytes += vision_bytes
    assert vision_bytes > 6e6 and total_bytes < 24e6
    processor = Processor.from_folder(tmp_path)
    for width, height in ((112, 112), (4000, 3000), (300, 3000), (113, 5), (1, 1), (200, 200)):
        size = processor.size(width, height)
        assert size.rows <= 8 and size.columns <= 8 and size.tokens <= 16
    # The widths of heads that kernels are made for.
    assert (
        config.vision_config["qkv_hidden_size"]
        == 64 * config.vision_config["vt_num_attention_heads"]
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("steps = ", "is not valid TOML"),
        ("steps = 1\nsteps = 2", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        ("", "model is missing"),
        ('model = "a"\nout = "b"', "steps is missing"),
    ],
)
def test_a_file_that_is_no_configuration(
    tmp_path: Path, refused: Callable, content: str | bytes, says: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"{path}" in refused(path) and says in refused(path)


def test_no_file(tmp_path: Path, refused: Callable) -> None:
    assert "none.toml does not exist; give a training configuration" in refused(
        tmp_path / "none.toml"
    )
    assert f"{tmp_path}: Is a directory" in refused(tmp_path)


WRONG = [
    ("step", 3, "there is no 'step'; there are model, out, steps, "),
    ("muon", {}, "there is no 'muon'"),
    ("steps", 0, "steps is 0; it must be at least 1"),
    ("pictures", 1.5, "pictures is 1.5; it must be from 0 to 1"),
    ("tower_learning_rate", -1.0, "tower_learning_rate is -1.0; it must be from 0 to 1"),
    ("initialize_from", 3, "initialize_from cannot be 3"),
    ("steps", 1.5, "steps cannot be 1.5"),
    ("steps", True, "steps cannot be True"),
    ("steps", "12", "steps cannot be '12'"),
    ("model", 3, "model cannot be 3"),
    ("tokens_per_batch", -1, "tokens_per_batch is -1"),
    ("conversations_per_chunk", 0, "conversations_per_chunk is 0"),
    ("workers", 0, "workers is 0"),
    ("log_every", 0, "log_every is 0"),
    ("evaluate_every", 0, "evaluate_every is 0"),
    ("checkpoint_every", 0, "checkpoint_every is 0"),
    ("lengths", [], "lengths must name at least one length"),
    ("lengths", [1, 128], "lengths must name at least one length of 2 or more"),
    ("lengths", ["128"], "lengths cannot be ['128']"),
    ("lengths", [128.0], "lengths cannot be [128.0]"),
    ("lengths", 128, "lengths cannot be 128"),
    ("seed", -1, "seed is -1; it must be from 0 to 4294967295"),
    ("seed", 1 << 40, "seed is 1099511627776"),
    ("warmup", 1.5, "warmup is 1.5; it must be from 0 to 1"),
    ("decay", -0.1, "decay is -0.1"),
    ("balance_rate", 2, "balance_rate is 2.0"),
    ("quantize_from", 1.01, "quantize_from is 1.01"),
    ("learning_rate", -1e-3, "learning_rate is -0.001"),
    ("learning_rate", "fast", "learning_rate cannot be 'fast'"),
    ("weight_decay", 1.1, "weight_decay is 1.1"),
    ("max_grad_norm", -1, "max_grad_norm is -1.0; it must be at least 0"),
    ("optimizer", "sgd", "optimizer is 'sgd'; it can be muon, adamw"),
    ("balance", "loss", "balance is 'loss'; it can be quantile, sign, none"),
    ("schedule", "flat", "schedule is 'flat'; it can be wsd, cosine"),
]


@pytest.mark.parametrize(("key", "value", "says"), WRONG, ids=str)
def test_a_wrong_value(
    tmp_path: Path, start: Path, refused: Callable, key: str, value: Any, says: str
) -> None:
    path = write_run(tmp_path / "run.toml", start, **{key: value})
    assert refused(path).startswith(f"mlx-k3: {path}: {says}")
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("key", ["learning_rate", "max_grad_norm", "warmup"])
def test_no_number_at_all(tmp_path: Path, start: Path, refused: Callable, key: str) -> None:
    path = write_run(tmp_path / "run.toml", start)
    path.write_text(f"{path.read_text()}{key} = nan\n")
    assert f"{key} is nan" in refused(path)


def test_no_clipping_is_infinity(tmp_path: Path, start: Path) -> None:
    path = write_run(tmp_path / "run.toml", start)
    path.write_text(f"{path.read_text()}max_grad_norm = inf\n")
    assert TrainConfig.from_file(path).max_grad_norm == math.inf


def text_config(**changes: Any) -> Callable[[Path], None]:
    """Change a start folder's ``config.json``."""

    def change(folder: Path) -> None:
        edit_json(folder / "config.json", lambda c: c["text_config"].update(changes))

    return change


def vision(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(vision_config={"depth": 2}))


STARTS = {
    "gone": (shutil.rmtree, "start does not exist; is this a model folder?"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "no vocabulary": (lambda f: (f / "tiktoken.model").unlink(), "has no tiktoken.model"),
    "no token names": (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json"),
    "a damaged vocabulary": (
        lambda f: (f / "tiktoken.model").write_bytes(b"YQ== 0\nYg==\n"),
        "tiktoken.model: line 2 is not a base64 token",
    ),
    "too few rows": (
        text_config(vocab_size=RANKS),
        f"config.json has vocab_size {RANKS}, too few for the {RANKS + 256} ids",
    ),
    "experts of no groups": (text_config(moe_intermediate_size=48), "experts of width 48"),
    "latents of no groups": (text_config(routed_expert_hidden_size=80), "experts of width 80"),
    "a layer twice": (text_config(num_hidden_layers=6), "must name every layer from 1 to 6"),
    "pictures": (vision, "has a vision_config; then `pictures` must be above 0, and is 0.0"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_a_start_that_no_run_can_begin_from(
    tmp_path: Path, start: Path, refused: Callable, kind: str
) -> None:
    spoil, says = STARTS[kind]
    folder = shutil.copytree(start, tmp_path / "start")
    spoil(folder)
    path = write_run(tmp_path / "run.toml", folder)
    assert says in refused(path)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, start: Path, refused: Callable) -> None:
    (tmp_path / "out").write_text("a file")
    path = write_run(tmp_path / "run.toml", start)
    assert f"{tmp_path / 'out'}: File exists; give another `out`" in refused(path)


def test_conversations_that_fit_nowhere(tmp_path: Path, start: Path, refused: Callable) -> None:
    path = write_run(tmp_path / "run.toml", start, lengths=[8])
    assert "conversations fits into lengths of 8 tokens" in refused(path)


def trainer(path: Path) -> Trainer:
    return Trainer(TrainConfig.from_file(path))


def saved(path: Path, step: int = 5) -> Path:
    """Leave a checkpoint of the run in ``path``, as if it had come to ``step``."""
    config = TrainConfig.from_file(path)
    state = State({"w": mx.zeros(2)}, [mx.zeros(2)], {"states": [{"step": mx.array(step)}]})
    run = trainer(path)._run
    checkpoints.save(config.out / "checkpoints", run, Saved(state, step, BEGINNING))
    return config.out / "checkpoints" / f"step-{step:08}.safetensors"


OTHER = {
    "seed": 1,
    "steps": 13,
    "tokens_per_batch": 256,
    "lengths": [128],
    "conversations_per_chunk": 512,
    "learning_rate": 1e-4,
    "balance": "none",
    "quantize_from": 0.5,
}


@pytest.mark.parametrize("key", OTHER)
def test_another_run_in_the_same_place_is_refused(
    tmp_path: Path, start: Path, refused: Callable, key: str
) -> None:
    checkpoint = saved(write_run(tmp_path / "run.toml", start))
    content = checkpoint.read_bytes()
    path = write_run(tmp_path / "run.toml", start, **{key: OTHER[key]})
    assert f"{checkpoint} is of a run with other settings; give another `out`" in refused(path)
    assert checkpoint.read_bytes() == content
    assert not (tmp_path / "out" / "log.jsonl").exists()


def other_model(folder: Path) -> None:
    text_config(rms_norm_eps=1e-6)(folder)


def other_vocabulary(folder: Path) -> None:
    """Two merges change places."""
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    (first, one), (second, two) = (line.split() for line in lines[-2:])
    lines[-2:] = [b" ".join((second, one)), b" ".join((first, two))]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("change", [other_model, other_vocabulary])
def test_so_is_one_from_another_start(
    tmp_path: Path, start: Path, refused: Callable, change: Callable
) -> None:
    folder = shutil.copytree(start, tmp_path / "start")
    path = write_run(tmp_path / "run.toml", folder)
    saved(path)
    change(folder)
    assert "is of a run with other settings" in refused(path)


def test_where_and_how_often_is_no_other_run(tmp_path: Path, start: Path) -> None:
    run = trainer(write_run(tmp_path / "run.toml", start))._run
    changes = {"out": "b", "workers": 3, "log_every": 7, "evaluate_every": 1, "checkpoint_every": 2}
    moved = shutil.copytree(start, tmp_path / "elsewhere")
    assert trainer(write_run(tmp_path / "other.toml", moved, **changes))._run == run
    assert trainer(write_run(tmp_path / "other.toml", moved, decay=0.2))._run != run


def test_a_damaged_checkpoint_is_named(tmp_path: Path, start: Path, refused: Callable) -> None:
    path = write_run(tmp_path / "run.toml", start)
    saved(path, 5)
    checkpoint = saved(path, 10)
    checkpoint.write_bytes(checkpoint.read_bytes()[:-3])
    line = refused(path)
    assert (
        str(checkpoint) in line and "delete it, and the run continues from the one before" in line
    )
    checkpoint.unlink()
    config = TrainConfig.from_file(path)
    assert checkpoints.latest(config.out / "checkpoints", trainer(path)._run).step == 5
