"""The paths of the interface, and what each answers.

Owns the way of a request: body, prompt, queue, answer. The event loop only waits and writes;
prompts are rendered in one thread and answers generated in another.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..chat.prompt_cache import PromptCache
from ..errors import K3Error
from .answers import Answer, logprobs_for
from .asks import Ask, Asker, Defaults
from .bodies import ChatRequest, CompletionRequest, parse
from .errors import ApiError, api_error
from .guards import Guard, Log
from .metrics import Metrics
from .pictures import Pictures, Sources
from .queue import GenerationQueue
from .replies import EventStream, Listener, Shape, whole
from .shapes import ChatShape, CompletionShape


@dataclass(frozen=True)
class Limits:
    """Who may ask, and how much. None is no limit, or no key."""

    key: str | None = None
    origins: tuple[str, ...] = ()
    max_body_bytes: int | None = None


class Service:
    """One model, ready to answer requests.

    Args:
        model: what :func:`mlx_k3.load` returns.
        tokenizer: the same.
        name: the model's, for clients.
        created: when it came to be, in seconds since 1970.
        prompts: see :class:`~.queue.GenerationQueue`, as for ``most_waiting``.
        defaults: what holds where a request says nothing.
        sources: what pictures a request may name, beside those it brings.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        created: int,
        prompts: PromptCache | None,
        most_waiting: int | None,
        defaults: Defaults,
        sources: Sources | None = None,
    ):
        self.metrics = Metrics(name)
        self.queue = GenerationQueue(model, tokenizer, prompts, most_waiting, self.metrics)
        self.metrics.watch(model, prompts, self.queue)
        self.name, self._created, self._table = name, created, tokenizer.table
        self._stop_ids = set(tokenizer.eos_token_ids)
        context = model.plan.context_tokens
        pictures = Pictures(model, sources or Sources(), context)
        self._asker = Asker(tokenizer, context, defaults, pictures)
        self._asking = ThreadPoolExecutor(1, "prompts")

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body, given = parse(ChatRequest, await request.body())
        self._check_model(body.model)
        ask = await self._in_thread(self._asker.chat, body, given)
        logprobs = logprobs_for(self._table, ask.top_logprobs, None)
        answer = Answer(len(ask.ids), ask.stop, logprobs)
        return await self._answer(request, body, ask, answer, ChatShape(self.name))

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body, _ = parse(CompletionRequest, await request.body())
        self._check_model(body.model)
        ask = await self._in_thread(self._asker.completion, body)
        logprobs = logprobs_for(self._table, ask.top_logprobs, self._stop_ids)
        answer = Answer(len(ask.ids), ask.stop, logprobs)
        return await self._answer(request, body, ask, answer, CompletionShape(self.name))

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/NAME``."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, _: Request) -> Response:
        """``GET /health``."""
        return JSONResponse({"status": "ok"})

    async def figures(self, _: Request) -> Response:
        """``GET /metrics``."""
        return Response(self.metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def close(self) -> None:
        """Give up what is not answered, and end the threads."""
        self.queue.close()
        self._asking.shutdown()

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "local"}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"there is no model {name!r} here, only {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _in_thread(self, function: Callable[..., Ask], *arguments: Any) -> Ask:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._asking, function, *arguments)

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        ask: Ask,
        answer: Answer,
        shape: Shape,
    ) -> Response:
        listener = Listener(ask, answer, self.queue)
        job, counts = listener.job, answer.counts
        request.state.remark = lambda: (
            f", {job.ahead} ahead, {counts.prompt} + {counts.generated} tokens"
        )
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(listener, shape, usage)
        return await whole(request, listener, shape)


def create_app(service: Service, limits: Limits) -> Starlette:
    """The interface to ``service`` as an ASGI application; closing it closes the service."""
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.complete, methods=["POST"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/v1/models/{name:path}", service.model, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/metrics", service.figures, methods=["GET"]),
    ]
    middleware = [
        Middleware(Log, metrics=service.metrics, paths={route.path for route in routes}),
        Middleware(
            CORSMiddleware,
            allow_origins=limits.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Queue-Position"],
        ),
        Middleware(
            Guard, key=limits.key, origins=limits.origins, max_body_bytes=limits.max_body_bytes
        ),
    ]

    @asynccontextmanager
    async def closing(_: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

    handlers = {K3Error: _on_error, Exception: _on_error, HTTPException: _on_http_error}
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=closing
    )


async def _on_error(_: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}"
    known = {404: f"there is nothing at {what}", 405: f"{what} is not what this path answers"}
    refusal = ApiError(error.status_code, known.get(error.status_code, error.detail))
    response = refusal.response()
    response.headers.update(error.headers or {})
    return response
