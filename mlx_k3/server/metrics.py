"""What the server counts, for Prometheus.

Owns names and units. Counters of answers are set while they are made; the state of queue, memory
and experts is read when the page is asked for.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..chat.prompt_cache import PromptCache
from ..version import __version__
from .answers import Counts

# A streamed model takes minutes where one in memory takes a tenth of a second.
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Metrics:
    """The figures of one server."""

    def __init__(self, model_name: str):
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        info = Info("mlx_k3", "The program and its model.", registry=registry)
        info.info({"version": __version__, "model": model_name})

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mlx_k3_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"mlx_k3_{name}", text, buckets=_SECONDS, registry=registry)

        self.requests = counter("requests", "Requests that were answered.", "path", "status")
        self.cancelled = counter("cancelled", "Answers whose client left.")
        self.waited = histogram("queue_seconds", "Time in the queue.")
        self._first = histogram("first_token_seconds", "From the queue's end to the first token.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_prompt_tokens", "Of these, not computed again.")
        self._generated = counter("generated_tokens", "Tokens of answers.")
        self._prompt_seconds = counter("prompt_seconds", "Time until first tokens.")
        self._seconds = counter("generation_seconds", "Time from first tokens on.")
        text = "Speed of the last answer of two tokens or more."
        self._speed = Gauge("mlx_k3_tokens_per_second", text, registry=registry)

    @contextmanager
    def answer(self, counts: Counts, begin: float) -> Iterator["AnswerMeter"]:
        """Count an answer that is made meanwhile, however it ends."""
        meter = AnswerMeter()
        try:
            yield meter
        finally:
            if meter.first is not None:
                self._first.observe(meter.first - begin)
                self._prompt_seconds.inc(meter.first - begin)
                self._prompt.inc(counts.prompt)
                self._cached.inc(counts.cached)
                self._generated.inc(meter.tokens)
                self._seconds.inc(meter.last - meter.first)
                if meter.tokens > 1 and meter.last > meter.first:
                    self._speed.set((meter.tokens - 1) / (meter.last - meter.first))

    def watch(self, model: Any, prompts: PromptCache | None, queue: Any) -> None:
        """Show the state of these too."""
        self.registry.register(_Live(model, prompts, queue))

    def page(self) -> bytes:
        """All figures in Prometheus' text form."""
        return generate_latest(self.registry)


class AnswerMeter:
    """When the tokens of an answer came."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.tokens = 0

    def token(self) -> None:
        """One more has come."""
        self.last = time.perf_counter()
        self.tokens += 1
        if self.first is None:
            self.first = self.last


class _Live(Collector):
    """Reads what is so now."""

    def __init__(self, model: Any, prompts: PromptCache | None, queue: Any):
        self._offload, self._prompts = model.offload, prompts
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "queue_waiting": ("Requests that wait.", lambda: queue.waiting),
            "running": ("Requests that are being answered.", lambda: queue.running),
            "memory_active_bytes": ("Arrays of MLX in use.", mx.get_active_memory),
            "memory_cached_bytes": ("Memory that MLX keeps for new arrays.", mx.get_cache_memory),
            "memory_peak_bytes": ("The most that arrays took so far.", mx.get_peak_memory),
        }

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        for name, (text, value) in self._gauges.items():
            yield GaugeMetricFamily(f"mlx_k3_{name}", text, value())
        if self._prompts is not None:
            yield from _prompt_cache(self._prompts)
        if self._offload is not None:
            yield from _experts(self._offload)


def _prompt_cache(prompts: PromptCache) -> Iterator[Metric]:
    usage = prompts.usage()
    nbytes = GaugeMetricFamily(
        "mlx_k3_prompt_cache_bytes", "What is kept of prompts and answers.", labels=["in"]
    )
    nbytes.add_metric(["memory"], usage.memory_bytes)
    nbytes.add_metric(["folder"], usage.disk_bytes)
    yield nbytes
    text = "States from which reading can be taken up."
    states = GaugeMetricFamily("mlx_k3_prompt_cache_states", text, labels=["in"])
    states.add_metric(["memory"], usage.memory_states)
    states.add_metric(["folder"], usage.disk_states)
    yield states


def _experts(offload: Any) -> Iterator[Metric]:
    usage = offload.usage()
    yield GaugeMetricFamily("mlx_k3_expert_slots", "Places for experts.", offload.slots)
    share = "Share of needed bytes that were there without a read."
    yield GaugeMetricFamily("mlx_k3_expert_hit_rate", share, usage.hit_rate)
    for name, text, total in (
        ("expert_hit_bytes", "Needed bytes that were there.", usage.hit_bytes),
        ("expert_read_bytes", "Bytes read from the drive.", usage.read_bytes),
        ("expert_read_seconds", "Time in which something was read.", usage.disk_seconds),
        ("expert_stall_seconds", "Time in which the model waited.", usage.stall_seconds),
    ):
        yield CounterMetricFamily(f"mlx_k3_{name}", text, total)
