"""The HTTP client: a `Store` whose verbs are requests, retried until the server responds.

Owns: one connection pool per event loop, closed with its loop or by `close`. Invariant: after a
temporary failure (a lost connection, a restarting server or proxy) a call is retried with the same
ids and the same idempotency key, so it is executed only once; after `patience` seconds of failures
it raises Unavailable. Several event loops and threads may use one object.

A pool owns the idle connections of its event loop; a request is one write, its response mostly one
read. Invariant: a connection has one request at a time; it is not reused after a cancelled request
or a connection error. llhttp reads the responses, as at the server. (aiohttp would take more time
per call than the server: with it, eight processes wrote half as many calls.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import ssl
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Self, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import httptools
import msgspec
from msgspec.structs import asdict, replace

from agentrl.core.errors import Forbidden, Invalid, StoreError, Unavailable
from agentrl.core.types import StepCommit
from agentrl.store import rows
from agentrl.store.base import Store
from agentrl.store.http import wire
from agentrl.store.http.wire import ENCODE, MSGPACK, VERBS, Verb
from agentrl.store.urls import KEY_VARIABLE

PATIENCE = 60.0  # seconds for which a call is retried
FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0  # seconds before a retry; doubles up to the maximum
MAX_SILENCE = wire.POLL + 30.0  # seconds without a byte: then the connection counts as lost
TRANSIENT = frozenset({502, 503, 504})
REFUSAL = wire.decoders(wire.Refusal)
ANSWERS = wire.decoders(wire.BatchResponse)[MSGPACK]
NOT_JSON = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
CHECKS: dict[str, Callable[[Any], None]] = {
    "commit_step": rows.check_commit,
    "enqueue": rows.check_rollout,
    "add_transitions": rows.check_transition,
    "finish": rows.check_outcome,
}
CLEAN: dict[str, Callable[[Any], Any]] = {
    "finish": rows.clean_outcome,
    "add_spans": rows.clean_span,
}
Arguments = msgspec.Struct


def connect(url: str, *, readonly: bool = False) -> Store:
    """Create a client for `http(s)://[KEY@]host[:port][?patience=SECONDS]`, by default with the key
    in AGENTRL_STORE_KEY. Sends no request yet."""
    return cast(Store, HttpStore(url, readonly=readonly))  # its verbs are added from wire.VERBS


def call(name: str, *args: Any, **kwargs: Any) -> tuple[Verb, Arguments]:
    """Build a call for `HttpStore.batch`."""
    return VERBS[name], VERBS[name].arguments(*args, **kwargs)


class HttpStore:
    """See `agentrl.store.base.Store` for the verbs."""

    def __init__(self, url: str, *, readonly: bool = False) -> None:
        self.url, key, self._patience = _parse(url)
        self._readonly = readonly
        self._headers = {"content-type": MSGPACK, wire.CLAIM_SECRET: secrets.token_hex(16)}
        if not key.isprintable():
            raise StoreError("The store's key has an unprintable character.")
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._heads = dict[str, bytes]()  # verb -> request head with the default headers
        self._lock = threading.Lock()
        self._closed = False
        _, _, address = self.url.partition("://")
        self._host, slash, path = address.partition("/")
        self._path = slash + path
        self._pools: dict[
            asyncio.AbstractEventLoop, tuple[Connections, AsyncGenerator[Any, None]]
        ] = {}

    async def close(self) -> None:
        self._closed = True
        running_loop = asyncio.get_running_loop()
        with self._lock:
            pools, self._pools = self._pools, {}
        for loop, (_, pool) in pools.items():
            if loop is running_loop:
                await pool.aclose()
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(_close(pool), loop)
                with contextlib.suppress(TimeoutError):  # a blocked loop keeps its pool
                    await asyncio.wait_for(asyncio.wrap_future(closing), CONNECT_TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def batch(self, calls: Sequence[tuple[Verb, Arguments]]) -> list[Any]:
        """Send several calls, made by `call`, in one request; return the result or StoreError of
        each. Each call is atomic, the batch is not; calls must not wait."""
        results: list[Any] = [None] * len(calls)
        sent: dict[int, wire.BatchCall] = {}  # by index in `calls`
        for place, (verb, arguments) in enumerate(calls):
            try:
                self._check_readonly(verb)
                encoded = msgspec.Raw(_encoded(verb, _with_claim_id(verb, arguments)))
            except StoreError as error:
                results[place] = error
            else:
                key = uuid.uuid4().hex if verb.once else None
                sent[place] = wire.BatchCall(verb=verb.name, arguments=encoded, key=key)
        if not sent:
            return results
        body = ENCODE[MSGPACK](wire.BatchRequest(calls=list(sent.values())))
        answers = self._read(ANSWERS, await self._request("batch", lambda: body)).results
        if len(answers) != len(sent):
            raise StoreError(f"{self.url} sent too few responses: is it a store server?")
        for place, answer in zip(sent, answers, strict=True):
            results[place] = (
                wire.error_from(answer.error)
                if answer.error
                else self._read(calls[place][0].results[MSGPACK], answer.result or b"")
            )
        return results

    def _check_readonly(self, verb: Verb) -> None:
        if self._readonly and verb.name not in wire.READERS:
            raise Forbidden(f"Store {self.url} was opened for reading only: open it for writing.")

    async def _call(self, verb: Verb, arguments: Arguments) -> Any:
        self._check_readonly(verb)
        arguments = _with_claim_id(verb, arguments)
        timeout = getattr(arguments, "timeout", None) or 0.0
        first, end = _encoded(verb, arguments), time.monotonic() + timeout

        def body() -> bytes:
            """Encode the call with the remaining timeout."""
            remaining = max(0.0, end - time.monotonic())
            return _encoded(verb, replace(arguments, timeout=remaining)) if timeout else first

        key = uuid.uuid4().hex if verb.once else ""
        return self._read(verb.results[MSGPACK], await self._request(verb.name, body, key))

    async def _request(self, name: str, body: Callable[[], bytes], key: str = "") -> bytes:
        """Send a request, with retries, and return the body of the response."""
        headers = self._headers | {"idempotency-key": key} if key else self._headers
        pause, deadline, why = FIRST_PAUSE, 0.0, ""
        while True:
            try:
                pool = await self._pool()
                sent = pool.post(self._head(name, headers), body(), MAX_SILENCE)
                status, kind, answer, _ = await sent
            except OSError as error:
                why = f"Store {self.url} cannot be reached: {str(error) or 'no answer'}."
            except NotHttp as error:
                raise StoreError(f"{self.url} is not a store server: {error}.") from error
            else:
                if status == 200:
                    return answer
                if status == 202:  # not done yet: poll again
                    pause, deadline = FIRST_PAUSE, 0.0
                    continue
                refused = self._refused(status, kind, answer)
                if status not in TRANSIENT:
                    raise refused
                why = str(refused)
            now = time.monotonic()
            deadline = deadline or now + self._patience
            if now >= deadline:
                raise Unavailable(why)
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause = min(2 * pause, MAX_PAUSE)

    def _head(self, name: str, headers: dict[str, str]) -> bytes:
        usual = headers is self._headers
        if usual and (cached := self._heads.get(name)):
            return cached
        lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        head = f"POST {self._path}/v1/{name} HTTP/1.1\r\nhost: {self._host}\r\n{lines}".encode()
        if usual:
            self._heads[name] = head
        return head

    def _read(self, decode: wire.Decode, answer: Any) -> Any:
        try:
            return decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{self.url} sent an unexpected response ({error}): is it a store server of"
                " this version?"
            ) from error

    def _refused(self, status: int, form: str, body: bytes) -> StoreError:
        try:
            return wire.error_from(REFUSAL[form](body).error)
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
            words = body[:200].decode("utf-8", "replace").strip()
            return StoreError(f"{self.url} answered {status} {words!r}: is it a store server?")

    async def _pool(self) -> Connections:
        loop = asyncio.get_running_loop()
        entry = self._pools.get(loop)
        if entry is None:
            closing = _closed_with_loop(Connections(self.url))
            pool = await anext(closing)
            with self._lock:
                for old_loop in [old_loop for old_loop in self._pools if old_loop.is_closed()]:
                    del self._pools[old_loop]
                if not self._closed:
                    self._pools[loop] = entry = pool, closing
        if entry is None or self._closed:
            raise StoreError(f"Store {self.url} is closed.")
        return entry[0]


def _method(verb: Verb) -> Callable[..., Awaitable[Any]]:
    """Make the client's method of a verb, whose parameters are the fields of its arguments."""

    async def method(self: HttpStore, *args: Any, **kwargs: Any) -> Any:
        return await self._call(verb, verb.arguments(*args, **kwargs))

    method.__name__, method.__doc__ = verb.name, verb.doc
    return method


for _verb in VERBS.values():
    setattr(HttpStore, _verb.name, _method(_verb))


async def _closed_with_loop(pool: Connections) -> AsyncGenerator[Connections, None]:
    """Yield the pool in an async generator, which its event loop closes at shutdown."""
    try:
        yield pool
    finally:
        pool.close()
        await asyncio.sleep(0)  # lets the transports close


async def _close(pool: AsyncGenerator[Any, None]) -> None:
    await pool.aclose()


def _with_claim_id(verb: Verb, arguments: Arguments) -> Arguments:
    """Add an id to a claim: a retry after a lost response must return the same attempts."""
    if verb.name == "claim" and getattr(arguments, "claim_id", None) is None:
        return replace(arguments, claim_id=uuid.uuid4().hex)
    return arguments


def _encoded(verb: Verb, arguments: Arguments) -> bytes:
    """Validate and encode arguments. Raises Invalid with the name of a record that cannot be
    stored."""
    field = next(iter(verb.arguments.__struct_fields__), "")
    value = getattr(arguments, field, None)
    if check := CHECKS.get(verb.name):
        for record in [value] if isinstance(value, StepCommit) else value or []:
            check(record)
    try:
        if clean := CLEAN.get(verb.name):
            arguments = replace(arguments, **{field: [clean(record) for record in value or []]})
        return ENCODE[MSGPACK](arguments)
    except NOT_JSON as error:
        where = _culprit(verb, arguments)
        raise Invalid(f"{where} cannot be stored, for it is not JSON: {error}.") from error


def _culprit(verb: Verb, arguments: Arguments) -> str:
    for value in asdict(arguments).values():
        for item in value if isinstance(value, list | tuple) else ():
            try:
                ENCODE[MSGPACK](item)
            except NOT_JSON:
                name = getattr(item, "id", None) or getattr(item, "attempt", "")
                return f"{type(item).__name__} {name}".strip()
    return f"An argument of {verb.name}"


def _parse(url: str) -> tuple[str, str, float]:
    """Return the URL without its key, the key, and the patience. Errors do not contain the key."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.username and parts.password:
            raise StoreError(
                f"The store's URL has a user and a password, not one key: use {USAGE}."
            )
        key = unquote(parts.username or parts.password or "") or options.pop("key", "")
        patience = float(options.pop("patience", PATIENCE))
    except ValueError:  # its message may contain a part of the key
        raise StoreError(f"The store's URL cannot be read: use {USAGE}.") from None
    if not host or options or parts.fragment or not 0 <= patience < float("inf"):
        raise StoreError(f"The store's URL is not of the form {USAGE}.")
    shown = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    return (
        f"{parts.scheme}://{shown}{parts.path.rstrip('/')}",
        key or os.environ.get(KEY_VARIABLE, "").strip(),
        patience,
    )


USAGE = "http://[KEY@]host[:port][?patience=SECONDS]"


CONNECT_TIMEOUT = 5.0  # seconds to establish a connection
MAX_IDLE = 60.0  # seconds for which an idle connection is kept, less than at the server
SIZED = frozenset({b"content-length", b"transfer-encoding"})  # headers that give a body's length


class NotHttp(Exception):
    """The response is not HTTP."""


class HttpAnswer(NamedTuple):
    status: int
    kind: str  # content type, without its parameters
    body: bytes
    last: bool  # whether the connection cannot be used after it


class Connections:
    """Connections to one server, for one event loop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._idle: list[_Connection] = []

    async def post(self, head: bytes, body: bytes, silence: float) -> HttpAnswer:
        """Send a request and return its response. Raises OSError (including TimeoutError) if there
        is no server, the connection is lost, or `silence` seconds pass without a byte; NotHttp for
        a response that cannot be read."""
        connection = self._unused() or await self._opened()
        try:
            answer = await connection.post(head, body, silence)  # a future: one coroutine less
        except BaseException:
            connection.abort()
            raise
        if answer.last:
            connection.abort()
        else:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _unused(self) -> _Connection | None:
        """Return the most recently used idle connection, if any; close expired ones."""
        now = asyncio.get_running_loop().time()
        while self._idle and (self._idle[0].lost or now - self._idle[0].used > MAX_IDLE):
            self._idle.pop(0).abort()
        while self._idle:
            if not (connection := self._idle.pop()).lost:
                return connection
        return None

    async def _opened(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        return connection


class _Connection(asyncio.Protocol):
    """`used`: the event loop's time at the last request or response. Its `on_` methods are called
    by the parser."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[HttpAnswer] | None = None
        self._clock: asyncio.TimerHandle | None = (
            None  # kept between requests, because starting one is costly
        )
        self.lost, self.used = False, self._loop.time()
        self.on_message_begin()

    def post(self, head: bytes, body: bytes, silence: float) -> asyncio.Future[HttpAnswer]:
        assert self._transport is not None
        waiting: asyncio.Future[HttpAnswer] = self._loop.create_future()
        self._waiting, self.used = waiting, self._loop.time()
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        if self._clock is None:
            self._clock = self._loop.call_later(silence, self._look, silence)
        return waiting

    def abort(self) -> None:
        self.lost = True
        if self._clock is not None:
            self._clock.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._ends_at_close:
            self.on_message_complete()
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self.used = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(NotHttp(str(error)))

    def on_message_begin(self) -> None:
        self._kind, self._body = "", list[bytes]()
        self._sized = self._ends_at_close = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._sized |= name in SIZED
        if name == b"content-type":
            self._kind = value.decode("latin-1").partition(";")[0].strip().lower()

    def on_headers_complete(self) -> None:
        self._ends_at_close = not self._sized

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._ends_at_close = False
        status = self._parser.get_status_code()
        if status < 200:  # another follows
            return
        waiting, self._waiting = self._waiting, None
        if waiting is None:  # no call waits for it
            self.abort()
        elif not waiting.done():
            last = self.lost or not self._parser.should_keep_alive()
            waiting.set_result(HttpAnswer(status, self._kind, b"".join(self._body), last))

    def _look(self, silence: float) -> None:
        """Fail the request after `silence` seconds without a byte."""
        remaining = self.used + silence - self._loop.time()
        if self._waiting is None:
            self._clock = None
        elif remaining > 0:
            self._clock = self._loop.call_later(remaining, self._look, silence)
        else:
            self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        self.abort()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
