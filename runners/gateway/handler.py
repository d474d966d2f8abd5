"""One model call from request to answer: forward, capture, store, then let the last byte go.

Always true: the answer to a call that a branch repeats comes from the record and is treated as any
other; nothing is asked again once the agent has a byte of the answer; an answer that breaks
after that cuts the agent's connection, because any other end would look complete. What an agent
had read of an answer when it left is kept as a call that was cut: it acted on those tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from functools import partial

import msgspec
from aiohttp import web

from agentrl.errors import StoreError
from agentrl.http_server import read_body
from agentrl.runners.dialects import Dialect
from agentrl.runners.gateway import replay
from agentrl.runners.gateway.attribution import Caller, RefusedError
from agentrl.runners.gateway.capture import Answer, Part, read_call, read_part, transition
from agentrl.runners.gateway.replay import CUT, RECORD
from agentrl.runners.gateway.routing import Route
from agentrl.runners.gateway.upstream import Upstream, UpstreamError, forwarded, read, stream
from agentrl.store.base import Store
from agentrl.types import Sampling, Transition

# What parsing an answer raises when it is not the completion it should be.
ODD = (
    msgspec.DecodeError,
    RecursionError,
    OverflowError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
REFUSAL = 500  # bytes of a refusal that are remembered
REFUSES = (400, 422)  # what servers answer to fields they do not know
SILENCE = 0.5  # share of an attempt's time after which an unanswered call is the server's fault
NEAR = 0.1  # seconds to the deadline, of which an executor may fall short by its clock


class DisconnectedError(Exception):
    """The agent closed its connection before the answer was complete."""


class Exchange:
    """Owns one request of an agent and its answer."""

    def __init__(
        self,
        upstream: Upstream,
        store: Store,
        caller: Caller,
        request: web.Request,
        dialect: Dialect,
    ) -> None:
        self._upstream, self._store, self._caller = upstream, store, caller
        self._request, self._dialect = request, dialect
        self._arrived = time.monotonic()
        self._started = 0.0  # unix seconds, and the same moment of a clock that is never set
        self._asked_at = 0.0
        self._sampling = Sampling()  # in force where the call was sent
        self._sent: web.StreamResponse | None = None  # once the agent has the first byte
        self._shown: tuple[Answer, Route, str] | None = None  # what it has of the answer
        self._rows: list[Transition] | None = None  # the answer as it is, or will be, stored

    async def run(self) -> web.StreamResponse:
        """Raises UpstreamError when there is no answer and none can come in time, RefusedError when
        the attempt ended meanwhile, and what `read_call` raises for the request."""
        live = self._caller.live
        raw = await read_body(self._request)
        self._asked = live.asks(raw)
        self._read_call = partial(read_call, self._dialect, raw, live.memory, self._asked.number)
        self._call = self._read_call()
        try:
            return await self._until_deadline()
        finally:
            live.done(self._asked)

    async def _until_deadline(self) -> web.StreamResponse:
        live = self._caller.live
        try:
            async with asyncio.timeout(live.left):
                return await self._answer()
        except asyncio.CancelledError:  # by the server, as the agent left, or the attempt is over
            self._blame_silence()
            await _to_the_end(self._keep_shown())
            raise
        except DisconnectedError:
            await _to_the_end(self._keep_shown())
            return self._cut()
        except (UpstreamError, RefusedError):
            if self._sent is None:
                raise
            return self._cut()
        except TimeoutError:
            if self._sent is None:
                self._blame_silence()
                known = live.failures.get(self._asked.number, "")
                message = f"attempt {live.id} ran out of time before the model had answered"
                message += f"; {known}" if known else ""
                raise RefusedError(504, "attempt_timeout", message) from None
            await _to_the_end(self._keep_shown())
            return self._cut()

    async def _answer(self) -> web.StreamResponse:
        """The policy's, or of a call that a branch repeats the recorded one."""
        live, call = self._caller.live, self._call
        role = self._caller.role_of(call.model)
        rows = live.recording.take(call, role) if live.recording else []
        if not rows:
            return await self._upstream.retry(self._caller, call.model, self._asked, self._forward)
        answer = await self._replay(rows)
        live.answered(self._asked)
        return answer

    async def _replay(self, recorded: list[Transition]) -> web.StreamResponse:
        live, call, rows = self._caller.live, self._call, []
        for row in recorded:
            index, live.stored = live.stored, live.stored + 1
            own = {"id": f"{live.id}-{index}", "attempt": live.id, "index": index}
            own |= {"span": self._caller.span, "started": time.time(), "seconds": 0.0}
            rows.append(replay.repeated(row, call, **own))
        self._rows = rows
        return await self._tell(RECORD, recorded)

    async def _tell(self, route: Route, rows: list[Transition]) -> web.StreamResponse:
        """An answer that no server has to make."""
        if self._call.stream:
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return await self._stream(route, replay.stream(rows, self._call), headers)
        headers = {"content-type": "application/json"}
        return await self._whole(route, replay.whole(rows, self._call), headers)

    def _blame_silence(self) -> None:
        """A model that says nothing for most of an attempt's time is what it failed of. This call
        or the agent may be the first to be ended, they have the same deadline."""
        live, waited = self._caller.live, time.monotonic() - self._arrived
        hung = waited > SILENCE * live.attempt.rollout.timeout
        if self._sent is None and hung and live.left < NEAR:
            message = f"the model had not answered for {waited:.3g} s when the time was up"
            live.failures.setdefault(self._asked.number, message)

    def _cut(self) -> web.StreamResponse:
        if self._request.transport is not None:
            self._request.transport.abort()
        assert self._sent is not None
        return self._sent

    async def _forward(self, route: Route) -> web.StreamResponse:
        tells = False if self._caller.live.scoring else self._upstream.tells(route)
        try:
            answer = await self._once(route, capture=tells is not False)
            if answer.status in REFUSES and tells is None:  # our additions, or the agent's mistake?
                answer = await self._once(route, capture=False)
                if answer.status == 200:
                    self._upstream.learn(route, tells=False)
        except UpstreamError as error:
            error.final = error.final or self._sent is not None
            raise
        return answer

    async def _once(self, route: Route, *, capture: bool) -> web.StreamResponse:
        if self._started and self._call.translation is not None:
            self._call = self._read_call()  # the last try may have left half an answer in it
        self._started, self._asked_at = time.time(), time.monotonic()
        call = self._call
        if route.says is not None:
            return await self._tell(route, replay.spoken(route.says, call))
        defaults = self._caller.live.attempt.rollout.sampling
        body, self._sampling = call.encode(route, defaults, capture=capture)
        headers = self._request.headers
        async with self._upstream.post(route, self._dialect.api, body, headers) as reply:
            if reply.status != 200:  # the agent's own mistake, in the server's words
                words = in_words_of(self._dialect, reply.status, await read(reply))
                said = words[:REFUSAL].decode(errors="replace")
                self._caller.live.refused = f"{reply.status}: {said}"
                kind = "application/json"
                return web.Response(status=reply.status, body=words, content_type=kind)
            if call.stream != (reply.content_type == "text/event-stream"):
                asked = "a stream" if call.stream else "an answer in one piece"
                raise self._bad(route, f"{reply.content_type} when it was asked for {asked}")
            if call.stream:
                return await self._stream(route, stream(reply), reply.headers)
            return await self._whole(route, await read(reply), reply.headers)

    async def _whole(
        self, route: Route, raw: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        answer = Answer()
        part, _ = self._read(raw, answer, route)
        if not answer.choices:
            raise self._bad(route, "an answer without choices")
        body = self._call.tidy(part)
        if self._call.translation is not None:
            try:
                whole = msgspec.json.decode(body)
                body = self._call.translation.whole(whole, len(answer.prompt))
            except ODD as error:
                raise self._bad(route, f"what is not a completion ({error})") from None
        await self._keep(answer, route, headers.get("x-policy-version", ""))
        return web.Response(body=body, headers=forwarded(headers))

    async def _stream(
        self, route: Route, parts: AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        answer, held = Answer(), []  # held: what an agent may take for the end
        self._shown = answer, route, headers.get("x-policy-version", "")
        async for event in parts:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                held.append(b"" if self._call.translation else event)
            elif not event.startswith(b"data:"):  # a comment that keeps the connection alive
                await self._send(event, headers)
            else:
                part, final = self._read(data, answer, route)
                shown = self._show(part, answer, route)
                if final:
                    held.append(shown)
                elif shown:
                    await self._send(shown, headers)
        if not answer.complete:
            raise self._bad(route, "half a stream")
        if self._call.translation is not None:
            held.append(self._call.translation.end())
        await self._keep(*self._shown)
        return await self._send(b"".join(held), headers)

    def _show(self, part: Part, answer: Answer, route: Route) -> bytes:
        """A chunk as the events of the agent's API."""
        tidy = self._call.tidy(part)
        if self._call.translation is None:
            return b"data: " + tidy + b"\n\n"
        try:
            return self._call.translation.part(msgspec.json.decode(tidy), len(answer.prompt))
        except ODD as error:
            raise self._bad(route, f"what is not part of a completion ({error})") from None

    async def _send(self, data: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
        try:
            if self._sent is None:
                self._sent = web.StreamResponse(headers=forwarded(headers))
                await self._sent.prepare(self._request)
            await self._sent.write(data)
        except ConnectionError as error:
            raise DisconnectedError from error
        return self._sent

    def _read(self, raw: bytes, answer: Answer, route: Route) -> tuple[Part, bool]:
        try:
            part = read_part(raw)
            return part, answer.absorb(part)
        except ODD:
            text = raw[:200].decode(errors="replace")
            raise self._bad(route, f"what is not a completion: {text}") from None

    def _bad(self, route: Route, what: str) -> UpstreamError:
        message = f"the policy server at {route.base_url} sent {what}"
        return UpstreamError(message, transient=False)

    async def _keep(self, answer: Answer, route: Route, version: str) -> None:
        """Returns when the transitions are durable."""
        live = self._caller.live
        if live.scoring:
            return
        if self._rows is None:
            if any(choice.known for choice in answer.choices.values()):
                self._upstream.learn(route, tells=True)
            self._rows = self._transitions(answer, route, version)
        try:
            kept = await self._store.add_transitions(self._rows)
        except StoreError as error:
            raise UpstreamError(f"the call was not stored: {error}", final=True) from error
        if not all(kept):
            raise RefusedError(403, "attempt_ended", f"attempt {live.id} has lost its lease")

    async def _keep_shown(self) -> None:
        """Store what the agent has read, or at least could have, of an answer it will not read
        on. To store again what was being stored changes nothing."""
        if self._sent is None or self._shown is None:
            return
        live = self._caller.live
        answer, route, version = self._shown
        answer.cut(CUT)
        try:
            if answer.choices:
                await self._keep(answer, route, version)
        except UpstreamError as error:
            live.failures[self._asked.number] = error.message
        except RefusedError:
            pass  # the attempt has lost its lease, and what it did with it
        else:
            live.answered(self._asked)

    def _transitions(self, answer: Answer, route: Route, version: str) -> list[Transition]:
        live, rows = self._caller.live, []
        for _, choice in sorted(answer.choices.items()):
            index, live.stored = live.stored, live.stored + 1
            row = transition(
                choice,
                id=f"{live.id}-{index}",
                attempt=live.id,
                index=index,
                role=self._caller.role_of(self._call.model),
                policy=route.policy,
                version=int(version) if version.isdigit() else route.version,
                sampling=self._sampling,
                messages=self._call.messages,
                tools=self._call.tools,
                span=self._caller.span,
                started=self._started,
                seconds=time.monotonic() - self._asked_at,
            )
            rows.append(row)
        return rows


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Do `work`, however often whoever waits for it is cancelled meanwhile."""
    task = asyncio.create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    task.result()


def in_words_of(dialect: Dialect, status: int, body: bytes) -> bytes:
    """A policy server's error for the agent: as it is where both speak the same API, else its
    message in the agent's."""
    try:
        error = msgspec.json.decode(body, type=dict[str, dict[str, msgspec.Raw]])["error"]
        message = msgspec.json.decode(error["message"], type=str)
    except ODD:
        message = body[:2000].decode(errors="replace")
    else:
        if dialect.translate is None:
            return body
    return msgspec.json.encode(dialect.error(status, "upstream_refused", message))
