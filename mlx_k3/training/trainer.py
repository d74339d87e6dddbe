"""A training run from its configuration to a checkpoint in release format.

Owns the order of things: phases, logging, evaluation, checkpoints, and where a run continues.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import K3Config
from ..convert.tokenizer import CONTROL_TOKENS, read_ranks, write_tokenizer
from ..errors import K3Error, UnsupportedError
from ..kernels import using
from ..kernels.mxfp8 import GROUP
from ..media.processor import FILE as PREPROCESSOR
from . import checkpoints
from .balancing import expert_load, max_over_mean
from .config import TrainConfig
from .data import Batch, BatchStream, Position
from .export import export
from .initialize import new_model
from .log import Log
from .muon import make_optimizer
from .precision import as_stored
from .schedule import learning_rate
from .settle import settle
from .sight import logits
from .start import start_from
from .step import State, cross_entropy, initial_state, make_step, place
from .two_optimizers import TwoOptimizers

HELD_OUT_BATCHES = 8
SETTLING_BATCHES = 16
# Batches have several shapes; kept buffers of all of them would fill a GPU.
CACHE_BYTES = 16 << 30


class Trainer:
    """A run that can be stopped at any time and continues where its last checkpoint is."""

    def __init__(self, config: TrainConfig):
        self.config = config
        model_config = K3Config.from_file(config.model)
        _check_model(model_config, config)
        self._raw_config = json.loads((config.model / "config.json").read_text(encoding="utf-8"))
        self._run = _identity(config)
        self._rate = learning_rate(config)
        self.model = new_model(model_config, config.seed)
        self._optimizer = _optimizer(model_config, config)

    def run(self, report: Callable[[dict[str, Any]], None] = lambda record: None) -> Path:
        """Train to the end; returns the folder in release format.

        ``report`` gets each line of the log: ``step``, ``loss``, ``tokens_per_second``, ...
        """
        config = self.config
        saved = checkpoints.latest(config.out / "checkpoints", self._run)
        if saved is None and config.initialize_from:
            start_from(self.model, config.initialize_from, config.model)
        state = initial_state(self.model, self._optimizer)
        if saved is None:
            saved = checkpoints.Saved(state, 0, Position(0, 0))
        try:
            config.out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise K3Error(f"{config.out}: {e.strerror}; give another `out`") from None
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._write_tokenizer(folder)
            log = stack.enter_context(Log(config.out / "log.jsonl", saved.step, report))
            held_out = self._held_out(folder)
            stream = stack.enter_context(
                self._stream(folder, config.seed, start=saved.position, workers=config.workers)
            )
            stack.callback(mx.set_cache_limit, mx.set_cache_limit(CACHE_BYTES))
            # Gradients are those of the plain operations, so that is what a step runs on.
            stack.enter_context(using("reference"))
            state = self._train(saved, stream, held_out, log)
        return self._export(state)

    def _write_tokenizer(self, folder: Path) -> None:
        model, rows = self.config.model, self.model.config.vocab_size
        if not write_tokenizer(model, folder):
            raise K3Error(f"{model} has no tiktoken.model; a run needs a vocabulary")
        if (model / PREPROCESSOR).is_file():
            shutil.copyfile(model / PREPROCESSOR, folder / PREPROCESSOR)
        ids = len(read_ranks(model / "tiktoken.model")) + CONTROL_TOKENS
        if ids > rows:
            raise K3Error(
                f"{model}: config.json has vocab_size {rows:,}, too few for the {ids:,} ids of "
                "tiktoken.model and its control tokens"
            )

    def _train(
        self, saved: checkpoints.Saved, stream: BatchStream, held_out: list[Batch], log: Log
    ) -> State:
        config = self.config
        first_quantized = int(config.steps * config.quantize_from)
        steps = {q: make_step(self.model, self._optimizer, config, quantized=q) for q in (0, 1)}
        folder = config.out / "checkpoints"
        before = None
        batches = iter(stream)
        try:
            for position, batch in islice(batches, config.steps - saved.step):
                ids, weights = mx.array(batch.ids), mx.array(batch.weights)
                take_step = steps[saved.step >= first_quantized]
                state, metrics = take_step(saved.state, ids, weights, batch.pictures)
                mx.async_eval(state, metrics)
                # One step ahead of the device and no further: every step on its way needs memory.
                mx.eval(before)
                before = metrics
                step = saved.step + 1
                last = step == config.steps
                if last and config.balance == "quantile":
                    state = self._settled(state, islice(batches, SETTLING_BATCHES))
                # In one go, for Ctrl-C may come between any two lines.
                saved = checkpoints.Saved(state, step, position)
                log.count(batch.ids.size)
                if step % config.log_every == 0 or last:
                    record = {"step": step, "learning_rate": self._rate(mx.array(step - 1)).item()}
                    record |= {name: value.item() for name, value in metrics._asdict().items()}
                    mx.clear_cache()
                    if step % config.evaluate_every == 0 or last:
                        record |= self._evaluate(state, held_out)
                    log.write(record)
                if step % config.checkpoint_every == 0 or last:
                    checkpoints.save(folder, self._run, saved)
        except KeyboardInterrupt:
            checkpoints.save(folder, self._run, saved)
            raise
        return saved.state

    def _stream(self, folder: Path, seed: int, **options: Any) -> BatchStream:
        config = self.config
        return BatchStream(
            folder,
            lengths=config.lengths,
            tokens_per_batch=config.tokens_per_batch,
            conversations_per_chunk=config.conversations_per_chunk,
            seed=seed,
            pictures=config.pictures,
            **options,
        )

    def _held_out(self, folder: Path) -> list[Batch]:
        """A few batches the run is not trained on: other conversations, of held-out items."""
        options = {"held_out": True, "workers": self.config.workers}
        with self._stream(folder, self.config.seed, **options) as stream:
            return [batch for _, batch in islice(stream, HELD_OUT_BATCHES)]

    def _settled(self, state: State, upcoming: Iterable[tuple[Position, Batch]]) -> State:
        place(self.model, as_stored(state.parameters), state.biases)
        return state._replace(biases=settle(self.model, [batch for _, batch in upcoming]))

    def _evaluate(self, state: State, batches: list[Batch]) -> dict[str, float]:
        """The loss on ``batches``, and how evenly the experts are used there.

        ``held_out_max_load`` and ``held_out_min_load`` are the busiest and the idlest expert's
        load over the mean of its layer, the worst of all layers.
        """
        place(self.model, as_stored(state.parameters), state.biases)
        config, top_k = self.model.config, self.model.config.num_experts_per_token
        mlps = [self.model.layers[layer].mlp for layer in config.moe_layers]
        losses, loads = [], [mx.array(0.0)] * len(mlps)
        for batch in batches:
            ids = mx.array(batch.ids)
            said = logits(self.model, ids[:, :-1], batch.pictures)
            losses.append(cross_entropy(said, ids[:, 1:], mx.array(batch.weights)))
            for i, (mlp, bias) in enumerate(zip(mlps, state.biases, strict=True)):
                loads[i] = loads[i] + expert_load(mlp.gate.scores(config), bias, top_k)
            mx.eval(losses, loads)
        result = {"held_out_loss": (sum(losses) / len(losses)).item()}
        if loads:
            result["held_out_max_load"] = max(max_over_mean(load).item() for load in loads)
            result["held_out_min_load"] = min((load.min() / load.mean()).item() for load in loads)
        return result

    def _export(self, state: State) -> Path:
        """The result in release format, with the tokenizer and other files of the model folder."""
        out = self.config.out / "model"
        shutil.rmtree(out, ignore_errors=True)
        place(self.model, state.parameters, state.biases)
        export(self.model, self._raw_config, out)
        for path in self.config.model.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".json.partial")):
                target = out / path.name
                if not target.exists():
                    shutil.copyfile(path, target)
        return out


def _optimizer(model: K3Config, config: TrainConfig) -> Any:
    def with_rate(rate: Callable[[mx.array], mx.array]) -> Any:
        return make_optimizer(model, rate, config.weight_decay, config.optimizer)

    text = with_rate(learning_rate(config))
    if not model.vision_config:
        return text
    peak = config.tower_learning_rate or config.learning_rate
    return TwoOptimizers(text, with_rate(learning_rate(replace(config, learning_rate=peak))))


def _check_model(config: K3Config, run: TrainConfig) -> None:
    """Refuse now what could not be written at the end."""
    folder = run.model
    if bool(config.vision_config) != bool(run.pictures):
        has, then = ("a", "above 0") if config.vision_config else ("no", "0")
        raise UnsupportedError(
            f"{folder}/config.json has {has} vision_config; then `pictures` must be {then}, "
            f"and is {run.pictures}"
        )
    for name in ("expert_dim", "moe_intermediate_size"):
        if config.moe_layers and getattr(config, name) % GROUP:
            raise UnsupportedError(
                f"{folder}/config.json: experts of width {getattr(config, name)}; MXFP4 takes "
                f"multiples of {GROUP}"
            )


def _identity(config: TrainConfig) -> str:
    """A digest of what decides a run's numbers; where it runs and what it logs does not."""
    told = asdict(config)
    for name in ("out", "workers", "log_every", "evaluate_every", "checkpoint_every"):
        told.pop(name)
    files = [*sorted(config.model.glob("*.json")), *config.model.glob("tiktoken.model")]
    told["model"] = _digests(files)
    if config.initialize_from:
        told["initialize_from"] = _digests(sorted(config.initialize_from.glob("*.safetensors")))
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()


def _digests(files: Iterable[Path]) -> list[tuple[str, str]]:
    return [(p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files]
