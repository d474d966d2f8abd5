"""The gateway half of a live run: answers an unmodified agent and records its sessions.

Owns: the open sessions, each with the version that answers it. Invariant: a recorded session is a
training rollout, alone in its group; it is answered by a version of the run's lanes, and stays with
it until that version is retired. A session that continues after its end is another one: its group
has the suffix -2, then -3.

A session is stored completely, so the next process continues the sessions of a killed one. It finds
the session to which a request belongs, and if the answer to a call may not have been delivered, it
sends the same answer again. Stored calls are translated for the policy and redacted, while requests
have the format of the agent's API, so sessions are found by what both share. Invariant: the texts
of system, user and assistant messages are equal in both, apart from white space.

The process serves with the listening socket of its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from agentrl.core.access import read_key
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import policy_by_role
from agentrl.core.errors import Forbidden, NotFound, StoreError
from agentrl.core.http import read_body
from agentrl.core.processes import die_with_parent, log_phase, log_to_stderr
from agentrl.core.types import (
    INSTRUCTION_ROLES,
    POLICY,
    SESSION,
    Attempt,
    Json,
    NewRollout,
    Outcome,
    Purpose,
    Record,
    Reward,
    Rollout,
    RolloutState,
    StepReward,
    Transition,
)
from agentrl.live import handover, records, signals
from agentrl.live.records import (
    FAILED,
    GATEWAY,
    RESULT_ENDED,
    Documents,
    Lanes,
    chosen,
    count_of,
    delete,
    failed_calls,
    group_base,
    group_of,
    policy_of,
    served,
)
from agentrl.live.signals import ANSWERS, Message, text_of
from agentrl.runners.feedback import Feedback, session_group
from agentrl.runners.gateway.attribution import ReceivedCall
from agentrl.runners.gateway.recorded import question, question_of
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.upstream import Upstream
from agentrl.runners.main import run_features
from agentrl.runners.sessions import (
    CALL_TIMEOUT,
    REDACTED,
    SESSION_HEADER,
    SESSION_LEASE,
    Exchange,
    Handler,
    OpenSession,
    Sessions,
    redact,
    refusal,
    said,
)
from agentrl.store import open_store
from agentrl.store.base import Store, keep_reading

END = "x-agentrl-end"  # request header of a session's last call
OPT_OUT = "x-agentrl-opt-out"  # request header by which nothing of a session is kept
SESSION_TOKEN = web.RequestKey(records.TOKEN, str)  # the token of the request's session
MAX_SESSION_CALLS = 200  # a longer session continues as another one, so that it is trained
MAX_FEEDBACK = 1000  # rewards of a session; further feedback is refused
LANES_POLL_INTERVAL = 0.2  # seconds
# Seconds. A client that disconnects earlier did not wait for the call's retries, so the call does
# not count as failed.
MIN_CLIENT_WAIT = 10.0


class SessionName(Record, frozen=True):
    """The body of a request that ends a session."""

    session: str


class LiveSessions(Sessions):
    """The feature of the gateway that serves a live run; `keep` and `follow` run concurrently."""

    def __init__(
        self, store: Store, config: RunConfig, socket: socket.socket | None = None
    ) -> None:
        self._config, self._socket = config, socket
        self._people = config.live.people
        self._lanes: Lanes | None = None
        self._documents = Documents(store, config.name)
        self._lanes_known = asyncio.Event()  # set once there are lanes
        self._secret = b""  # set with the first lanes, as it is kept with the run
        self._resumed: dict[Exchange, OpenSession] = {}  # sessions of a killed process
        self._opted_out: set[str] = set()  # open sessions whose user has opted out
        self._to_delete: set[str] = set()  # names of sessions
        read_key(self._people.secret_env, "live.people.secret_env", "the run's")
        super().__init__(store, config)

    def _make_gateway(self, config: RunConfig) -> Gateway:
        return Gateway(
            self._store, config.name, host=config.runner.host, port=config.runner.port,
            upstreams=config.upstreams, roles=policy_by_role(config),
            key=config.engine.access.key, models=[config.policy.model],
            features=[*run_features(self._store, config, config.role_rules), self],
            access=self._access, socket=self._socket,
        )  # fmt: skip

    def _answers(self) -> dict[str, Handler]:
        return super()._answers() | {"/v1/sessions/end": self._end_named}

    # -- lanes -------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Follow the run's lanes, until cancelled."""
        missed = f"the lanes of run {self._run} cannot be read"
        await keep_reading(self._store, self._read, missed, pause=LANES_POLL_INTERVAL)

    async def _read(self) -> None:
        lanes = (await self._documents.state()).lanes
        if lanes is not None and not self._secret:
            self._secret = await records.secret_of(self._store, self._config)
        self._follow(lanes)

    def _follow(self, lanes: Lanes | None) -> None:
        if lanes is None or lanes == self._lanes:
            return
        self._lanes = lanes
        self._lanes_known.set()
        for session in self._open.values():
            self._update_seat(session)
        self.gateway.router.refresh_routes()

    def _update_seat(self, session: OpenSession) -> None:
        """Move a session whose version is no longer served to the serving version. Its waiting
        calls move, too, because the router reads this mapping again."""
        assert self._lanes is not None
        seats = session.active.seats
        assert isinstance(seats, dict)
        if seats[POLICY] not in [policy_of(version) for version in served(self._lanes)]:
            seats[POLICY] = policy_of(self._lanes.serving)

    # -- people ------------------------------------------------------------------------------------

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        super().add_to(app, upstream)
        app.on_response_prepare.append(_send_token)

    async def _find(self, request: web.Request) -> OpenSession:
        await self._lanes_known.wait()  # tokens and hashes of users need the secret
        session = await super()._find(request)
        opts_out = bool(session.name) and not self._may_record(request)
        if opts_out and session.name not in self._opted_out:
            session = await self._opt_out(session, request)
        if session.active.recorded and self._people.token:
            request[SESSION_TOKEN] = records.token_of(self._secret, session.name)
        return session

    def _check_owner(self, name: str, rollout: NewRollout | Rollout, request: web.Request) -> None:
        """Raises Forbidden for the session of another user, whose name may have been guessed. A
        session that began without a user belongs to anyone who knows its name."""
        if rollout.task.get("user", "") not in ("", self._user(request)):
            raise Forbidden(
                f"session {name!r:.80} belongs to another user: give yours another name"
            )

    def _may_record(self, request: web.Request) -> bool:
        return OPT_OUT not in request.headers

    async def _opt_out(self, session: OpenSession, request: web.Request) -> OpenSession:
        """Continue without a record, and delete everything stored under the session's name."""
        self._to_delete.add(session.name)
        if session.active.recorded:
            await self._end([session])
            session = await super()._find(request)
        self._opted_out.add(session.name)
        await self._delete()
        return session

    async def _delete(self) -> None:
        """Delete the sessions that have opted out. A failed deletion is retried at a later call."""
        for name in [*self._to_delete]:
            try:
                if await delete(self._store, self._run, name):
                    self._to_delete.discard(name)
            except StoreError as error:
                log.warning("a session that opted out is not deleted yet: %s; will retry", error)

    def _user(self, request: web.Request) -> str:
        return records.user_id(self._secret, request.headers.get(self._people.user_header, ""))

    def _continued(
        self, body: Mapping[str, Any], known: OpenSession | None, request: web.Request
    ) -> OpenSession | None:
        """Return the open session that a request continues, but never one of another user, even
        with the same messages: the answer would carry that session's token."""
        session = super()._continued(body, known, request)
        if session is None and self._resumed:
            exchanges = reversed(exchanges_of(body, self._patterns))
            session = next((self._resumed[x] for x in exchanges if x in self._resumed), None)
            session = session if session in self._open.values() else None
        same = session is None or session.active.attempt.rollout.task.get("user") == self._user(
            request
        )
        return session if same else None

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        """Store the feedback of a client that has the session's token, even after the session has
        ended."""
        await self._lanes_known.wait()
        feedback = msgspec.json.decode(await read_body(request), type=Feedback)
        token, name = request.headers.get(records.TOKEN, ""), feedback.session
        if self._people.token and not token:
            return refusal(
                401, f"feedback needs {records.TOKEN}, a header of its session's answers"
            )
        if self._people.token and not records.is_token(self._secret, name, token):
            return refusal(403, f"the {records.TOKEN} is not that of session {name!r:.80}")
        if why := signals.invalid_reason(feedback):
            return refusal(400, why)
        rows = await self._store.rollouts(self._run, group=await self._group_of(name), limit=1)
        if rows and len(rows[0].rewards) >= MAX_FEEDBACK:
            return refusal(429, f"session {name!r:.80} has {MAX_FEEDBACK} rewards, the maximum")
        if not rows:
            status = 410 if self._people.token else 404
            return refusal(status, f"session {name!r:.80} is deleted, or was never recorded")
        return await super()._take_feedback(request)

    # -- sessions ----------------------------------------------------------------------------------

    async def _begin(self, name: str, request: web.Request) -> OpenSession:
        taken_over = self._open.get(session_group(self._run, name))
        if taken_over is not None and name:  # it was opened before its name was known
            self._check_owner(name, taken_over.active.attempt.rollout, request)
            del self._open[taken_over.name]
            taken_over.name = name
            self._open[name] = taken_over
            return taken_over
        await self._lanes_known.wait()
        try:
            session = await super()._begin(name, request)
        except Forbidden:
            raise
        except StoreError as error:  # users get answers even if the store fails
            log.warning("a session is answered but not recorded: %s", error)
            rollout = self._rollout(name, session_group(self._run, name), request)
            attempt = Attempt(id=uuid.uuid4().hex, rollout=rollout, fence=0, lease_until=math.inf)
            session = self._add(name, attempt, recorded=False)
        session.active.lenient = True
        return session

    async def _request(self, name: str, request: web.Request) -> NewRollout:
        number = await count_of(self._store, self._run, name)
        last = group_of(self._run, name, number)
        for row in await self._store.rollouts(self._run, group=last, limit=1) if number else ():
            self._check_owner(name, row, request)
        return self._rollout(name, group_of(self._run, name, number + 1), request)

    def _rollout(self, name: str, group: str, request: web.Request) -> NewRollout:
        assert self._lanes is not None
        lanes, version = self._lanes, chosen(self._lanes, group)
        task: dict[str, Json] = {
            "lane": "serving" if version == lanes.serving else "candidate",
            "version": version,
            "candidate": lanes.candidate,
            "share": lanes.share,
            "user": self._user(request),
            "began": round(time.time(), 3),
        }
        if not request.headers.get(SESSION_HEADER):
            task["session"] = name  # generated here, so it is no secret of a client
        return NewRollout(
            id=f"{group}/0", run=self._run, group=group, index=0, task=task, step=SESSION,
            purpose=Purpose.TRAIN, sampling=self._config.sampling, priority=1,
            timeout=CALL_TIMEOUT, seats={POLICY: policy_of(version)},
        )  # fmt: skip

    async def _group_of(self, name: str) -> str:
        return group_of(self._run, name, await count_of(self._store, self._run, name))

    def _is_full(self, session: OpenSession) -> bool:
        """Whether the session ends here and continues as another one: a session that never ends
        would never be trained. False while calls are in flight, because they would be cut off."""
        active = session.active
        return active.recorded and active.calls >= MAX_SESSION_CALLS and not active.tasks

    async def _after_call(self, request: web.Request, session: OpenSession) -> None:
        await self._count_failed(session)
        if END in request.headers:
            await self._end([session])

    async def _count_failed(self, session: OpenSession) -> None:
        """Store how many calls failed, for the guard. If the client disconnected, the call counts
        only if the client had waited for MIN_CLIENT_WAIT."""
        active = session.active
        left = {number for number, waited in active.abandoned.items() if waited < MIN_CLIENT_WAIT}
        done = {number for numbers in active.ended.values() for number in numbers}
        failed = session.failed | (active.failures.keys() & done - left)
        if len(failed) == len(session.failed) or not active.recorded:
            return
        session.failed = failed
        row = Reward(name=FAILED, value=float(len(failed)), source=GATEWAY)
        try:
            about = active.attempt.rollout.id
            await self._store.add_rewards([StepReward(rollout=about, reward=row)])
        except StoreError as error:
            log.warning("the number of failed calls was not stored: %s", error)

    def _forget(self, session: OpenSession) -> None:
        self._opted_out.discard(session.name)
        super()._forget(session)

    async def _sweep(self) -> None:
        await super()._sweep()
        await self._delete()

    async def _end_named(self, request: web.Request) -> web.StreamResponse:
        name = msgspec.json.decode(await read_body(request), type=SessionName).session
        await self._lanes_known.wait()  # hashes of users need the secret
        session = self._open.get(name) or self._open.get(session_group(self._run, name))
        rollouts: Sequence[NewRollout | Rollout]
        if session is not None:
            rollouts = [session.active.attempt.rollout]
        else:
            group = session_group(self._run, name)
            rollouts = await self._store.rollouts(self._run, group=group, limit=1)
        if not rollouts:
            raise NotFound(f"run {self._run!r} has no session {name!r}")
        token = request.headers.get(records.TOKEN, "")
        if not records.is_token(self._secret, name, token):  # without it, the user must match
            self._check_owner(name, rollouts[0], request)
        if session is not None:
            await self._end([session])
        return web.json_response({"session": name})

    async def _finish(self, attempts: Sequence[Attempt]) -> None:
        ended = {RESULT_ENDED: time.time()}
        await self._store.finish(
            [Outcome(attempt=attempt.id, fence=attempt.fence, result=ended) for attempt in attempts]
        )

    # -- sessions of a killed process --------------------------------------------------------------

    async def take_over(self) -> None:
        """Continue the open sessions of a killed process. `keep` ends sessions with an expired
        lease."""
        rows = await self._store.rollouts(self._run, step=SESSION, state=RolloutState.RUNNING)
        held = {row.attempt: row for row in rows if row.attempt and row.purpose is Purpose.TRAIN}
        if not held:
            return
        live = await self._store.heartbeat(list(held), lease=SESSION_LEASE)
        calls = await self._store.calls([held[attempt].id for attempt in live])
        for attempt in live:
            row = held[attempt]
            self._resume(row, attempt, calls.get(row.id, []))

    def _resume(self, row: Rollout, attempt: str, calls: Sequence[Transition]) -> None:
        rollout = NewRollout(
            id=row.id, run=row.run, group=row.group, index=row.index, task=row.task, step=row.step,
            sampling=self._config.sampling, timeout=CALL_TIMEOUT, seats=dict(row.seats),
        )  # fmt: skip
        name = row.task.get("session") or group_base(row.run, row.group)
        session = self._add(
            name, Attempt(id=attempt, rollout=rollout, fence=row.attempts, lease_until=0.0)
        )
        active = session.active
        active.lenient = True
        active.stored = 1 + max((call.index for call in calls), default=-1)
        active.calls = len(calls)
        session.failed = set(range(-failed_calls(row), 0))
        for call in calls:
            _, conversation = active.memory.recall(list(call.messages), joined=False)
            active.memory.remember(call.answer or {}, conversation)
            self._resumed[exchange_of(call)] = session
        active.answers.append(partial(answer_again, undelivered_of(calls)))


async def _send_token(request: web.Request, response: web.StreamResponse) -> None:
    if token := request.get(SESSION_TOKEN):
        response.headers[records.TOKEN] = token


log = logging.getLogger("agentrl.runner")
ORPHANED = 120.0  # seconds for which a gateway continues without a supervisor


def main(config: RunConfig) -> None:
    """Serve with the socket that this process has inherited, until SIGTERM."""
    log_to_stderr()
    asyncio.run(_until_signal(config, handover.inherited()))


async def _until_signal(config: RunConfig, listener: socket.socket) -> None:
    stop, orphaned, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def lose_supervisor() -> None:
        orphaned.set()
        loop.call_later(ORPHANED, stop.set)

    loop.add_signal_handler(signal.SIGHUP, lose_supervisor)
    die_with_parent(signal.SIGHUP)
    await serve(config, listener, stop=stop, orphaned=orphaned)


async def serve(
    config: RunConfig, listener: socket.socket, *, stop: asyncio.Event, orphaned: threading.Event
) -> None:
    """Serve until `stop` is set. Sessions stay open for the next process."""
    loop = asyncio.get_running_loop()
    async with open_store(config.store) as store:
        sessions = LiveSessions(store, config, listener)
        await sessions.take_over()
        gateway = sessions.gateway
        await asyncio.to_thread(gateway.start)
        request_stop = partial(loop.call_soon_threadsafe, stop.set)
        handover.offer(Path(config.output), listener, orphaned, request_stop)
        log_phase(log, f"serving at {gateway.base_url}")
        working = [gateway.spawn(work()) for work in (sessions.keep, sessions.follow)]
        waiting: list[asyncio.Future[Any]] = [asyncio.wrap_future(work) for work in working]
        waiting.append(asyncio.ensure_future(stop.wait()))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.to_thread(gateway.close)


SYSTEM = ("system", "instructions", "systemInstruction", "system_instruction")  # of a request
MESSAGES = ("messages", "input", "contents")
SPEAKING_ROLES = (*ANSWERS, "user", None)  # roles; Gemini's users need none
RESULTS = ("tool_result", "functionResponse")  # parts of user messages with tool results


Undelivered = dict[bytes, list[Sequence[Transition]]]  # question -> its answers, oldest first


def exchange_of(call: Transition) -> Exchange:
    """The hash of the conversation up to a call's answer, and the answer's text."""
    *_, last = _exchanges([], [*call.messages, {**(call.answer or {}), "role": "assistant"}])
    return last


def exchanges_of(body: Mapping[str, Any], patterns: Sequence[re.Pattern[str]]) -> list[Exchange]:
    """The exchange of each assistant message in a request, redacted like stored calls."""
    redacted = redact({name: body[name] for name in (*SYSTEM, *MESSAGES) if name in body}, patterns)
    heads = [_message("system", redacted[name]) for name in SYSTEM if name in redacted]
    entries: Json = next((redacted[name] for name in MESSAGES if name in redacted), [])
    messages = entries if isinstance(entries, list) else [_message("user", entries)]
    return [*_exchanges(heads, [message for message in messages if isinstance(message, dict)])]


def _message(role: str, content: Json) -> Message:
    about = content if isinstance(content, dict) else {"content": content}
    return {**about, "role": role}


def _exchanges(heads: Sequence[Message], messages: Sequence[Message]) -> Iterator[Exchange]:
    instructions = [m for m in messages if m.get("role") in INSTRUCTION_ROLES]
    state = blake2b(
        "".join(map(_without_whitespace, [*heads, *instructions])).encode(errors="replace")
    )
    for message in messages:
        if message.get("role") not in SPEAKING_ROLES:
            continue
        text = _without_whitespace(message)
        if message.get("role") in ANSWERS:
            yield state.hexdigest(), text
        state.update(f"\n{text}".encode(errors="replace") if text else b"")


def _without_whitespace(message: Message) -> str:
    for name in ("content", "parts"):
        if isinstance(parts := message.get(name), list):
            message = {**message, name: [part for part in parts if not _is_result(part)]}
    return "".join(text_of(message).split())


def _is_result(part: Json) -> bool:
    return isinstance(part, dict) and (part.get("type") in RESULTS or RESULTS[1] in part)


def undelivered_of(calls: Sequence[Transition]) -> Undelivered:
    """The answers that a killed process may not have delivered: no later call of the session
    contains them."""
    undelivered: Undelivered = {}
    for _, rows in groupby(calls, key=lambda call: call.started):
        choices = list(rows)
        first = choices[0]
        key = question(first.role, first.messages, first.tools, None)
        redacted = REDACTED.encode() in msgspec.json.encode(first.answer)
        if not (redacted or any(continues(call, first) for call in calls)):
            undelivered.setdefault(key, []).append(choices)
    return undelivered


def continues(call: Transition, earlier: Transition) -> bool:
    """Whether a call continues from the answer of an earlier one."""
    at = len(earlier.messages)
    then = call.messages[at] if len(call.messages) > at else {}
    return then.get("role") == "assistant" and said(then) == said(earlier.answer)


async def answer_again(undelivered: Undelivered, call: ReceivedCall) -> Sequence[Transition]:
    """Return the stored answer of a call that a killed process has answered already; each answer is
    returned only once."""
    answers = undelivered.get(question_of(call.request, call.role), [])
    return answers.pop(0) if answers else ()
