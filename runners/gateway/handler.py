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
from agentrl.runners.gateway.attribution import CallOrigin, RefusedError
from agentrl.runners.gateway.capture import (
    ModelResponse,
    ResponseChunk,
    read_chunk,
    read_request,
    transition,
)
from agentrl.runners.gateway.replay import CUT, RECORD
from agentrl.runners.gateway.routing import Route
from agentrl.runners.gateway.upstream import (
    Upstream,
    UpstreamError,
    forwarded_headers,
    read,
    stream,
)
from agentrl.store.base import Store
from agentrl.types import Sampling, Transition

# What parsing an answer raises when it is not the completion it should be.
MALFORMED = (
    msgspec.DecodeError,
    RecursionError,
    OverflowError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
LONGEST_REFUSAL = 500  # bytes of a refusal that are remembered
REFUSED_FIELDS = (400, 422)  # what servers answer to fields they do not know
SILENT_SHARE = 0.5  # of an attempt's time; the server is to blame for a longer silence
DEADLINE_MARGIN = 0.1  # seconds to the deadline, of which an executor may fall short by its clock


class DisconnectedError(Exception):
    """The agent closed its connection before the answer was complete."""


class CallHandler:
    """Owns one request of an agent and its answer."""

    def __init__(
        self,
        upstream: Upstream,
        store: Store,
        caller: CallOrigin,
        request: web.Request,
        dialect: Dialect,
    ) -> None:
        self._upstream, self._store, self._caller = upstream, store, caller
        self._http_request, self._dialect = request, dialect
        self._arrived = time.monotonic()
        self._started = 0.0  # unix seconds, and the same moment of a clock that is never set
        self._sent_at = 0.0
        self._sampling = Sampling()  # in force where the call was sent
        self._response: web.StreamResponse | None = None  # once the agent has the first byte
        self._read_so_far: tuple[ModelResponse, Route, str] | None = None  # by the agent
        self._stored: list[Transition] | None = None  # the answer as it is, or will be, stored

    async def run(self) -> web.StreamResponse:
        """Raises UpstreamError when there is no answer and none can come in time, RefusedError when
        the attempt ended meanwhile, and what `read_call` raises for the request."""
        active = self._caller.attempt
        raw = await read_body(self._http_request)
        self._call = active.begin_call(raw)
        self._read_call = partial(
            read_request, self._dialect, raw, active.memory, self._call.number
        )
        self._request = self._read_call()
        try:
            return await self._until_deadline()
        finally:
            active.done(self._call)

    async def _until_deadline(self) -> web.StreamResponse:
        active = self._caller.attempt
        try:
            async with asyncio.timeout(active.left):
                return await self._answer()
        except asyncio.CancelledError:  # by the server, as the agent left, or the attempt is over
            self._record_silence()
            await _uncancelled(self._store_shown())
            raise
        except DisconnectedError:
            await _uncancelled(self._store_shown())
            return self._abort_connection()
        except (UpstreamError, RefusedError):
            if self._response is None:
                raise
            return self._abort_connection()
        except TimeoutError:
            if self._response is None:
                self._record_silence()
                known = active.failures.get(self._call.number, "")
                message = f"attempt {active.id} ran out of time before the model had answered"
                message += f"; {known}" if known else ""
                raise RefusedError(504, "attempt_timeout", message) from None
            await _uncancelled(self._store_shown())
            return self._abort_connection()

    async def _answer(self) -> web.StreamResponse:
        """The policy's, or of a call that a branch repeats the recorded one."""
        active, call = self._caller.attempt, self._request
        role = self._caller.role_of(call.model)
        rows = active.recording.take(call, role) if active.recording else []
        if not rows:
            return await self._upstream.retry(
                self._caller, call.model, self._call, self._ask_policy
            )
        answer = await self._replay(rows)
        active.call_succeeded(self._call)
        return answer

    async def _replay(self, recorded: list[Transition]) -> web.StreamResponse:
        active, call, rows = self._caller.attempt, self._request, []
        for row in recorded:
            index, active.stored = active.stored, active.stored + 1
            own = {"id": f"{active.id}-{index}", "attempt": active.id, "index": index}
            own |= {"span": self._caller.span, "started": time.time(), "seconds": 0.0}
            rows.append(replay.repeat_call(row, call, **own))
        self._stored = rows
        return await self._send_recorded(RECORD, recorded)

    async def _send_recorded(self, route: Route, rows: list[Transition]) -> web.StreamResponse:
        """Send an answer from a record or from the run file, without asking a server."""
        if self._request.stream:
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return await self._stream(route, replay.stream(rows, self._request), headers)
        headers = {"content-type": "application/json"}
        return await self._whole(route, replay.whole(rows, self._request), headers)

    def _record_silence(self) -> None:
        """Count a call as failed if the model was silent for most of the attempt's time: then the
        model, not the agent, is the reason of the time-out."""
        active, waited = self._caller.attempt, time.monotonic() - self._arrived
        hung = waited > SILENT_SHARE * active.attempt.rollout.timeout
        if self._response is None and hung and active.left < DEADLINE_MARGIN:
            message = f"the model had not answered for {waited:.3g} s when the time was up"
            active.failures.setdefault(self._call.number, message)

    def _abort_connection(self) -> web.StreamResponse:
        if self._http_request.transport is not None:
            self._http_request.transport.abort()
        assert self._response is not None
        return self._response

    async def _ask_policy(self, route: Route) -> web.StreamResponse:
        known = False if self._caller.attempt.scoring else self._upstream.gives_token_ids(route)
        try:
            answer = await self._try_route(route, capture=known is not False)
            # Our additions, or a mistake of the agent?
            if answer.status in REFUSED_FIELDS and known is None:
                answer = await self._try_route(route, capture=False)
                if answer.status == 200:
                    self._upstream.note_token_ids(route, given=False)
        except UpstreamError as error:
            error.final = error.final or self._response is not None
            raise
        return answer

    async def _try_route(self, route: Route, *, capture: bool) -> web.StreamResponse:
        if self._started and self._request.translation is not None:
            self._request = self._read_call()  # the last try may have left half an answer in it
        self._started, self._sent_at = time.time(), time.monotonic()
        call = self._request
        if route.text is not None:
            return await self._send_recorded(route, replay.fixed_answer(route.text, call))
        defaults = self._caller.attempt.attempt.rollout.sampling
        body, self._sampling = call.encode(route, defaults, capture=capture)
        headers = self._http_request.headers
        async with self._upstream.post(route, self._dialect.api, body, headers) as reply:
            if reply.status != 200:  # the agent's own mistake, in the server's words
                words = translate_error(self._dialect, reply.status, await read(reply))
                said = words[:LONGEST_REFUSAL].decode(errors="replace")
                self._caller.attempt.refused = f"{reply.status}: {said}"
                kind = "application/json"
                return web.Response(status=reply.status, body=words, content_type=kind)
            if call.stream != (reply.content_type == "text/event-stream"):
                asked = "a stream" if call.stream else "an answer in one piece"
                raise self._malformed(route, f"{reply.content_type} when it was asked for {asked}")
            if call.stream:
                return await self._stream(route, stream(reply), reply.headers)
            return await self._whole(route, await read(reply), reply.headers)

    async def _whole(
        self, route: Route, raw: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        answer = ModelResponse()
        part, _ = self._read(raw, answer, route)
        if not answer.choices:
            raise self._malformed(route, "an answer without choices")
        body = self._request.restore_fields(part)
        if self._request.translation is not None:
            try:
                whole = msgspec.json.decode(body)
                body = self._request.translation.whole(whole, len(answer.prompt))
            except MALFORMED as error:
                raise self._malformed(route, f"what is not a completion ({error})") from None
        await self._store_response(answer, route, headers.get("x-policy-version", ""))
        return web.Response(body=body, headers=forwarded_headers(headers))

    async def _stream(
        self, route: Route, parts: AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        answer, held = ModelResponse(), []  # held: what an agent may take for the end
        self._read_so_far = answer, route, headers.get("x-policy-version", "")
        async for event in parts:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                held.append(b"" if self._request.translation else event)
            elif not event.startswith(b"data:"):  # a comment that keeps the connection alive
                await self._send(event, headers)
            else:
                part, final = self._read(data, answer, route)
                shown = self._as_event(part, answer, route)
                if final:
                    held.append(shown)
                elif shown:
                    await self._send(shown, headers)
        if not answer.complete:
            raise self._malformed(route, "half a stream")
        if self._request.translation is not None:
            held.append(self._request.translation.end())
        await self._store_response(*self._read_so_far)
        return await self._send(b"".join(held), headers)

    def _as_event(self, part: ResponseChunk, answer: ModelResponse, route: Route) -> bytes:
        """A chunk as the events of the agent's API."""
        restored = self._request.restore_fields(part)
        if self._request.translation is None:
            return b"data: " + restored + b"\n\n"
        try:
            return self._request.translation.part(msgspec.json.decode(restored), len(answer.prompt))
        except MALFORMED as error:
            raise self._malformed(route, f"what is not part of a completion ({error})") from None

    async def _send(self, data: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
        try:
            if self._response is None:
                self._response = web.StreamResponse(headers=forwarded_headers(headers))
                await self._response.prepare(self._http_request)
            await self._response.write(data)
        except ConnectionError as error:
            raise DisconnectedError from error
        return self._response

    def _read(self, raw: bytes, answer: ModelResponse, route: Route) -> tuple[ResponseChunk, bool]:
        try:
            part = read_chunk(raw)
            return part, answer.add(part)
        except MALFORMED:
            text = raw[:200].decode(errors="replace")
            raise self._malformed(route, f"what is not a completion: {text}") from None

    def _malformed(self, route: Route, what: str) -> UpstreamError:
        message = f"the policy server at {route.base_url} sent {what}"
        return UpstreamError(message, transient=False)

    async def _store_response(self, answer: ModelResponse, route: Route, version: str) -> None:
        """Returns when the transitions are durable."""
        active = self._caller.attempt
        if active.scoring:
            return
        if self._stored is None:
            if any(choice.known for choice in answer.choices.values()):
                self._upstream.note_token_ids(route, given=True)
            self._stored = self._transitions(answer, route, version)
        try:
            kept = await self._store.add_transitions(self._stored)
        except StoreError as error:
            raise UpstreamError(f"the call was not stored: {error}", final=True) from error
        if not all(kept):
            raise RefusedError(403, "attempt_ended", f"attempt {active.id} has lost its lease")

    async def _store_shown(self) -> None:
        """Store the part of an answer that was sent to the agent before it stopped reading. Storing
        the same rows twice changes nothing."""
        if self._response is None or self._read_so_far is None:
            return
        active = self._caller.attempt
        answer, route, version = self._read_so_far
        answer.cut(CUT)
        try:
            if answer.choices:
                await self._store_response(answer, route, version)
        except UpstreamError as error:
            active.failures[self._call.number] = error.message
        except RefusedError:
            pass  # the attempt has lost its lease, and what it did with it
        else:
            active.call_succeeded(self._call)

    def _transitions(self, answer: ModelResponse, route: Route, version: str) -> list[Transition]:
        active, rows = self._caller.attempt, []
        for _, choice in sorted(answer.choices.items()):
            index, active.stored = active.stored, active.stored + 1
            row = transition(
                choice,
                id=f"{active.id}-{index}",
                attempt=active.id,
                index=index,
                role=self._caller.role_of(self._request.model),
                policy=route.policy,
                version=int(version) if version.isdigit() else route.version,
                sampling=self._sampling,
                messages=self._request.messages,
                tools=self._request.tools,
                span=self._caller.span,
                started=self._started,
                seconds=time.monotonic() - self._sent_at,
            )
            rows.append(row)
        return rows


async def _uncancelled(work: Coroutine[None, None, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile."""
    task = asyncio.create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    task.result()


def translate_error(dialect: Dialect, status: int, body: bytes) -> bytes:
    """A policy server's error for the agent: as it is where both speak the same API, else its
    message in the agent's."""
    try:
        error = msgspec.json.decode(body, type=dict[str, dict[str, msgspec.Raw]])["error"]
        message = msgspec.json.decode(error["message"], type=str)
    except MALFORMED:
        message = body[:2000].decode(errors="replace")
    else:
        if dialect.translate is None:
            return body
    return msgspec.json.encode(dialect.error(status, "upstream_refused", message))
