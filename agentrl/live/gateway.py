"""The gateway half: answers an unmodified agent, and records its sessions for training.

Owns: the open sessions, each with the version that answers it. Always true: a recorded session is
a training rollout, alone in its group; it is answered by a version of the run's lanes, and stays
with it until that version is retired. All of a session is in the store, so the next process goes on
with the sessions of a killed one; it answers a call that was answered but perhaps not read again
with the same words. A session that goes on after its end is another one: its group has the suffix
-2, then -3.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from agentrl.base.access import read_key
from agentrl.base.http_server import read_body
from agentrl.config import RunConfig
from agentrl.config.policies import policy_by_role
from agentrl.errors import Forbidden, NotFound, StoreError
from agentrl.live.labels import signals
from agentrl.live.records import people
from agentrl.live.records.documents import Documents, Lanes, policy_of, served
from agentrl.live.records.marks import FAILED, GATEWAY, RESULT_ENDED, failed_calls
from agentrl.live.records.sessions import chosen, count_of, delete, group_base, group_of
from agentrl.live.resumed import answer_again, exchange_of, exchanges_of, unread_of
from agentrl.runners.features import run_features
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.upstream import Upstream
from agentrl.runners.sessions.feedback import Feedback, session_group
from agentrl.runners.sessions.recorder import (
    SESSION_LEASE,
    Exchange,
    Handler,
    OpenSession,
    Sessions,
    refusal,
)
from agentrl.store.base import Store
from agentrl.store.following import keep_reading
from agentrl.types import (
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

log = logging.getLogger("agentrl.runner")
END = "x-agentrl-end"  # request header of a session's last call
GIVEN = web.RequestKey(people.TOKEN, str)  # the token of the request's session
MOST_FEEDBACK = 1000  # rewards of a session, beyond which no feedback is taken
LOOK_PAUSE = 0.2  # seconds between two looks at the lanes
PATIENCE = 10.0  # seconds for which a client waits at least for a call that is tried again


class SessionName(Record, frozen=True):
    """The body of a request that ends a session."""

    session: str


class LiveSessions(Sessions):
    """The feature of the gateway that serves a live run; `keep` and `follow` run concurrently."""

    def __init__(
        self, store: Store, config: RunConfig, socket: socket.socket | None = None
    ) -> None:
        self._config, self._socket = config, socket
        self._people, self._most_calls = config.live.people, config.live.calls
        self._lanes: Lanes | None = None
        self._documents = Documents(store, config.name)
        self._seated = asyncio.Event()  # set once there are lanes
        self._secret = b""  # set with the first lanes, as it is kept with the run
        self._resumed: dict[Exchange, OpenSession] = {}  # of a killed process
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
        await keep_reading(self._store, self._read, missed, pause=LOOK_PAUSE)

    async def _read(self) -> None:
        lanes = (await self._documents.told()).lanes
        if lanes is not None and not self._secret:
            self._secret = await people.secret_of(self._store, self._config)
        self._follow(lanes)

    def _follow(self, lanes: Lanes | None) -> None:
        if lanes is None or lanes == self._lanes:
            return
        self._lanes = lanes
        self._seated.set()
        for session in self._open.values():
            self._reseat(session)
        self.gateway.router.look_again()

    def _reseat(self, session: OpenSession) -> None:
        """Let the serving version go on with a session whose own is no longer served, also with its
        calls that wait: the router reads the same mapping again."""
        assert self._lanes is not None
        seats = session.active.seats
        assert isinstance(seats, dict)
        if seats[POLICY] not in [policy_of(version) for version in served(self._lanes)]:
            seats[POLICY] = policy_of(self._lanes.serving)

    # -- people ------------------------------------------------------------------------------------

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        super().add_to(app, upstream)
        app.on_response_prepare.append(_give_token)

    async def _find(self, request: web.Request, key: str) -> OpenSession:
        await self._seated.wait()  # tokens and hashes of users need the secret
        session = await super()._find(request, key)
        opts_out = bool(session.name) and not self._may_record(request)
        if opts_out and session.name not in self._opted_out:
            session = await self._opt_out(session, request, key)
        if session.active.recorded and self._people.token:
            request[GIVEN] = people.token_of(self._secret, session.name)
        return session

    def _check_owner(self, name: str, rollout: NewRollout | Rollout, request: web.Request) -> None:
        """Raises Forbidden for the session of another user, whose name somebody may have guessed.
        One that began without a user belongs to whoever knows its name."""
        if rollout.task.get("user", "") not in ("", self._user(request)):
            raise Forbidden(
                f"session {name!r:.80} belongs to another user: give yours another name"
            )

    def _may_record(self, request: web.Request) -> bool:
        return self._people.opt_out not in request.headers

    async def _opt_out(self, session: OpenSession, request: web.Request, key: str) -> OpenSession:
        """Go on without a record, and delete all that there is of the session's name."""
        self._to_delete.add(session.name)
        if session.active.recorded:
            await self._end([session])
            session = await super()._find(request, key)
        self._opted_out.add(session.name)
        await self._delete()
        return session

    async def _delete(self) -> None:
        """Delete what has to be; what cannot be deleted now is deleted at one of the next calls."""
        for name in [*self._to_delete]:
            try:
                if await delete(self._store, self._run, name):
                    self._to_delete.discard(name)
            except StoreError as error:
                log.warning("a session that opted out is not deleted now: %s; tried again", error)

    def _user(self, request: web.Request) -> str:
        return people.user_id(self._secret, request.headers.get(self._people.user_header, ""))

    def _continued(
        self, body: Mapping[str, Any], known: OpenSession | None, request: web.Request
    ) -> OpenSession | None:
        """None for the session of another user who has said the same: its token would be given."""
        found = super()._continued(body, known, request)
        if found is None and self._resumed:
            said = reversed(exchanges_of(body, self._patterns))
            found = next((self._resumed[one] for one in said if one in self._resumed), None)
            found = found if found in self._open.values() else None
        same = found is None or found.active.attempt.rollout.task.get("user") == self._user(request)
        return found if same else None

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        """Store feedback of somebody who has the session's token. Its session may have gone."""
        await self._seated.wait()
        feedback = msgspec.json.decode(await read_body(request), type=Feedback)
        token, name = request.headers.get(people.TOKEN, ""), feedback.session
        if self._people.token and not token:
            return refusal(401, f"feedback needs {people.TOKEN}, a header of its session's answers")
        if self._people.token and not people.is_token(self._secret, name, token):
            return refusal(403, f"the {people.TOKEN} is not that of session {name!r:.80}")
        if why := signals.unfit(feedback):
            return refusal(400, why)
        rows = await self._store.rollouts(self._run, group=await self._group_of(name), limit=1)
        if rows and len(rows[0].rewards) >= MOST_FEEDBACK:
            return refusal(429, f"session {name!r:.80} has had enough feedback")
        if not rows:
            known = 410 if self._people.token else 404
            return refusal(known, f"session {name!r:.80} is deleted, or was never recorded")
        return await super()._take_feedback(request)

    # -- sessions ----------------------------------------------------------------------------------

    async def _begin(self, name: str, start: str, request: web.Request) -> OpenSession:
        taken_over = self._open.get(session_group(self._run, name))
        if taken_over is not None and name:  # its name was not known
            self._check_owner(name, taken_over.active.attempt.rollout, request)
            del self._open[taken_over.name]
            taken_over.name = name
            self._open[name] = taken_over
            return taken_over
        await self._seated.wait()
        try:
            session = await super()._begin(name, start, request)
        except Forbidden:
            raise
        except StoreError as error:  # users are answered all the same
            log.warning("a session is answered and not recorded: %s", error)
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
        if not request.headers.get(self._settings.header):
            task["session"] = name  # made here, so it is nobody's secret
        return NewRollout(
            id=f"{group}/0", run=self._run, group=group, index=0, task=task, step=SESSION,
            purpose=Purpose.TRAIN, sampling=self._config.sampling, priority=1,
            timeout=self._settings.timeout, seats={POLICY: policy_of(version)},
        )  # fmt: skip

    async def _group_of(self, name: str) -> str:
        return group_of(self._run, name, await count_of(self._store, self._run, name))

    def _is_full(self, session: OpenSession) -> bool:
        """A session that never ends would never be trained; its calls in flight are not cut."""
        active = session.active
        return active.recorded and active.calls >= self._most_calls and not active.tasks

    async def _after_call(self, request: web.Request, session: OpenSession) -> None:
        await self._count_failed(session)
        if END in request.headers:
            await self._end([session])

    async def _count_failed(self, session: OpenSession) -> None:
        """Write how many calls got no answer, for the guard. A client who leaves fails nothing,
        unless it had waited for long while the call failed."""
        active = session.active
        left = {number for number, waited in active.abandoned.items() if waited < PATIENCE}
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
            log.warning("a failed call is not counted: %s", error)

    def _forget(self, session: OpenSession) -> None:
        self._opted_out.discard(session.name)
        super()._forget(session)

    async def _sweep(self) -> None:
        await super()._sweep()
        await self._delete()

    async def _end_named(self, request: web.Request) -> web.StreamResponse:
        name = msgspec.json.decode(await read_body(request), type=SessionName).session
        await self._seated.wait()  # hashes of users need the secret
        session = self._open.get(name) or self._open.get(session_group(self._run, name))
        known: Sequence[NewRollout | Rollout]
        if session is not None:
            known = [session.active.attempt.rollout]
        else:
            group = session_group(self._run, name)
            known = await self._store.rollouts(self._run, group=group, limit=1)
        if not known:
            raise NotFound(f"run {self._run!r} has no session {name!r}")
        token = request.headers.get(people.TOKEN, "")
        if not people.is_token(self._secret, name, token):  # who has none names the user
            self._check_owner(name, known[0], request)
        if session is not None:
            await self._end([session])
        return web.json_response({"session": name})

    async def _finish(self, attempts: Sequence[Attempt]) -> None:
        ended = {RESULT_ENDED: time.time()}
        await self._store.finish(
            [Outcome(attempt=one.id, fence=one.fence, result=ended) for one in attempts]
        )

    # -- sessions of a killed process --------------------------------------------------------------

    async def take_over(self) -> None:
        """Go on with the open sessions of a killed process. Those whose lease has ended are ended
        by `keep`."""
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
            sampling=self._config.sampling, timeout=self._settings.timeout, seats=dict(row.seats),
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
        active.answers.append(partial(answer_again, unread_of(calls)))


async def _give_token(request: web.Request, response: web.StreamResponse) -> None:
    if token := request.get(GIVEN):
        response.headers[people.TOKEN] = token
