"""A request that a policy server refuses, as OpenAI's API says it."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class RequestError(Exception):
    """A request that gets no completion: HTTP status and OpenAI's error object."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = ErrorDetail(message=message, type=kind, param=param, code=code)
        self.status, self.body = status, ErrorBody(error=error)
