"""Record which experts the bundled model uses while it answers: tests/data/nano-routing.npy.

    python scripts/record_routing.py

Held-out questions of every family, one after the other, as a person would ask them. Tests and
benchmarks of experts on demand use this instead of random routing, which is flat and never repeats.
The array is [tokens, layers, k] uint8: the experts of each generated token, ascending. Printed as
well: how many of the guesses of the next layer's experts came true (RIGHT_GUESSES of
tests/support/replay.py).
"""

import random
import tempfile
from itertools import pairwise
from pathlib import Path

import mlx_k3  # isort: skip  # Loads OpenBLAS, before MLX.
import numpy as np

from mlx_k3 import nano, tasks
from mlx_k3.chat.generation import stream_generate
from mlx_k3.experts.trace import read_trace
from mlx_k3.loader import plan_load

OUT = Path(__file__).resolve().parent.parent / "tests" / "data" / "nano-routing.npy"
TOKENS = 2000


def main() -> None:
    folder = nano.converted()
    plan = plan_load(folder, None)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "run.trace"
        memory = plan.minimum_bytes + 32 * plan.slot_bytes
        model, tokenizer = mlx_k3.load(folder, memory=memory, trace=file)
        right = watch_guesses(model)
        answer(model, tokenizer)
        model.offload.close()
        choices = decode_choices(file)
    np.save(OUT, choices)
    print(f"{OUT}: {choices.shape}; {np.mean(right):.2f} of the guesses came true")


def watch_guesses(model) -> list[float]:
    """Fills with the share that came true of each guess about a generated token."""
    right: list[float] = []
    layers = [model.layers[layer].mlp for layer in model.config.moe_layers]
    for moe, following in pairwise(layers):
        guess, route, guessed = moe.look_ahead, following.route, []

        def noted(x, guess=guess, guessed=guessed):
            guessed[:] = [guess(x)]
            return guessed[0]

        def compared(x, route=route, guessed=guessed):
            chosen, weights = route(x)
            if x.shape[1] == 1:
                right.append(np.isin(np.array(guessed[0]), np.array(chosen)).mean())
            return chosen, weights

        moe.look_ahead, following.route = noted, compared
    return right


def answer(model, tokenizer) -> None:
    """Answer questions of all families in turn until there are enough tokens."""
    rng, tokens = random.Random(0), 0
    while tokens < TOKENS:
        for family in tasks.FAMILIES:
            example = tasks.example(family, rng, "held-out")
            *_, last = stream_generate(
                model, tokenizer, tasks.asked(example), tools=example.tools, max_tokens=256
            )
            tokens += len(last.reply.ids)


def decode_choices(file: Path) -> np.ndarray:
    """The experts of the tokens that went through the model alone."""
    trace = read_trace(file)
    by_layer: dict[int, list[np.ndarray]] = {}
    for i, call in enumerate(trace.calls):
        if call["tokens"] == 1:
            by_layer.setdefault(int(call["layer"]), []).append(np.sort(trace.choices(i)[0][0]))
    return np.stack([np.stack(rows) for _, rows in sorted(by_layer.items())], 1).astype(np.uint8)


if __name__ == "__main__":
    main()
