"""What a training run is: one TOML file, read into a :class:`TrainConfig`."""

import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from ..errors import K3Error

CHOICES = {
    "optimizer": ("muon", "adamw"),
    "balance": ("quantile", "sign", "none"),
    "schedule": ("wsd", "cosine"),
}
_COUNTS = ("steps", "tokens_per_batch", "conversations_per_chunk", "workers")
_COUNTS += ("log_every", "evaluate_every", "checkpoint_every")
_SHARES = ("warmup", "decay", "balance_rate", "quantize_from", "learning_rate", "weight_decay")
_SHARES += ("pictures", "tower_learning_rate")
RANGES = {
    **dict.fromkeys(_COUNTS, (1, math.inf)),
    **dict.fromkeys(_SHARES, (0, 1)),
    "seed": (0, 2**32 - 1),
    "max_grad_norm": (0, math.inf),
}


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Paths are relative to the file they stand in."""

    model: Path
    """Folder with ``config.json``, ``tiktoken.model`` and ``tokenizer_config.json``, as a release
    has them; what else lies there is copied to the result."""
    out: Path
    """Folder of the run: checkpoints, ``log.jsonl``, at the end ``model/`` in release format."""
    steps: int
    tokens_per_batch: int = 32768
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    """Conversations are padded to one of these; longer ones are left out."""
    conversations_per_chunk: int = 8192
    """Conversations that are made and sorted by length together."""
    seed: int = 0
    optimizer: str = "muon"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    schedule: str = "wsd"
    warmup: float = 0.02
    """Share of the steps over which the rate rises."""
    decay: float = 0.3
    """Share of the steps over which ``wsd`` lets it fall."""
    balance: str = "quantile"
    balance_rate: float = 0.05
    """How far a step moves the router's bias: towards the quantiles, or by a sign step."""
    quantize_from: float = 0.8
    """Share of the steps after which the experts compute in MXFP4."""
    log_every: int = 10
    evaluate_every: int = 250
    checkpoint_every: int = 500
    workers: int = 1
    """Processes that make conversations."""
    initialize_from: Path | None = None
    """Folder in release format whose weights the run begins with; else they are random."""
    pictures: float = 0.0
    """Share of the examples that are about pictures, for a model with a ``vision_config``."""
    tower_learning_rate: float | None = None
    """Of the vision tower and its projector; else ``learning_rate``."""

    @classmethod
    def from_file(cls, path: Path) -> "TrainConfig":
        """Read ``path``.

        Raises:
            K3Error: it is missing, no TOML, or has a key or a value that makes no sense.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise K3Error(f"{path} does not exist; give a training configuration in TOML") from None
        except OSError as e:
            raise K3Error(f"{path}: {e.strerror}; give a training configuration in TOML") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise K3Error(f"{path} is not valid TOML: {e}") from None
        types = {field.name: field.type for field in fields(cls)}
        for key in ("model", "out", "steps"):
            if key not in content:
                raise K3Error(f"{path}: {key} is missing")
        for key, value in content.items():
            if key not in types:
                raise K3Error(f"{path}: there is no {key!r}; there are {', '.join(types)}")
            content[key] = _convert(path, key, types[key], value)
        config = cls(**content)
        config._check(path)
        return config

    def _check(self, path: Path) -> None:
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise K3Error(
                    f"{path}: {key} is {getattr(self, key)!r}; it can be {', '.join(allowed)}"
                )
        for key, (least, most) in RANGES.items():
            value = getattr(self, key)
            if value is not None and not least <= value <= most:
                allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
                raise K3Error(f"{path}: {key} is {value}; it must be {allowed}")
        if not self.lengths or any(n < 2 for n in self.lengths):
            raise K3Error(f"{path}: lengths must name at least one length of 2 or more tokens")


def _convert(path: Path, key: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, UnionType):  # Or None, where the key is missing.
        kind = get_args(kind)[0]
    if kind is Path and isinstance(value, str):
        return path.parent / value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[int, ...] and isinstance(value, list):
        if all(type(n) is int for n in value):
            return tuple(sorted(value))
    elif type(value) is kind:
        return value
    raise K3Error(f"{path}: {key} cannot be {value!r}")
