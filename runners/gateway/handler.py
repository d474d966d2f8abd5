"""One model call from request to response: forward, capture, store, then send the last byte.

Invariant: a call that a branch replays is answered from the record, and then handled like any
other. Once the agent has received a byte of the response, the call is not retried; if the response
breaks after that, the agent's connection is closed, because any other end would look complete. If
the agent disconnects, the part that it has received is stored as a call with finish "cut", because
the agent acted on those tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from agentrl.base import threads
from agentrl.base.http_server import read_body
from agentrl.errors import StoreError
from agentrl.runners.dialects import Dialect
from agentrl.runners.dialects.base import CHAT, data_event
from agentrl.runners.gateway import notices, replay
from agentrl.runners.gateway.attribution import CallOrigin, RefusedError
from agentrl.runners.gateway.capture import ModelRequest, ModelResponse, read_chunk, read_request
from agentrl.runners.gateway.learnable import why_not_text
from agentrl.runners.gateway.prompts import PromptNotFoundError, apply_prompts
from agentrl.runners.gateway.refusals import (
    MALFORMED,
    ServerRefusal,
    error_in,
    malformed,
    parsing,
    translate_error,
)
from agentrl.runners.gateway.replay import CUT, RECORD, question_of
from agentrl.runners.gateway.role_rules import role_of_request
from agentrl.runners.gateway.routing import Route
from agentrl.runners.gateway.upstream import (
    Upstream,
    UpstreamError,
    forwarded,
    read,
    read_event,
    stream,
)
from agentrl.store.base import Store
from agentrl.types import SIDE, Sampling, Transition

LONGEST_REFUSAL = 500  # bytes kept of a refusal
REFUSED_FIELDS = (400, 422)  # status of servers' responses to unknown fields
Headers = Mapping[str, str]


class DisconnectedError(Exception):
    """The agent closed its connection before the response was complete."""


class CallHandler:
    """Handles one request of an agent."""

    def __init__(
        self,
        upstream: Upstream,
        store: Store,
        caller: CallOrigin,
        request: web.Request,
        dialect: Dialect,
    ) -> None:
        self._upstream, self._store, self._caller = upstream, store, caller
        self._active = caller.attempt
        self._http_request, self._dialect = request, dialect
        self._arrived = time.monotonic()
        self._started = 0.0  # start of the latest try, in unix seconds
        self._sent_at = 0.0  # the same by the monotonic clock
        self._defaults = caller.attempt.attempt.rollout.sampling
        self._sampling = Sampling()  # effective in the latest try
        self._room: int | None = None  # tokens that fit after the prompt; 0: all that are asked for
        self._response: web.StreamResponse | None = None  # once the agent has the first byte
        self._shown = False  # the agent has read some of the model's response
        self._read_so_far: tuple[ModelResponse, Route, Headers] | None = None  # streamed so far
        self._rows: list[Transition] | None = None  # the response as stored, or to be stored

    async def run(self) -> web.StreamResponse:
        """Handle the call. Raises UpstreamError if there is no response and retries cannot succeed
        in time, RefusedError if the attempt has ended or the call lacks a text to be replaced, and
        the errors of `read_request`."""
        self._raw = await read_body(self._http_request)
        self._call = self._active.begin_call(self._raw)
        self._request = self._read_request()
        try:
            async with asyncio.timeout(self._active.left):
                return await self._answer()
        except asyncio.CancelledError:  # the agent disconnected, or the attempt has ended
            self._record_silence()
            await self._store_shown()
            self._keep_unread()
            raise
        except DisconnectedError:
            await self._store_shown()
        except (UpstreamError, RefusedError) as error:
            if self._response is None:
                raise
            if self._dialect.tells_errors:
                told = data_event(self._dialect.error(502, "model_unavailable", error.message))
                with contextlib.suppress(DisconnectedError):
                    await self._send(told, {})
        except TimeoutError:
            self._record_silence()
            if self._response is None:
                known = self._active.failures.get(self._call.number, "")
                raise self._active.time_is_up("the model", known) from None
            await self._store_shown()
        finally:
            self._active.done(self._call)
        if self._http_request.transport is not None:
            self._http_request.transport.abort()
        assert self._response is not None
        return self._response

    def _read_request(self) -> ModelRequest:
        active, number = self._active, self._call.number
        request = read_request(self._dialect, self._raw, active.memory, number)
        if active.rules and self._caller.role is None:
            headers = self._http_request.headers
            role = role_of_request(active.rules, request, headers, self._raw)
            self._caller = self._caller._replace(role=role)
        if prompts := active.attempt.prompts:
            try:
                apply_prompts(request, self._caller.role_of(request.model), prompts)
            except PromptNotFoundError as error:
                active.failures[number] = str(error)  # even if the agent ignores the error
                raise RefusedError(400, "prompt_not_found", str(error)) from None
        return request

    async def _answer(self) -> web.StreamResponse:
        """Answer from the record if a branch replays the call, else from the policy."""
        active, call = self._active, self._request
        role = self._caller.role_of(call.model)
        if unread := active.unread.pop((self._call.key, role), None):
            self._rows = unread
            answer = await self._send_recorded(RECORD, unread)
            active.call_succeeded(self._call)
            return answer
        if self._defaults.seed is not None:
            seed = active.seed_of(question_of(call, role))
            self._defaults = msgspec.structs.replace(self._defaults, seed=seed)
        recorded = active.recording.take(call, role) if active.recording else []
        if not recorded:
            return await self._upstream.retry(
                self._caller, call.model, self._call, self._ask_policy
            )
        asked: Any = {"messages": call.messages, "tools": call.tools, "started": time.time()}
        self._rows = [
            msgspec.structs.replace(
                row, **self._identity(), **asked, repeats=row.repeats or row.id, seconds=0.0
            )
            for row in recorded
        ]
        answer = await self._send_recorded(RECORD, recorded)
        active.call_succeeded(self._call)
        return answer

    def _identity(self) -> dict[str, Any]:
        """Return the identifying fields of the attempt's next transition."""
        index, self._active.stored = self._active.stored, self._active.stored + 1
        own = {"id": f"{self._active.id}-{index}", "attempt": self._active.id, "index": index}
        return own | {"span": self._caller.span}

    async def _send_recorded(self, route: Route, rows: list[Transition]) -> web.StreamResponse:
        """Send a recorded response, or a fixed text of the run file, without a server."""
        if self._request.stream:
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return await self._stream(route, replay.stream(rows, self._request), headers)
        headers = {"content-type": "application/json"}
        return await self._whole(route, replay.whole(rows, self._request), headers)

    def _keep_unread(self) -> None:
        """Keep a response that may have been stored, and of which the agent has read nothing, for
        the retry: otherwise both would be trained, and the agent has acted on the second only."""
        active = self._active
        if not self._shown and self._rows and active.record is None:
            active.unread[self._call.key, self._rows[0].role] = self._rows

    def _record_silence(self) -> None:
        if not self._shown:
            self._active.model_was_silent(self._call, time.monotonic() - self._arrived)

    async def _ask_policy(self, route: Route) -> web.StreamResponse:
        known = False if self._active.scoring else self._upstream.gives_token_ids(route)
        try:
            answer = await self._try_route(route, capture=known is not False)
            # The server refuses either the fields that capture adds or a mistake of the agent.
            if answer.status in REFUSED_FIELDS and known is None:
                answer = await self._try_route(route, capture=False)
                if answer.status == 200:
                    self._upstream.note_token_ids(route, given=False)
        except UpstreamError as error:
            error.final = error.final or self._shown
            raise
        return answer

    async def _try_route(self, route: Route, *, capture: bool) -> web.StreamResponse:
        if self._started and self._request.translation is not None:
            self._request = self._read_request()  # the last try may have left a partial response
        self._started, self._sent_at = time.time(), time.monotonic()
        call = self._request
        if route.text is not None:
            return await self._send_recorded(route, replay.fixed_answer(route.text, call))
        role = self._caller.role_of(call.model)
        if not (route.frozen or self._upstream.router.is_aside(role, self._active.seats)):
            if why := why_not_text(call.fields, call.messages, route.policy, role):
                self._active.failures[self._call.number] = why  # even if the agent ignores it
                raise RefusedError(400, "not_text", why)
            notices.warn_of_name(self._upstream, route, self._caller, call.model)
        defaults, headers = self._defaults, self._http_request.headers
        if self._dialect.api == CHAT.api:
            sent = await self._upstream.adapt(route, call.messages)
            if sent is not call.messages:
                call = replace(call, fields=call.fields | {"messages": sent})
        body, self._sampling = call.encode(route, defaults, capture=capture, room=self._room)
        limit = self._upstream.max_lengths.get(route.base_url)
        if limit and len(body) + (self._sampling.max_tokens or 0) > limit and not self._room:
            self._room = await self._upstream.find_room(
                route, call.fields, self._sampling.max_tokens
            )
            body, self._sampling = call.encode(route, defaults, capture=capture, room=self._room)
        if not (route.frozen or self._room):
            notices.warn_of_sampling(self._upstream, route, self._sampling, defaults)
        async with self._upstream.post(route, self._dialect.api, body, headers) as reply:
            try:
                return await self._read(route, reply)
            except ServerRefusal as refusal:
                error = refusal
            if error.status == 400 and self._room is None and not route.frozen:
                self._room = await self._upstream.find_room(
                    route, call.fields, self._sampling.max_tokens
                )
                if self._room:
                    return await self._try_route(route, capture=capture)
        words = translate_error(self._dialect, error.status, error.words)
        said = words[:LONGEST_REFUSAL].decode(errors="replace")
        self._active.refused = f"{error.status}: {said}"
        if self._response is not None:  # which has had comments only
            raise UpstreamError(f"the policy server answered {self._active.refused}", final=True)
        return web.Response(status=error.status, body=words, content_type="application/json")

    async def _read(self, route: Route, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        """Answer with the server's response. Raises ServerRefusal for a mistake of the agent."""
        if reply.status != 200:
            raise ServerRefusal(reply.status, await read(reply))
        if self._request.stream != (reply.content_type == "text/event-stream"):
            raw = await read(reply)
            with contextlib.suppress(*MALFORMED):  # an error may come in one piece
                if error := error_in(read_chunk(raw), route, raw):
                    raise error
            asked = "a stream" if self._request.stream else "an answer in one piece"
            raise malformed(route, f"{reply.content_type} when it was asked for {asked}")
        if self._request.stream:
            return await self._stream(route, stream(reply), reply.headers)
        return await self._whole(route, await read(reply), reply.headers)

    async def _whole(self, route: Route, raw: bytes, headers: Headers) -> web.StreamResponse:
        answer, translation = ModelResponse(self._request.doubt), self._request.translation
        with parsing(route, raw):
            part = read_chunk(raw)
            if error := error_in(part, route, raw):
                raise error
            answer.add(part)
            body = self._request.restore_fields(part)
            if translation is not None and answer.choices:
                body = translation.whole(msgspec.json.decode(body), len(answer.prompt))
        if not answer.choices:
            raise malformed(route, "an answer without choices")
        await self._store_response(answer, route, headers)
        return web.Response(body=body, headers=forwarded(headers))

    async def _stream(
        self, route: Route, parts: AsyncIterator[bytes], headers: Headers
    ) -> web.StreamResponse:
        answer, translation = ModelResponse(self._request.doubt), self._request.translation
        self._read_so_far = answer, route, headers
        opening = b""  # events before the first with text: an error may follow them
        held = []  # events that an agent may interpret as the end of the response
        last = b"no data"
        async for event in parts:
            head, data = read_event(event)
            if data == b"[DONE]":
                held.append(b"" if translation else event)
            elif not data:  # a keep-alive comment
                await self._send(event, headers)
            else:
                last = data
                with parsing(route, data):
                    part = read_chunk(data)
                    if error := error_in(part, route, data, begun=self._shown):
                        if self._shown and translation is None:
                            await self._send(event, headers)
                        raise error
                    final = answer.add(part, begun=self._shown)
                    body = self._request.restore_fields(part)
                    shown = head + b"data: " + body + b"\n\n"
                    if translation is not None:
                        shown = translation.part(msgspec.json.decode(body), len(answer.prompt))
                self._shown = self._shown or (answer.begun and not final)
                if final:
                    held.append(shown)
                elif not self._shown:
                    opening += shown
                elif opening or shown:
                    await self._send(opening + shown, headers)
                    opening = b""
        if not answer.complete:
            said = last[:LONGEST_REFUSAL].decode(errors="replace")
            raise malformed(route, f"half a stream, and last {said}")
        if translation is not None:
            held.append(translation.end())
        await self._store_response(*self._read_so_far)
        return await self._send(opening + b"".join(held), headers)

    async def _send(self, data: bytes, headers: Headers) -> web.StreamResponse:
        try:
            if self._response is None:
                self._response = web.StreamResponse(headers=forwarded(headers))
                await self._response.prepare(self._http_request)
            await self._response.write(data)
        except ConnectionError as error:
            raise DisconnectedError from error
        return self._response

    async def _store_response(self, answer: ModelResponse, route: Route, headers: Headers) -> None:
        """Store the transitions of a response and wait until they are durable."""
        if self._active.scoring:
            return
        choices = answer.choices.values()
        for choice in choices:
            self._active.memory.remember(choice.message)
        if self._rows is None:
            if any(choice.known for choice in choices):
                self._upstream.note_token_ids(route, given=True)
            self._rows = self._transitions(answer, route, headers)
            if not route.frozen:
                notices.warn_of_doubt(self._upstream, route, (choice.doubt for choice in choices))
                notices.warn_of_processors(self._upstream, route, self._rows[0].processors)
            if record := self._active.record:
                self._rows = [record(self._http_request, row) for row in self._rows]
        try:
            kept = await self._store.add_transitions(self._rows)
        except StoreError as error:
            raise UpstreamError(f"the call was not stored: {error}", final=True) from error
        if not all(kept):
            message = f"attempt {self._active.id} has lost its lease"
            raise RefusedError(403, "attempt_ended", message)
        self._active.tokens += sum(len(row.completion) for row in self._rows)

    async def _store_shown(self) -> None:
        """Store the part of a response that was sent to the agent, even if the caller is cancelled
        meanwhile. Storing the same rows twice has no effect."""
        if not self._shown or self._read_so_far is None:
            return
        answer, route, headers = self._read_so_far
        answer.cut(CUT)
        try:
            if answer.choices:
                with contextlib.suppress(asyncio.CancelledError):
                    await threads.uncancelled(self._store_response(answer, route, headers))
        except UpstreamError as error:
            self._active.failures[self._call.number] = error.message
        except RefusedError:
            pass  # the attempt has lost its lease, and this call with it
        else:
            self._active.call_succeeded(self._call)

    def _transitions(
        self, answer: ModelResponse, route: Route, headers: Headers
    ) -> list[Transition]:
        call, seconds = self._request, time.monotonic() - self._sent_at
        role, policy = self._caller.role_of(call.model), route.policy
        if not route.frozen and self._upstream.router.is_aside(role, self._active.seats):
            policy = f"{policy}@{SIDE}"  # excludes the call from training
        known: dict[str, Any] = {"role": role, "policy": policy}
        known |= {"started": self._started, "seconds": seconds, "sampling": self._sampling}
        version = headers.get("x-policy-version", "")
        known["version"] = int(version) if version.isdecimal() else route.version
        known |= {"messages": call.messages, "tools": call.tools, "left_out": call.left_out}
        if headers.get("x-processors") != "none":
            known["processors"] = call.processors
        choices = [choice for _, choice in sorted(answer.choices.items())]
        return [choice.transition(**self._identity(), **known) for choice in choices]
