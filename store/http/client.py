"""HTTP client: a `Store` whose verbs are requests, retried until the server responds.

Owns: one connection pool per event loop, closed with its loop or by `close`. Invariant: after a
temporary failure (a lost connection, a restarting server or proxy) a call is retried with the same
ids and the same idempotency key, so it is executed only once; after `patience` seconds of failures
it raises Unavailable. Several event loops and threads may use one object.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Self, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from msgspec.structs import asdict, replace

from agentrl.errors import Forbidden, Invalid, StoreError, Unavailable
from agentrl.store import limits, rows
from agentrl.store.base import Store
from agentrl.store.http import wire
from agentrl.store.http.backend import VARIABLE
from agentrl.store.http.connections import CONNECT_TIMEOUT, Connections, NotHttp
from agentrl.store.http.wire import ENCODE, MSGPACK, VERBS, Verb
from agentrl.types import StepCommit

PATIENCE = 60.0  # seconds for which a call is retried
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds before a retry; doubles up to the maximum
LONGEST_SILENCE = wire.POLL + 30.0  # seconds without a byte: then the connection counts as lost
TRANSIENT = frozenset({502, 503, 504})
REFUSAL = wire.decoders(wire.Refusal)
ANSWERS = wire.decoders(wire.BatchResponse)[MSGPACK]
NOT_JSON = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
CHECKS: dict[str, Callable[[Any], None]] = {
    "commit_step": limits.check_commit,
    "enqueue": limits.check_rollout,
    "add_transitions": limits.check_transition,
    "finish": limits.check_outcome,
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
            raise StoreError("The store's key has a character that no key has.")
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
        here = asyncio.get_running_loop()
        with self._lock:
            pools, self._pools = self._pools, {}
        for loop, (_, pool) in pools.items():
            if loop is here:
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
            raise StoreError(f"{self.url} left out answers: is it a store's server?")
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
            left = max(0.0, end - time.monotonic())
            return _encoded(verb, replace(arguments, timeout=left)) if timeout else first

        key = uuid.uuid4().hex if verb.once else ""
        return self._read(verb.results[MSGPACK], await self._request(verb.name, body, key))

    async def _request(self, name: str, body: Callable[[], bytes], key: str = "") -> bytes:
        """Send a request, with retries, and return the body of the response."""
        headers = self._headers | {"idempotency-key": key} if key else self._headers
        pause, deadline, why = FIRST_PAUSE, 0.0, ""
        while True:
            try:
                pool = await self._pool()
                sent = pool.post(self._head(name, headers), body(), LONGEST_SILENCE)
                status, kind, answer, _ = await sent
            except OSError as error:
                why = f"Store {self.url} cannot be reached: {str(error) or 'no answer'}."
            except NotHttp as error:
                raise StoreError(f"{self.url} is no store server: {error}.") from error
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
            pause = min(2 * pause, LONGEST_PAUSE)

    def _head(self, name: str, headers: dict[str, str]) -> bytes:
        usual = headers is self._headers
        if usual and (known := self._heads.get(name)):
            return known
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
                f"{self.url} answered what no verb does ({error}): is it a store's server, and of"
                " this version?"
            ) from error

    def _refused(self, status: int, form: str, body: bytes) -> StoreError:
        try:
            return wire.error_from(REFUSAL[form](body).error)
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
            words = body[:200].decode("utf-8", "replace").strip()
            return StoreError(f"{self.url} answered {status} {words!r}: is it a store's server?")

    async def _pool(self) -> Connections:
        loop = asyncio.get_running_loop()
        found = self._pools.get(loop)
        if found is None:
            closing = _closed_with_loop(Connections(self.url))
            pool = await anext(closing)
            with self._lock:
                for other in [other for other in self._pools if other.is_closed()]:
                    del self._pools[other]
                if not self._closed:
                    self._pools[loop] = found = pool, closing
        if found is None or self._closed:
            raise StoreError(f"Store {self.url} is closed.")
        return found[0]


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
    """Validate and encode arguments. Raises Invalid, naming the record, for unstorable ones."""
    field = next(iter(verb.arguments.__struct_fields__), "")
    given = getattr(arguments, field, None)
    if check := CHECKS.get(verb.name):
        for record in [given] if isinstance(given, StepCommit) else given or []:
            check(record)
    try:
        if clean := CLEAN.get(verb.name):
            arguments = replace(arguments, **{field: [clean(record) for record in given or []]})
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
    return f"What {verb.name} was given"


def _parse(url: str) -> tuple[str, str, float]:
    """Return the URL without its key, the key, and the patience. Raises StoreError without the
    key."""
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
        key or os.environ.get(VARIABLE, "").strip(),
        patience,
    )


USAGE = "http://[KEY@]host[:port][?patience=SECONDS]"
