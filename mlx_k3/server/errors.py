"""Errors in the form that OpenAI's clients know, and which status goes with which.

Owns the JSON of an error. No traceback and no text of an unexpected exception is ever sent.
"""

from typing import Any

from starlette.responses import JSONResponse

from ..errors import K3Error

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(K3Error):
    """What a request is refused with.

    ``param`` is the place in the body, ``code`` what a program can act on.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON to send."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole response."""
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 429:
            headers["Retry-After"] = "5"
        return JSONResponse(self.body(), self.status, headers)


def api_error(error: BaseException) -> ApiError:
    """``error`` as a client may see it. What is not raised on purpose stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, K3Error):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed to answer; its log tells why", code="internal_error")
