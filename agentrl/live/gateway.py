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
import contextlib
import logging
import math
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from agentrl.base.access import read_key
from agentrl.base.http_server import read_body
from agentrl.base.processes import die_with_parent, log_phase, log_to_stderr
from agentrl.config import RunConfig
from agentrl.config.policies import policy_by_role
from agentrl.errors import NotFound, StoreError
from agentrl.live import handover
from agentrl.live.labels import signals
from agentrl.live.records import people
from agentrl.live.records.documents import Lanes, served, told
from agentrl.live.records.marks import RESULT_ENDED
from agentrl.live.records.table import live_of, policy_of
from agentrl.live.unread import answer_again, unread_of
from agentrl.runners.features import run_features
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.upstream import Upstream
from agentrl.runners.sessions.feedback import Feedback, session_group
from agentrl.runners.sessions.recorder import (
    SESSION_LEASE,
    Handler,
    OpenSession,
    Sessions,
    place,
    refusal,
    said,
)
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import (
    POLICY,
    SESSION,
    Attempt,
    Json,
    NewRollout,
    Outcome,
    Purpose,
    Record,
    Rollout,
    RolloutState,
    Transition,
)

log = logging.getLogger("agentrl.runner")
END = "x-agentrl-end"  # request header of a session's last call
GIVEN = web.RequestKey(people.TOKEN, str)  # the token of the request's session
LOOK_PAUSE = 0.2  # seconds between two looks at the lanes
ORPHANED = 120.0  # seconds for which a gateway goes on without a supervisor


class SessionName(Record, frozen=True):
    """The body of a request that ends a session."""

    session: str


class LiveSessions(Sessions):
    """The feature of the gateway that serves a live run; `keep` and `follow` run concurrently."""

    def __init__(
        self, store: Store, config: RunConfig, socket: socket.socket | None = None
    ) -> None:
        self._config, self._socket = config, socket
        self._people = live_of(config).people
        self._lanes: Lanes | None = None
        self._seated = asyncio.Event()  # set once there are lanes
        self._secret = b""  # set with the first lanes, as it is kept with the run
        read_key(self._people.secret_env, "live.people.secret_env", "the run's")
        super().__init__(store, config)

    def _make_gateway(self, config: RunConfig) -> Gateway:
        return Gateway(
            self._store, config.name, host=config.runner.host, port=config.runner.port,
            upstreams=config.upstreams, roles=policy_by_role(config),
            key=config.engine.access.key, models=[config.policy.model],
            features=[*run_features(self._store, config, config.role_rules), self],
            socket=self._socket,
        )  # fmt: skip

    def _answers(self) -> dict[str, Handler]:
        return super()._answers() | {"/v1/sessions/end": self._end_named}

    # -- lanes -------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Follow the run's lanes, until cancelled."""
        cursor = 0
        while True:
            try:
                cursor = await self._store.wait(cursor)
                lanes = (await told(self._store, self._run)).lanes
                if lanes is not None and not self._secret:
                    self._secret = await people.secret_of(self._store, self._config)
            except StoreError as error:
                log.warning("the lanes of run %s cannot be read: %s", self._run, error)
            else:
                self._follow(lanes)
            await asyncio.sleep(LOOK_PAUSE)

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
        session = await super()._find(request, key)
        if session.active.recorded and not self._may_record(request):
            await self._end([session])
            await self._store.forget([session.active.attempt.rollout.id])
            session = await super()._find(request, key)
        if session.active.recorded and self._people.token:
            request[GIVEN] = people.token_of(self._secret, session.name)
        return session

    def _may_record(self, request: web.Request) -> bool:
        return self._people.opt_out not in request.headers

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        """Store feedback of somebody who has the session's token. Its session may have gone."""
        await self._seated.wait()
        feedback = msgspec.json.decode(await read_body(request), type=Feedback)
        token, name = request.headers.get(people.TOKEN, ""), feedback.session
        if self._people.token and not token:
            return refusal(401, f"feedback needs {people.TOKEN}, a header of its session's answers")
        if self._people.token and not people.is_token(self._secret, name, token):
            return refusal(403, f"the {people.TOKEN} is not that of session {name!r:.80}")
        if why := signals.unfit(feedback.name, feedback.value):
            return refusal(400, why)
        group = await self._group_of(name)
        if not await self._store.rollouts(self._run, group=group, limit=1):
            known = 410 if self._people.token else 404
            return refusal(known, f"session {name!r:.80} is deleted, or was never recorded")
        return await super()._take_feedback(request)

    # -- sessions ----------------------------------------------------------------------------------

    async def _begin(self, name: str, start: str, request: web.Request) -> OpenSession:
        taken_over = self._open.get(session_group(self._run, name))
        if taken_over is not None and name:  # its name was not known
            del self._open[taken_over.name]
            taken_over.name = name
            self._open[name] = taken_over
            return taken_over
        await self._seated.wait()
        try:
            session = await super()._begin(name, start, request)
        except StoreError as error:  # users are answered all the same
            log.warning("a session is answered and not recorded: %s", error)
            rollout = self._rollout(name, session_group(self._run, name), request)
            attempt = Attempt(id=uuid.uuid4().hex, rollout=rollout, fence=0, lease_until=math.inf)
            session = self._add(name, attempt, recorded=False)
        session.active.lenient = True
        return session

    async def _request(self, name: str, request: web.Request) -> NewRollout:
        return self._rollout(name, await self._free_group(name), request)

    def _rollout(self, name: str, group: str, request: web.Request) -> NewRollout:
        assert self._lanes is not None
        lanes, version = self._lanes, chosen(self._lanes, group)
        user = request.headers.get(self._people.user_header, "")
        task: dict[str, Json] = {
            "lane": "serving" if version == lanes.serving else "candidate",
            "version": version,
            "candidate": lanes.candidate,
            "share": lanes.share,
            "user": people.user_id(self._secret, user),
            "began": round(time.time(), 3),
        }
        if not request.headers.get(self._settings.header):
            task["session"] = name  # made here, so it is nobody's secret
        return NewRollout(
            id=f"{group}/0", run=self._run, group=group, index=0, task=task, step=SESSION,
            purpose=Purpose.TRAIN, sampling=self._config.sampling, priority=1,
            timeout=self._settings.timeout, seats={POLICY: policy_of(version)},
        )  # fmt: skip

    async def _free_group(self, name: str) -> str:
        """The group of a new session of this name."""
        for group in groups_of(self._run, name):
            if not await self._is_known(group):
                return group
        raise AssertionError

    async def _is_known(self, group: str) -> bool:
        """Whether there was such a group: it stays when its rollouts are deleted."""
        try:
            await self._store.settled(group, timeout=0)
        except NotFound:
            return False
        return True

    async def _group_of(self, name: str) -> str:
        last = ""
        for group in groups_of(self._run, name):
            if await self._store.rollouts(self._run, group=group, limit=1):
                last = group
            elif not await self._is_known(group):
                return last or group
        raise AssertionError

    async def _after_call(self, request: web.Request, session: OpenSession) -> None:
        if END in request.headers:
            await self._end([session])

    async def _end_named(self, request: web.Request) -> web.StreamResponse:
        name = msgspec.json.decode(await read_body(request), type=SessionName).session
        session = self._open.get(name) or self._open.get(session_group(self._run, name))
        if session is None and not await self._store.rollouts(
            self._run, group=session_group(self._run, name), limit=1
        ):
            raise NotFound(f"run {self._run!r} has no session {name!r}")
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
        for call in calls:
            active.memory.remember(call.answer)
            digest, _, _ = place({"messages": call.messages})
            self._remember(session, (digest, said(call.answer)))
        active.answers.append(partial(answer_again, unread_of(calls)))


async def _give_token(request: web.Request, response: web.StreamResponse) -> None:
    if token := request.get(GIVEN):
        response.headers[people.TOKEN] = token


def groups_of(run: str, name: str) -> Iterator[str]:
    """The groups of a session and of its continuations, in order."""
    base = session_group(run, name)
    yield base
    yield from (f"{base}-{number}" for number in count(2))


def group_base(run: str, group: str) -> str:
    """The first group of the session that a group is of."""
    return f"{run}/{group.removeprefix(f'{run}/').partition('-')[0]}"


def chosen(lanes: Lanes, group: str) -> int:
    """The version that answers a new session. Each candidate gets other sessions."""
    if lanes.candidate is None:
        return lanes.serving
    drawn = blake2b(f"{lanes.candidate}/{group}".encode(), digest_size=4).digest()
    return lanes.candidate if int.from_bytes(drawn) / 2**32 < lanes.share else lanes.serving


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
        given = partial(loop.call_soon_threadsafe, stop.set)
        handover.offer(Path(config.output), listener, orphaned, given)
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
