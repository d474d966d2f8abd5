"""HTTP clients of the agent's process say whose call it is: httpx, httpx2, requests, aiohttp.

Whatever is sent inside an attempt carries its W3C `traceparent` and `baggage`, in any client that
is installed, made before or after `install`. OpenTelemetry's instrumentations of these clients do
the same for 70 µs to 120 µs of CPU a call against 20 µs here, do not reach aiohttp sessions that
exist already, and would slow the gateway's own client, which runs in the same process.
Outside of attempts nothing happens; a header that the agent has set itself is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agentrl.runners.tracing import attempt_log, roles
from agentrl.runners.tracing.attempt_log import AttemptLog, HttpCall


@cache
def install() -> None:
    """Teach the clients that are installed, once for the life of the process."""
    for module in ("httpx", "httpx2"):
        if find_spec(module):
            library = import_module(module)
            _wrap(library.Client, "send", _sync)
            _wrap(library.AsyncClient, "send", _async)
    if find_spec("requests"):
        _wrap(import_module("requests").Session, "send", _sync)
    if find_spec("aiohttp"):
        _wrap(import_module("aiohttp").ClientSession, "_request", _aiohttp)


def _wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Any]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def _sync(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def traced(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        log = attempt_log.current()
        if log is None:
            return send(self, request, *args, **kwargs)
        attributes = {"url.full": _without_query(request.url)}
        with log.call(request.method, attributes) as call:
            add_headers(request.headers, log, call)
            response = send(self, request, *args, **kwargs)
            attributes["http.response.status_code"] = response.status_code
            return response

    return traced


def _async(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    async def traced(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        log = attempt_log.current()
        if log is None:
            return await send(self, request, *args, **kwargs)
        attributes = {"url.full": _without_query(request.url)}
        with log.call(request.method, attributes) as call:
            add_headers(request.headers, log, call)
            response = await send(self, request, *args, **kwargs)
            attributes["http.response.status_code"] = response.status_code
            return response

    return traced


def _aiohttp(request: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(request)
    async def traced(self: Any, method: str, url: Any, *, headers: Any = None, **rest: Any) -> Any:
        log = attempt_log.current()
        if log is None:
            return await request(self, method, url, headers=headers, **rest)
        from multidict import CIMultiDict

        carrier: MutableMapping[str, str] = CIMultiDict(headers or ())
        attributes = {"url.full": _without_query(url)}
        with log.call(method, attributes) as call:
            add_headers(carrier, log, call)
            response = await request(self, method, url, headers=carrier, **rest)
            attributes["http.response.status_code"] = response.status
            return response

    return traced


def add_headers(headers: MutableMapping[str, str], log: AttemptLog, call: HttpCall) -> None:
    """Name attempt, span and role in the headers of a request."""
    if "traceparent" not in headers:
        headers["traceparent"] = f"00-{log.attempt}-{call.id}-01"
    items = [*filter(None, [headers.get("baggage")]), *roles.baggage_items(log, call)]
    if items:
        headers["baggage"] = ",".join(items)


def _without_query(url: Any) -> str:
    """The address without its query, which may hold a secret."""
    return str(url).partition("?")[0]
