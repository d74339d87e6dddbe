"""Who is answered and who waits: one answer at a time, in the order of arrival.

Owns the queue and the thread that generates. Everyone who waits is told how many are ahead. Who
leaves the queue is not answered; who leaves an answer stops it within a token, or while the prompt
is read within a block of it, and within a layer where experts are read on demand.
"""

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..chat.generation import run
from ..chat.prompt_cache import PromptCache
from .answers import Answer, Delta
from .asks import Ask
from .errors import ApiError
from .metrics import Metrics

# Of a prompt that are read before it is asked whether anyone still waits for the answer.
BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Waiting:
    """News for one who waits: so many are ahead."""

    ahead: int


@dataclass(frozen=True)
class Reading:
    """News of the prompt: so many of its tokens are read."""

    done: int
    total: int


News = Waiting | Reading | Delta


class Left(ApiError):
    """Raised to end an answer that nobody waits for, or that must end with the server."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", code="shutting_down")


class Job:
    """One answer to be made. ``tell`` is called by other threads; ``future`` ends with it."""

    def __init__(self, ask: Ask, answer: Answer, tell: Callable[[News], None]):
        self.ask, self.answer, self.tell = ask, answer, tell
        self.future: Future[None] = Future()
        self.ahead = 0
        self.left = threading.Event()
        self.asked = time.perf_counter()


class GenerationQueue:
    """The queue of one model.

    Args:
        model: what :func:`mlx_k3.load` returns.
        tokenizer: the same.
        prompts: what has been read before, if anything is kept of it.
        most_waiting: how many may wait beside the one that is answered; None for any number.
        metrics: where all of it is counted.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: PromptCache | None,
        most_waiting: int | None,
        metrics: Metrics,
    ):
        self._model, self._tokenizer, self._prompts = model, tokenizer, prompts
        self._most, self._metrics = most_waiting, metrics
        self._thread = ThreadPoolExecutor(1, "generation")
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._running: Job | None = None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many are answered: one or none."""
        return 0 if self._running is None else 1

    def add(self, job: Job) -> None:
        """Put ``job`` at the end; its ``ahead`` is how many are before it.

        Raises:
            ApiError: the queue is full.
        """
        with self._lock:
            job.ahead = self.waiting + self.running
            if self._most is not None and job.ahead > self._most:
                message = f"{self.waiting} requests are waiting; try again later"
                raise ApiError(429, message, code="queue_full")
            self._waiting.append(job)
            job.future = self._thread.submit(self._run, job)

    def leave(self, job: Job) -> None:
        """Nobody waits for ``job`` any more. Does nothing if it is over."""
        if job.future.done():
            return
        job.left.set()
        if job.future.cancel():
            with self._lock:
                self._waiting.remove(job)
                self._tell_places()
        self._metrics.cancelled.inc()

    def leave_all(self) -> None:
        """Give up all that is not answered yet."""
        with self._lock:
            jobs = [*self._waiting, *([self._running] if self._running else [])]
        for job in jobs:
            job.left.set()

    def close(self) -> None:
        """Give up everything and end the thread."""
        self.leave_all()
        self._thread.shutdown()

    def _run(self, job: Job) -> None:
        with self._lock:
            self._waiting.remove(job)
            self._running = job
            self._tell_places()
        try:
            self._metrics.waited.observe(time.perf_counter() - job.asked)
            self._answer(job)
        finally:
            self._running = None
            # What the next prompt needs has other sizes.
            mx.clear_cache()

    def _answer(self, job: Job) -> None:
        ask, counts = job.ask, job.answer.counts

        def reading(done: int, total: int) -> None:
            _go_on(job)
            counts.cached = len(ask.ids) - total
            job.tell(Reading(done, total))

        _go_on(job)
        options = ask.sampling.options
        options["prompt_progress_callback"] = reading
        if self._model.offload is None:
            options["prefill_step_size"] = BLOCK_TOKENS
        # Without a seed too: what follows a request that has one must not be known by it.
        mx.random.seed(secrets.randbits(64) if ask.seed is None else ask.seed)
        begin = time.perf_counter()
        chunks = run(
            self._model,
            self._tokenizer,
            ask.ids,
            ask.parser,
            ask.sampling,
            prompts=self._prompts,
            media=ask.media,
        )
        with closing(chunks), self._metrics.answer(counts, begin) as meter:
            for chunk in chunks:
                _go_on(job)
                meter.token()
                delta = job.answer.take(chunk)
                job.tell(delta)
                if delta.finish_reason is not None:
                    return

    def _tell_places(self) -> None:
        for ahead, job in enumerate(self._waiting, start=1):
            job.tell(Waiting(ahead))


def _go_on(job: Job) -> None:
    if job.left.is_set():
        raise Left
