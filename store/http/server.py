"""The server of a store: an ASGI application for any backend.

Owns: the calls with an idempotency key in progress, and the long polls. Invariant: a call is
completed even if its caller disconnects, except a long poll, which is cancelled and can be
repeated. A call with an idempotency key is executed once: a repeat waits for the one in progress
here, or gets its stored reply (`store/sql/runs.py`) from any process of the server. `prune` and
`vacuum` have many transactions and no stored reply: a later repeat does and reports only the
remaining work.

Bodies of requests are read with limits on their size, their time and their memory. The body of POST
/v1/traces has spans of any OpenTelemetry SDK. A trace is an attempt: the trace id of a span is its
attempt's id. Spans of unknown attempts and invalid spans are rejected individually, as OTLP's
partial success; the others are stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.core import otlp
from agentrl.core.access import cross_site
from agentrl.core.errors import Forbidden, Invalid, NotFound, StoreError, Unavailable
from agentrl.core.types import Span
from agentrl.core.values import json_values, msgpack_values
from agentrl.store.base import Store
from agentrl.store.http import wire
from agentrl.store.http.keys import Claims, KeyFile, KeyGrant, Keys, with_secret
from agentrl.store.http.wire import ENCODE, JSON, VERBS, KeyScope, Verb
from agentrl.store.sql.runs import CURRENT, IdempotentCall

log = logging.getLogger("agentrl.store")
CLAIM_SECRET = wire.CLAIM_SECRET.encode()
MAX_BODY_BYTES = 64 * 2**20  # bytes of a request
AGAIN = object()  # result of a call that takes longer than one request may: poll again
VERB_OF = {f"/v1/{name}": verb for name, verb in VERBS.items()}
BATCHES = wire.decoders(wire.BatchRequest)
REASONS = {400: "malformed", 401: "unauthorized", 405: "method_not_allowed"}

REASONS |= {413: "too_large", 415: "unsupported"}

MORE_HEADERS = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}  # headers by status


class Answer(NamedTuple):
    """The response to a call."""

    status: int
    form: str  # content type
    body: bytes

    def lines(self) -> list[tuple[bytes, bytes]]:
        """Return the headers."""
        lines = [(b"content-type", self.form.encode()), (b"content-length", b"%d" % len(self.body))]
        more = MORE_HEADERS.get(self.status, {})
        return lines + [(name.encode(), value.encode()) for name, value in more.items()]


class StoreApp:
    """POST /v1/<verb>, /v1/batch and /v1/traces; GET /healthz and /openapi.json."""

    CALLS = frozenset({*VERB_OF, "/v1/batch"})

    def __init__(
        self, store: Store, keys: Keys | KeyFile, *, largest: int = MAX_BODY_BYTES
    ) -> None:
        self.store, self._keys, self._largest = store, keys, largest
        self._bodies, self._claims = BodyReader(largest), Claims(store)
        self._draining = False
        self._waits: set[asyncio.Task[Any]] = set()
        self._running: dict[IdempotentCall, asyncio.Task[Any]] = {}
        self._pages = Starlette(
            routes=[
                Route("/healthz", self._health),
                Route("/openapi.json", self._document),
                Route(PATH, self._traces, methods=["POST"]),
                Route("/v1/{verb}", self._unknown, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _error_page, StoreError: _error_page},
        )
        self._schema = msgspec.json.encode(wire.document())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle verbs directly, without the cost of request and response objects."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.CALLS:
            await self._pages(scope, receive, send)
            return
        answer = await self._answer(scope["path"], dict(scope["headers"]), receive)
        if answer is not None:
            start = {"type": "http.response.start", "status": answer.status}
            await send({**start, "headers": answer.lines()})
            await send({"type": "http.response.body", "body": answer.body})

    def drain(self) -> None:
        """Refuse new calls and end long polls; calls in progress are finished."""
        self._draining = True
        for wait in self._waits:
            wait.cancel()

    # -- one request -------------------------------------------------------------------------------

    async def _answer(
        self, path: str, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Answer | None:
        """Execute one of `CALLS`; None if its caller has disconnected."""
        kind = headers.get(b"content-type", b"").decode("latin-1")
        if kind not in ENCODE:
            kind = kind.partition(";")[0].strip().lower()
        form = kind if kind in ENCODE else JSON
        try:
            caller = self._admit(headers)
            if form != kind:
                raise HTTPException(415, f"Content-Type must be {' or '.join(ENCODE)}.")
            body = await self._bodies.read(headers, receive)
            await check_values(body, json_values if form == JSON else msgpack_values)
            verb = VERB_OF.get(path)
            if verb is None:
                result: Any = await self._batch(body, form, caller)
            else:
                _check_scope(verb, caller)
                key = _idempotency_key(headers.get(b"idempotency-key"))
                result = await self._call(verb, body, form, key, caller, receive)
            status, out = (202, b"") if result is AGAIN else (200, _encoded(form, result))
        except (StoreError, HTTPException) as error:
            status, refused = _refusal(error)
            out = ENCODE[form](wire.Refusal(error=refused))
        except ConnectionAbortedError:
            return None
        return Answer(status, form, out)

    def _admit(self, headers: Mapping[bytes, bytes]) -> KeyGrant:
        if self._draining:
            raise Unavailable("The store's server is shutting down: repeat the call.")
        sent = headers.get(b"host", b""), headers.get(b"content-type", b"")
        if not self._keys and (refused := cross_site("POST", *sent)):
            status, why = refused
            raise Forbidden(f"{why.capitalize()}.") if status == 403 else HTTPException(status, why)
        caller = self._keys.caller(headers.get(b"authorization", b""), time.time())
        if caller is None:
            raise HTTPException(
                401,
                "The key is missing, unknown or expired: send it as `Authorization: Bearer KEY`.",
            )
        if caller.scope is not KeyScope.RUNNER:
            return caller
        return with_secret(caller, headers.get(CLAIM_SECRET, b""))

    async def _call(
        self,
        verb: Verb,
        body: bytes,
        form: str,
        key: str,
        caller: KeyGrant,
        receive: Receive | None,
    ) -> Any:
        """Execute one verb. Without `receive`, as in a batch, it must not wait."""
        arguments = _decoded(verb.decoders[form], body)
        values = {name: getattr(arguments, name) for name in verb.arguments.__struct_fields__}
        if caller.run:
            await self._claims.check_one_run(verb.name, values, caller.run)
        await self._claims.check(verb.name, values, caller)
        method = getattr(self.store, verb.name)
        try:
            if verb.waits and values["timeout"] != 0:
                return await self._wait(verb, method, values, receive)
            if verb.once and key:
                digest = hashlib.blake2b(body, digest_size=16).hexdigest()
                request = IdempotentCall(f"{verb.name} {key}", digest)
                return await self._once(request, partial(method, **values))
            result = await method(**values)
            if caller.run and verb.name == "runs":
                return [run for run in result if run == caller.run]
            return result
        except OverflowError as error:
            raise Invalid(f"{verb.name}: a number is out of range: {error}.") from error
        except (StoreError, HTTPException, ConnectionAbortedError):
            raise
        except Exception as error:  # a bug of the server fails the call, not the connection
            log.exception("%s failed", verb.name)
            raise StoreError(
                f"{verb.name} failed in the store's server ({type(error).__name__}: {error}): "
                "its log says where."
            ) from error

    async def _wait(
        self, verb: Verb, method: Any, values: dict[str, Any], receive: Receive | None
    ) -> Any:
        """Long poll. Cancellation loses nothing: a claim is repeated with its id, and the other
        waiting verbs can simply be repeated."""
        timeout = values["timeout"]
        if timeout is not None and timeout != timeout:
            raise Invalid(f"{verb.name}: timeout is not a number.")
        if receive is None:
            raise Invalid(f"{verb.name} cannot wait inside a batch: send it with timeout 0.")
        if verb.name == "claim" and values["claim_id"] is None:
            raise Invalid("claim cannot wait without a claim_id, with which you can repeat it.")
        values["timeout"] = None if timeout is None or timeout > wire.POLL else timeout
        work = asyncio.ensure_future(method(**values))
        gone = asyncio.ensure_future(receive())  # after the body, the next message is a disconnect
        self._waits.add(work)
        try:
            await asyncio.wait((work, gone), timeout=wire.POLL, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
            if not work.cancelled():
                return work.result()
            if gone.done():
                raise ConnectionAbortedError
            if self._draining:
                raise Unavailable("The store's server is shutting down: repeat the call.")
            return AGAIN
        finally:
            self._waits.discard(work)
            work.cancel()
            gone.cancel()

    async def _once(
        self, request: IdempotentCall, call: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Execute a call that may take longer than a request, or join it if it is in progress."""
        running = self._running.get(request)
        if running is None:
            running = self._running[request] = start_call(request, call())
            running.add_done_callback(lambda task: self._ended(request, task))
        await asyncio.wait((running,), timeout=wire.POLL)
        return running.result() if running.done() else AGAIN

    def _ended(self, request: IdempotentCall, task: asyncio.Task[Any]) -> None:
        """Drop a finished call, but not before a caller that polls for it has the result."""
        # So that a repeated request tries again.
        failed = task.cancelled() or task.exception() is not None
        asyncio.get_running_loop().call_later(
            0.0 if failed else wire.POLL, self._running.pop, request
        )

    async def _batch(self, body: bytes, form: str, caller: KeyGrant) -> wire.BatchResponse:
        """Execute a batch; refuse further calls once the results exceed the limit of a body."""
        results, size = [], 0
        for call in _decoded(BATCHES[form], body).calls:
            try:
                if size > self._largest:
                    raise HTTPException(
                        413,
                        f"The answers before are {size} bytes: send this call in another batch.",
                    )
                result = _encoded(form, await self._batch_call(call, form, caller))
                results.append(wire.BatchResult(result=msgspec.Raw(result)))
                size += len(result)
            except (StoreError, HTTPException) as error:
                results.append(wire.BatchResult(error=_refusal(error)[1]))
        return wire.BatchResponse(results=results)

    async def _batch_call(self, call: wire.BatchCall, form: str, caller: KeyGrant) -> Any:
        verb = VERBS.get(call.verb)
        if verb is None:
            raise Invalid(f"There is no verb {call.verb!r}: see /openapi.json.")
        _check_scope(verb, caller)
        key = _idempotency_key(None if call.key is None else call.key.encode())
        while True:  # wait for a slow call, such as a vacuum
            result = await self._call(verb, bytes(call.arguments), form, key, caller, None)
            if result is not AGAIN:
                return result

    # -- the other pages ---------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        """Respond 200 if the store can be read."""
        if self._draining:
            raise Unavailable("The store's server is shutting down.")
        await self.store.cursor()
        return Response(b'{"status":"ok"}', media_type=JSON)

    async def _document(self, _: Request) -> Response:
        return Response(self._schema, media_type=JSON)

    async def _traces(self, request: Request) -> Response:
        headers = dict(request.scope["headers"])
        caller = self._admit(headers)
        _check_scope(VERBS["add_spans"], caller)
        body = await self._bodies.read(headers, request.receive)
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        kind = headers.get(b"content-type", b"").decode("latin-1")
        if encoding != "identity":  # other requests are answered while the body is unpacked
            body = await asyncio.to_thread(decompress, body, encoding, self._largest)
        if kind.startswith(JSON):
            await check_values(body, json_values)
        answer, form = await receive_spans(
            self.store, body, kind, partial(self._claims.check_run, caller=caller)
        )
        return Response(answer, media_type=form)

    async def _unknown(self, _: Request) -> Response:
        raise HTTPException(404)


# -- parts -----------------------------------------------------------------------------------------


def _check_scope(verb: Verb, caller: KeyGrant) -> None:
    if caller.scope not in verb.scopes:
        raise Forbidden(f"{verb.name} needs a key of scope {' or '.join(verb.scopes)}.")


def _idempotency_key(header: bytes | None) -> str:
    """Validate an idempotency key; empty if there is none."""
    if header is None:
        return ""
    if not re.fullmatch(wire.KEY, key := header.decode("latin-1")):
        raise Invalid(f"An idempotency-key must match {wire.KEY}.")
    return key


def _decoded(decode: wire.Decode, body: bytes) -> Any:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise Invalid(f"{error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"The body cannot be read: {error}.") from error


def _encoded(form: str, result: Any) -> bytes:
    """Encode a result. Raises StoreError for a stored value that the encoding cannot represent."""
    try:
        return wire.encode(form, result)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise StoreError(f"The answer cannot be written as {form}: {error}.") from error


def _refusal(error: Exception) -> tuple[int, wire.Error]:
    """Return status and body of the response to a refused call."""
    if isinstance(error, HTTPException):
        code = REASONS.get(error.status_code, "unknown")
        return error.status_code, wire.Error(code=code, message=error.detail)
    code, status = next(wire.CODES[kind] for kind in type(error).__mro__ if kind in wire.CODES)
    return status, wire.Error(code=code, message=str(error))


async def _error_page(request: Request, error: Exception) -> Response:
    headers: dict[str, str] = getattr(error, "headers", None) or {}
    (status, refused), path = _refusal(error), request.url.path
    message = refused.message
    if status == 405:
        message = f"{request.method} is not for {path}: use {headers.get('Allow', 'GET')}."
    elif message == "Not Found":
        message = f"There is no {path}: see /openapi.json."
    body = msgspec.json.encode(wire.Refusal(error=replace(refused, message=message)))
    return Response(body, status, headers | MORE_HEADERS.get(status, {}), media_type=JSON)


def start_call(request: IdempotentCall, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Execute a verb of a store as this request."""
    context = copy_context()
    context.run(CURRENT.set, request)
    return asyncio.get_running_loop().create_task(call, context=context)


MAX_SILENCE = 30.0  # seconds without a byte after which a body is abandoned
MAX_UPLOAD_SECONDS = 120.0  # seconds for a complete body
# Texts, lists and objects of a body, which are decoded in about a second. Rows have fewer in the
# largest body; a body of fewer bytes cannot have more, so it is not counted.
MAX_VALUES = 10_000_000
MAX_BYTES_HELD = 128 * 2**20  # total bytes of all incomplete bodies


class BodyReader:
    """Reads the request bodies of one server."""

    def __init__(self, largest: int) -> None:
        self._largest, self._free = largest, max(MAX_BYTES_HELD, largest)

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read a complete body. Raises HTTPException as soon as it is known to be too large,
        Unavailable if the rest does not arrive or memory is short, ConnectionAbortedError if the
        client has closed the connection."""
        length = headers.get(b"content-length", b"0")
        self._check(int(length) if length.isdigit() else 0)
        body, more = await _part(receive)
        self._check(len(body))
        return await self._remaining(bytearray(body), receive) if more else body

    async def _remaining(self, body: bytearray, receive: Receive) -> bytes:
        held, more = self._hold(len(body)), True
        try:
            async with asyncio.timeout(MAX_UPLOAD_SECONDS):
                while more:
                    part, more = await _part(receive)
                    held += self._hold(len(part))
                    body += part
                    self._check(len(body))
        except TimeoutError:
            why = f"The body took over {MAX_UPLOAD_SECONDS:.0f} s: send less at a time."
            raise Unavailable(why) from None
        finally:
            self._free += held
        return bytes(body)

    def _hold(self, size: int) -> int:
        if size > self._free:
            raise Unavailable("Too many large bodies are being sent: repeat the call.")
        self._free -= size
        return size

    def _check(self, size: int) -> None:
        if size > self._largest:
            raise HTTPException(
                413, f"The body is larger than {self._largest} bytes: send less at a time."
            )


async def check_values(body: bytes, count: Callable[[bytes, int], int]) -> None:
    """Raise HTTPException for a body of more values than can be decoded while others wait."""
    if len(body) > MAX_VALUES and await asyncio.to_thread(count, body, MAX_VALUES) > MAX_VALUES:
        problem = f"The body has more than {MAX_VALUES:,} strings, lists and objects"
        raise HTTPException(413, f"{problem}: send fewer at a time.")


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Receive the next bytes; return them and whether there are more."""
    try:
        async with asyncio.timeout(MAX_SILENCE):
            message = await receive()
    except TimeoutError:
        raise Unavailable("The rest of the body did not come: repeat the call.") from None
    if message["type"] == "http.disconnect":
        raise ConnectionAbortedError
    return message.get("body", b""), message.get("more_body", False)


PATH = "/v1/traces"
GZIP = 31  # zlib's name for the gzip format with the largest window


def decompress(body: bytes, encoding: str, largest: int) -> bytes:
    """Decode a body. Raises HTTPException if it is larger than `largest` bytes or malformed."""
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise HTTPException(415, f"Content-Encoding must be gzip or identity, not {encoding!r}.")
    stream = zlib.decompressobj(GZIP)
    try:
        plain = stream.decompress(body, largest + 1)
    except zlib.error as error:
        raise HTTPException(400, f"The body is not gzip: {error}.") from error
    if len(plain) > largest:
        raise HTTPException(413, f"The body is larger than {largest} bytes when unpacked.")
    if not stream.eof:
        raise HTTPException(400, "The gzip body ends too early.")
    return plain


async def receive_spans(
    store: Store, body: bytes, content_type: str, check: Callable[[set[str]], Awaitable[None]]
) -> tuple[bytes, str]:
    """Add the spans; return the response body and its content type. `check` refuses attempts of
    other runs. Needs no claim secret, which an SDK inside an agent does not have: the attempt's id
    has 128 random bits."""

    async def add(spans: list[Span]) -> tuple[int, str]:
        await check({span.attempt for span in spans})
        try:
            await store.add_spans(spans)
        except NotFound:
            return await _by_attempt(store, spans)
        return 0, ""

    try:
        return await otlp.receive(body, content_type, add)
    except Invalid as error:
        raise HTTPException(400, str(error)) from error


async def _by_attempt(store: Store, spans: list[Span]) -> tuple[int, str]:
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.attempt].append(span)
    refused, why = 0, ""
    for mine in traces.values():
        try:
            await store.add_spans(mine)
        except NotFound as error:
            refused, why = refused + len(mine), str(error)
    return refused, why
