"""Who may ask, from where, and how much at once.

Owns the key, the origins of web pages, and the size of a body: what is checked before a request is
read. Knows nothing of what is asked.
"""

import hmac
import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import Metrics

log = logging.getLogger(__name__)

# Of no use to a stranger, and asked for by those who only keep the server running.
_OPEN_PATHS = {"/health"}


class Guard:
    """ASGI middleware that lets through what may pass.

    Args:
        app: what comes next.
        key: what a request must bring; None lets everyone in.
        origins: of web pages that may ask; ``*`` for all. Programs send none and may.
        max_body_bytes: None for any size.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        origins: Sequence[str],
        max_body_bytes: int | None,
    ):
        self._app, self._max = app, max_body_bytes
        self._key = None if key is None else key.encode()
        self._origins = set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (refusal := self._refusal(scope["path"], Headers(scope=scope))) is not None:
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        origin = headers.get("origin")
        if origin is not None and not self._origins & {"*", origin}:
            # Else any page that is open in a browser here could have the model work for it.
            message = f"pages of {origin} may not ask; start the server with --origin {origin}"
            return ApiError(403, message, code="origin_not_allowed")
        if self._key is not None and path not in _OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), self._key)
            if scheme.lower() != "bearer" or not right:
                message = "the API key is missing or wrong: Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key")
        length = headers.get("content-length", "")
        if self._max is not None and length.isdecimal() and int(length) > self._max:
            return self._too_large()
        return None

    def _counted(self, receive: Receive) -> Receive:
        """``receive`` with an end for a body that does not say how long it is."""
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if self._max is not None and received > self._max:
                raise self._too_large()
            return message

        return counting

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self._max:,} bytes (--max-body)"
        return ApiError(413, message, code="body_too_large")


class Log:
    """ASGI middleware: a line and a count for each request. Nothing that was said is logged."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begin = 500, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})["remark"] = str
        try:
            await self._app(scope, receive, noting)
        finally:
            # Paths that do not exist are not counted one by one: there is no end to them.
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            client = scope["client"][0] if scope.get("client") else "-"
            took = time.perf_counter() - begin
            remark = scope["state"]["remark"]()
            method, shown = scope["method"], repr(scope["path"])[1:-1]
            log.info("%s %s %s %d %.2f s%s", client, method, shown, status, took, remark)
