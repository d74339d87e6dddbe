"""An answer on its way to the client: as a stream of events, or as a whole.

Owns the waiting. Whoever leaves, in the queue or later, leaves the queue too.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import Answer, Delta
from .asks import Ask
from .errors import api_error
from .queue import GenerationQueue, Job, News, Reading, Waiting
from .shapes import ChatShape, CompletionShape

log = logging.getLogger(__name__)

# A proxy takes a stream without news for dead.
PING_SECONDS = 15.0

Shape = ChatShape | CompletionShape


class Listener:
    """Puts an answer in the queue, and hears of it.

    Raises:
        ApiError: the queue is full.
    """

    def __init__(self, ask: Ask, answer: Answer, queue: GenerationQueue):
        loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News | None] = asyncio.Queue()
        self._queue = queue

        def tell(news: News | None) -> None:
            loop.call_soon_threadsafe(self._news.put_nowait, news)

        self.job = Job(ask, answer, tell)
        queue.add(self.job)
        self.job.future.add_done_callback(lambda _: tell(None))

    async def news(self) -> AsyncIterator[News | None]:
        """All there is to hear until the answer is over; None where there was nothing for long."""
        while True:
            try:
                async with asyncio.timeout(PING_SECONDS):
                    news = await self._news.get()
            except TimeoutError:
                yield None
                continue
            if news is None:
                return
            yield news

    async def deltas(self) -> list[Delta]:
        """The whole answer.

        Raises:
            Exception: what ended it early.
        """
        deltas = [news async for news in self.news() if isinstance(news, Delta)]
        self.job.future.result()
        return deltas

    def leave(self) -> None:
        """Stop listening; the answer is not made then, or not further."""
        self._queue.leave(self.job)


async def whole(request: Request, listener: Listener, shape: Shape) -> Response:
    """The answer as one JSON object, unless the client leaves before."""
    job = listener.job
    answering = asyncio.create_task(listener.deltas())
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=499)  # nobody reads it, but the log
        deltas = answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
        listener.leave()
    body = shape.whole(deltas, job.answer.counts, job.ask.top_logprobs is not None)
    return JSONResponse(body, headers=_headers(job))


class EventStream(StreamingResponse):
    """The answer as server-sent events. The queue and the prompt are told of in comments."""

    def __init__(self, listener: Listener, shape: Shape, include_usage: bool):
        events = _events(listener, shape, include_usage)
        headers = {**_headers(listener.job), "Cache-Control": "no-cache"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._listener.leave()


async def _events(listener: Listener, shape: Shape, include_usage: bool) -> AsyncIterator[str]:
    begun = False
    async for news in listener.news():
        if not isinstance(news, Delta):
            yield _comment(news)
            continue
        if not begun:
            begun = True
            for chunk in shape.begin():
                yield _event(chunk)
        if news != Delta():
            yield _event(shape.chunk(news))
    if error := listener.job.future.exception():
        known = api_error(error)
        if known is not error:
            log.error("an answer failed", exc_info=error)
        yield _event(known.body())
        return
    if include_usage:
        yield _event(shape.usage_chunk(listener.job.answer.counts))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _comment(news: News | None) -> str:
    if isinstance(news, Waiting):
        return f": waiting, {news.ahead} ahead\n\n"
    if isinstance(news, Reading):
        return f": reading the prompt, {news.done} of {news.total} tokens\n\n"
    return ": still there\n\n"


def _headers(job: Job) -> dict[str, str]:
    return {"X-Queue-Position": str(job.ahead)}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
