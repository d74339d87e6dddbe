"""The learning rate over a run."""

from collections.abc import Callable

import mlx.core as mx
from mlx.optimizers import cosine_decay, join_schedules, linear_schedule

from .config import TrainConfig


def learning_rate(config: TrainConfig) -> Callable[[mx.array], mx.array]:
    """The rate as a function of the steps taken.

    It rises over the ``warmup``. Then ``wsd`` holds it and lets it fall in a line to zero over the
    last ``decay`` of the run; ``cosine`` lets it fall in half a wave.
    """
    peak = config.learning_rate
    rise = max(int(config.steps * config.warmup), 1)
    up = linear_schedule(peak / rise, peak, rise)
    if config.schedule == "cosine":
        return join_schedules([up, cosine_decay(peak, max(config.steps - rise, 1))], [rise])
    fall = max(min(int(config.steps * config.decay), config.steps - rise), 1)
    down = linear_schedule(peak, 0.0, fall)
    steady = linear_schedule(peak, peak, config.steps)
    return join_schedules([up, steady, down], [rise, max(config.steps - fall, rise)])
