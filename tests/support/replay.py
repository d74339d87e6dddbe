"""Have a random model's routers choose what the bundled model's chose: see :mod:`.routing`.

A token's experts then follow from its position and the layer alone, in a prompt and in an answer,
with experts in memory or on demand, so that outputs can be compared. It only speaks of a gate, a
selection bias and caches with an offset, and so fits mlx-vlm's model of the family as well.
"""

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .routing import RECORDED, routing

# The share of an offloaded bank's guesses that come true, about that of the bundled model:
# scripts/record_routing.py prints it.
RIGHT_GUESSES = 0.57
NOT_CHOSEN = -1e9  # added to a logit: the sigmoid of what is left is 0

M = TypeVar("M", bound=nn.Module)


def replay(model: M) -> M:
    """``model``, from now on routed as recorded. Weights are its own routers', over the chosen."""
    clock, k = _Clock(), model.config.num_experts_per_token
    stack = model.model
    moe_layers = [layer.mlp for layer in stack.layers if "gate" in layer.mlp]
    counts = [len(moe.gate.weight) for moe in moe_layers]
    tables = {n: routing(len(RECORDED), len(counts), n, k) for n in set(counts)}
    choices = [tables[n][:, number] for number, n in enumerate(counts)]
    for number, moe in enumerate(moe_layers):
        if getattr(moe, "look_ahead", None) is not None:
            _guess_as_often_right(moe, choices[number + 1], clock)
    for moe, experts, chosen in zip(moe_layers, counts, choices, strict=True):
        moe.gate = _RecordedGate(moe.gate, mx.array(chosen), clock)
        moe.e_score_correction_bias = mx.array(np.zeros(experts, np.float32))

    class Timed(type(stack)):
        def __call__(self, ids: mx.array, cache: list[Any] | None = None, *rest: Any, **more: Any):
            clock.begin(cache, ids.shape[1])
            return super().__call__(ids, cache, *rest, **more)

    stack.__class__ = Timed
    return model


class _Clock:
    """Where in their texts the tokens of the present forward pass stand."""

    def __init__(self):
        self.positions = mx.array([[0]])
        """``[1 or B, T]``."""
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def begin(self, cache: list[Any] | None, tokens: int) -> None:
        """A pass over so many tokens begins, continuing ``cache``."""
        offsets = [layer.offset for layer in cache or [] if hasattr(layer, "offset")]
        start = offsets[0] if offsets else 0
        if cache and not offsets:
            # Only KDA layers: their caches do not know. Enough as long as the cache stays itself.
            start = self._seen.get(cache[0], 0)
            self._seen[cache[0]] = start + tokens
        self.positions = mx.array(start).reshape(-1, 1) + mx.arange(tokens)


class _RecordedGate(nn.Module):
    """A router's logits, with none but the recorded experts left to choose."""

    def __init__(self, gate: nn.Module, choices: mx.array, clock: _Clock):
        super().__init__()
        self.gate = gate
        self._choices, self._clock = choices, clock  # [tokens, k]

    def __call__(self, x: mx.array) -> mx.array:
        chosen = self._choices[self._clock.positions % len(self._choices)]
        logits = self.gate(x)
        others = mx.full(logits.shape, NOT_CHOSEN, logits.dtype)
        chosen = mx.broadcast_to(chosen, (*logits.shape[:-1], chosen.shape[-1]))
        return logits + mx.put_along_axis(others, chosen, mx.array(0, logits.dtype), axis=-1)


def _guess_as_often_right(moe: nn.Module, choices: np.ndarray, clock: _Clock) -> None:
    """Have ``moe`` guess experts that the next layer will choose, or chooses at other times."""
    rng, own = np.random.default_rng(0), moe.look_ahead
    wrong = rng.random(choices.shape) >= RIGHT_GUESSES
    guesses = np.where(wrong, rng.permuted(choices, axis=0), choices)
    guesses = mx.array(rng.permuted(guesses, axis=1))

    def look_ahead(x: mx.array) -> mx.array:
        ids = own(x)  # still computed, for what it costs
        rows = guesses[clock.positions % len(guesses)][..., : ids.shape[-1]]
        return mx.depends(mx.broadcast_to(rows, ids.shape), ids)

    moe.look_ahead = look_ahead
