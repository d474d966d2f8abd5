"""Sessions of a deployed agent: `agentrl gateway serve`, a proxy that groups an agent's calls into
sessions and records them, and users' feedback.

A session is an evaluation rollout with the step `SESSION`: it is never trained on, a prune may
remove it after its end, and `agentrl data` mines and labels it.

Owns: the sessions in progress. Invariant: every call is answered by an endpoint of [upstreams], and
calls of recorded sessions are stored before the response, like those of a rollout; a session has a
lease while this process lives, and the next process ends the sessions of a killed one. One process
serves a run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from agentrl.core.access import Access, read_key
from agentrl.core.config import RunConfig
from agentrl.core.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    NotFound,
    StoreError,
    Unavailable,
)
from agentrl.core.http import read_body, request_key
from agentrl.core.types import (
    SESSION,
    Attempt,
    Json,
    NewRollout,
    Outcome,
    Purpose,
    Transition,
)
from agentrl.runners.feedback import RENEWAL_INTERVAL, Feedback, give_feedback, session_group
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.templates import RoleRules
from agentrl.runners.gateway.upstream import Upstream
from agentrl.store import open_store, run_folder
from agentrl.store.base import Store
from agentrl.store.records import without_tokens

log = logging.getLogger("agentrl.runner")
SESSION_LEASE = 60.0  # seconds
SESSION_HEADER = "x-session-id"  # request header: the id of the session
NAME = "x-agentrl-session"  # response header: the session of the request, if any
NAMED = web.RequestKey(NAME, str)
IMAGE = re.compile("image:[0-9a-f]{64}")  # name of a stored image
# Fields of a call with redacted texts.
TEXTS = ("messages", "tools", "answer", "processors", "ignored")
REDACTED = "[redacted]"
IDLE = 1800.0  # seconds without a call after which a session ends: a person may have paused
CALL_TIMEOUT = 600.0  # seconds of one call, as in OpenAI's clients
MESSAGES = web.RequestKey("agentrl_messages", str)  # digest of a request's messages
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
BESIDE = ("/count_tokens", ":countTokens", "/embeddings", "/traces", "/logs", "/metrics")
Exchange = tuple[str, str]  # digest of the messages of a request, and its answer
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, eq=False)
class OpenSession:
    name: str
    active: ActiveAttempt
    used: float  # when its last call began, or ended, by time.monotonic
    exchanges: list[Exchange] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)  # numbers of calls that got no answer


class Sessions(Feature):
    """The feature of the gateway that it starts; `keep` runs concurrently."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store, self._run, self._settings = store, config.name, config.sessions
        self._patterns = [re.compile(pattern) for pattern in self._settings.redact]
        keys = read_key(self._settings.key_env, "sessions.key_env", "the callers'")
        self._access = Access(tuple(keys.split()))
        self._open: dict[str, OpenSession] = {}  # session name -> session
        self._exchanges: dict[Exchange, OpenSession] = {}
        self._claiming = asyncio.Lock()  # so that the claimed rollout is the one just enqueued
        self._claim_id = uuid.uuid4().hex
        self.gateway = self._make_gateway(config)
        # The attempt has no key: `_attribute` checks the callers' keys.
        self.gateway.attempts.open = True

    def _make_gateway(self, config: RunConfig) -> Gateway:
        roles = config.roles or {"agent": next(iter(config.upstreams))}
        return Gateway(
            self._store, self._run, host=config.runner.host, port=config.runner.port, roles=roles,
            upstreams=config.upstreams, remote=True, access=self._access,
            features=[RoleRules(config.role_rules), self],
        )  # fmt: skip

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        app.middlewares.append(self._attribute)
        app.on_response_prepare.append(_name_session)

    @web.middleware
    async def _attribute(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Find or begin the session of a request, or answer a request that is not a model call."""
        session: OpenSession | None = None
        if not self._access.allows(request_key(request.headers)):
            return refusal(401, "the API key is none of those in sessions.key_env")
        try:
            if request.method == "POST":
                if (answer := self._answers().get(request.path)) is not None:
                    return await answer(request)
                session = await self._find(request)
        except (StoreError, *UNREADABLE) as error:
            kinds = ((Unavailable, 503), (NotFound, 404), (Forbidden, 403))
            status = next((code for kind, code in kinds if isinstance(error, kind)), 400)
            return refusal(status, str(error))
        try:
            return await handler(request)
        finally:
            if session is not None:
                session.used = time.monotonic()
                await self._after_call(request, session)

    def _answers(self) -> dict[str, Handler]:
        """The handlers of its own paths."""
        return {"/v1/feedback": self._take_feedback}

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        feedback = self._redacted(msgspec.json.decode(await read_body(request), type=Feedback))
        group = await self._group_of(feedback.session)
        rollout = await give_feedback(self._store, self._run, feedback, group)
        return web.json_response({"rollout": rollout})

    def _redacted(self, feedback: Feedback) -> Feedback:
        """Redact feedback for storing; the session's name is not stored."""
        texts = {n: getattr(feedback, n) for n in ("name", "note", "correction")}
        return replace(feedback, **redact(texts, self._patterns))

    async def _group_of(self, name: str) -> str:
        """The group of a session's last rollouts."""
        return session_group(self._run, name)

    async def _after_call(self, request: web.Request, session: OpenSession) -> None:
        """Called when a call of a session has been answered."""

    async def keep(self) -> None:
        """Renew leases, end idle sessions and those of a killed process, until cancelled."""
        while True:
            try:
                await self._sweep()
            except StoreError as error:
                log.warning("sessions: %s; tried again", error)
            await asyncio.sleep(RENEWAL_INTERVAL)

    async def end(self, idle: float = 0.0) -> None:
        """End the sessions without a call for `idle` seconds, after storing what their streams
        have sent so far."""
        before = time.monotonic() - idle
        over = [session for session in self._open.values() if session.used <= before]
        await self._end([session for session in over if not (idle and session.active.tasks)])

    async def _end(self, over: Sequence[OpenSession]) -> None:
        # Another request may have ended the session meanwhile, and a new session may have its name.
        over = [session for session in over if self._open.get(session.name) is session]
        for session in over:
            self._forget(session)
        cut = [self.gateway.unregister(session.active) for session in over]
        await asyncio.gather(*map(asyncio.wrap_future, cut))
        await self._finish([session.active.attempt for session in over if session.active.recorded])

    async def _sweep(self) -> None:
        await self.end(self._settings.idle or IDLE)
        held = [session for session in self._open.values() if session.active.recorded]
        live = await self._store.heartbeat(
            [session.active.id for session in held], lease=SESSION_LEASE
        )
        for session in held:
            if session.active.id not in live and self._open.get(session.name) is session:
                # This process was suspended; the next call begins a new session.
                self._forget(session)
        async with self._claiming:
            while lost := await self._claim():
                await self._finish(lost)

    async def _find(self, request: web.Request) -> OpenSession:
        try:
            body = msgspec.json.decode(await read_body(request), type=dict[str, Any])
        except UNREADABLE:  # the handler rejects the call
            body = {}
        request[MESSAGES], continued = place(body, self._exchanges)
        named = request.headers.get(SESSION_HEADER, "")
        continued = None if named else self._continued(body, continued, request)
        name = named or (continued.name if continued else uuid.uuid4().hex)
        name = "" if request.path.endswith(BESIDE) else name
        session = self._open.get(name)
        if session is not None:
            self._check_owner(name, session.active.attempt.rollout, request)
        if session is not None and self._is_full(session):
            await self._end([session])
            session = None
        # Completed even if the caller disconnects, so that an enqueued session is claimed.
        if session is None:
            session = await asyncio.shield(self._begin(name, request))
        session.used = time.monotonic()
        session.active.extend(CALL_TIMEOUT)
        request.match_info["attempt"], request[NAMED] = session.active.id, name
        return session

    def _continued(
        self, body: Mapping[str, Any], matched: OpenSession | None, request: web.Request
    ) -> OpenSession | None:
        """The session that a request without a name continues. matched: the session that has its
        earlier messages."""
        if _previous(body):
            matched = None
        if ids := _references(body):
            sessions = self._open.values()
            matched = next(
                (session for session in sessions if session.active.memory.has_any(ids)),
                matched,
            )
        return matched

    def _check_owner(self, name: str, rollout: NewRollout, request: web.Request) -> None:
        """Raise Forbidden if the session of this name is not the caller's."""

    def _is_full(self, session: OpenSession) -> bool:
        """Whether the next call of its name begins another session."""
        return False

    async def _begin(self, name: str, request: web.Request) -> OpenSession:
        """Begin a session; store it if it has a name."""
        async with self._claiming:
            if name in self._open:
                return self._open[name]
            recorded = bool(name) and self._may_record(request)
            rollout = await self._request(name, request)
            attempt = Attempt(id=uuid.uuid4().hex, rollout=rollout, fence=0, lease_until=math.inf)
            if recorded:
                attempt = await self._take(rollout)
            return self._add(name, attempt, recorded=recorded)

    def _may_record(self, request: web.Request) -> bool:
        return True

    async def _request(self, name: str, request: web.Request) -> NewRollout:
        """The rollout that stands for a new session."""
        group = session_group(self._run, name)
        return NewRollout(
            id=f"{group}/{uuid.uuid4().hex[:12]}", run=self._run, group=group, index=0, task={},
            purpose=Purpose.EVAL, step=SESSION, priority=1, timeout=CALL_TIMEOUT,
        )  # fmt: skip

    async def _take(self, rollout: NewRollout) -> Attempt:
        """Store a session and claim it."""
        await self._store.enqueue([rollout])
        claimed = await self._claim()
        if not claimed:  # a late claim with this id got it, and it has ended
            self._claim_id = uuid.uuid4().hex
            claimed = await self._claim()
        while claimed and claimed[0].rollout.id != rollout.id:
            await self._finish(claimed)  # sessions of a killed process
            claimed = await self._claim()
        if not claimed:
            raise Conflict(f"Another process serves run {self._run!r}: end it.")
        # If this process is killed, the next claim then keeps the recorded calls.
        (attempt,) = claimed
        await self._store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, ran=True)])
        return attempt

    def _add(self, name: str, attempt: Attempt, *, recorded: bool = True) -> OpenSession:
        active = self.gateway.attempts.register(attempt, recorded=recorded)
        self._open[name] = session = OpenSession(name, active, time.monotonic())
        active.records.append(partial(self._record, session))
        return session

    async def _claim(self) -> list[Attempt]:
        """Claim one session, of this process or of a killed one. Each session has a separate runner
        name, because the store returns only a few of several lost rollouts to one runner. The id
        stays the same until a claim returns one, as in `Worker._claim`, so that the next claim
        returns the result of a late request."""
        runner, claim = f"gateway {uuid.uuid4().hex}", self._claim_id
        attempts = await self._store.claim(
            1, runner=runner, lease=SESSION_LEASE, run=self._run, claim_id=claim
        )
        if attempts:
            self._claim_id = uuid.uuid4().hex
        return attempts

    def _record(self, session: OpenSession, call: ReceivedCall, row: Transition) -> Transition:
        """Return the row with redactions; a redacted call loses its tokens."""
        self._remember(session, (call.http[MESSAGES], said(row.answer)))
        texts: dict[str, Any] = {name: getattr(row, name) for name in TEXTS}
        redacted = redact(texts, self._patterns)
        return row if redacted == texts else replace(without_tokens(row), **redacted)

    def _remember(self, session: OpenSession, exchange: Exchange) -> None:
        self._exchanges[exchange] = session
        session.exchanges.append(exchange)

    def _forget(self, session: OpenSession) -> None:
        del self._open[session.name]
        self.gateway.attempts.unregister(session.active.id)
        for exchange in session.exchanges:
            # Another session may have the same messages meanwhile.
            if self._exchanges.get(exchange) is session:
                del self._exchanges[exchange]

    async def _finish(self, attempts: Sequence[Attempt]) -> None:
        await self._store.finish(
            [Outcome(attempt=attempt.id, fence=attempt.fence) for attempt in attempts]
        )


async def serve(config: RunConfig, *, started: Callable[[str], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set; calls `started` with the base URL."""
    async with open_store(config.store) as store:
        state = await store.run(config.name)
        if state is not None and state.step:
            raise ConfigError(f"name = {config.name!r}: a run of that name was trained; rename it")
        await run_folder.check_free(config, fix_hint="choose another name")
        await store.open_run(config.name, msgspec.to_builtins(config))
        sessions = Sessions(store, config)
        gateway = sessions.gateway
        await asyncio.to_thread(gateway.start)
        keeping = asyncio.wrap_future(gateway.spawn(sessions.keep()))
        stopping = asyncio.create_task(stop.wait())
        try:
            started(gateway.base_url)
            await asyncio.wait((keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()  # the task ends only by an error
        finally:
            stopping.cancel()
            keeping.cancel()
            await asyncio.wrap_future(gateway.spawn(sessions.end()))
            await asyncio.to_thread(gateway.close)


async def _name_session(request: web.Request, response: web.StreamResponse) -> None:
    if name := request.get(NAMED):
        response.headers[NAME] = name


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def place(
    body: Mapping[str, Any], sessions: Mapping[Exchange, OpenSession] = MappingProxyType({})
) -> tuple[str, OpenSession | None]:
    """Return the digest of a request's messages, and the session of the latest answer among them
    that one of `sessions` has."""
    read: Json = next((body[key] for key in ("messages", "input", "contents") if key in body), [])
    head = [body.get(key) for key in ("system", "systemInstruction", "instructions", "prompt")]
    state, session = blake2b(msgspec.json.encode(head), digest_size=16), None
    for message in read if isinstance(read, list) else [read]:
        if isinstance(message, dict) and message.get("role") in ("assistant", "model"):
            session = sessions.get((state.hexdigest(), said(message)), session)
        state.update(msgspec.json.encode(message))
    return state.hexdigest(), session


def _previous(body: Mapping[str, Any]) -> str:
    """Return the id of the response that a request continues, which has all before it."""
    thread = body.get("thread")
    held = thread.get("previous_message_id") if isinstance(thread, dict) else None
    id = body.get("previous_response_id") or held
    return id if isinstance(id, str) else ""


def _references(body: Mapping[str, Any]) -> list[str]:
    """Return the ids of earlier responses, or of their items, in a request."""
    given_input = body.get("input")
    items = given_input if isinstance(given_input, list) else []
    ids = [_previous(body), *(i.get("id") for i in items if isinstance(i, dict))]
    return [id for id in ids if id and isinstance(id, str)]


def said(message: Json) -> str:
    """Return the text of a message of any API."""
    content = (message or {}).get("content", (message or {}).get("parts"))
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def redact(value: Json, patterns: Sequence[re.Pattern[str]]) -> Json:
    if isinstance(value, str) and not IMAGE.fullmatch(value):  # digests contain no text of users
        for pattern in patterns:
            value = pattern.sub(REDACTED, value)
    elif isinstance(value, dict):
        return {key: redact(item, patterns) for key, item in value.items()}
    elif isinstance(value, list):
        return [redact(item, patterns) for item in value]
    return value
