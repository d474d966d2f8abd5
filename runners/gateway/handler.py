"""One model call, in four stages. Each is a frozen record that holds the one before it.

- received: read, parsed, counted, changed by features (`attribution.receive`)
- sent: encoded for the server of a route; one for each try (`CallHandler._prepare`)
- answered: the server's response, complete or cut where the agent disconnected (`_whole`,
`_stream`)
- stored: the rows of the response (`_make_rows`), durable (`_store_rows`)

Each stage calls the next, because the last three are repeated by retries:

    run                  until the attempt's time is up; reports errors to the agent
      _answer            from a record if there is one, else from the policy
        Upstream.retry   picks a route for each try
          _ask           one try; posts again without what the server refuses
            _post        with the server's response open
              _read      _whole or _stream, which parse, make and store the rows, and deliver

Two parts of a record change: features may change `messages` and `fields` of a request before it is
sent, and a response grows while it is streamed.

Invariant: an answer that is recorded is stored before its last byte is sent. Once a byte of the
model's output has been sent to the agent (SSE comments do not count), the call is not retried; if
the response breaks off after that, the agent's connection is closed, because any other end would
look complete. If the agent disconnects, the part that it was sent is stored as a call with finish
"cut", because the agent has acted on it; if it was sent nothing, a response that may be stored is
kept for a retry (`_keep_undelivered`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from msgspec.structs import replace

from agentrl.core import processes
from agentrl.core.errors import Conflict, Forbidden, Invalid, NotFound, StoreError
from agentrl.core.types import AUXILIARY_ROLE, Transition
from agentrl.runners.apis.base import CHAT, Dialect, data_event
from agentrl.runners.gateway import recorded
from agentrl.runners.gateway.attribution import CallOrigin, ReceivedCall, changed, receive
from agentrl.runners.gateway.prompt_size import find_fitting
from agentrl.runners.gateway.recorded import CUT, RECORD, question_of
from agentrl.runners.gateway.refusals import (
    MALFORMED,
    NotStoredError,
    RefusedError,
    ServerRefusal,
    UpstreamError,
    error_in,
    malformed,
    translate_error,
)
from agentrl.runners.gateway.request import (
    forwarded,
    read_request,
    warn_of_inexact,
    warn_of_name,
    warn_of_processors,
    warn_of_sampling,
)
from agentrl.runners.gateway.response import (
    MAX_REFUSAL_LENGTH,
    NO_TRANSLATION,
    AnsweredCall,
    Delivery,
    DisconnectedError,
    Headers,
    ModelResponse,
    parsing,
    read,
    read_chunk,
    stream,
)
from agentrl.runners.gateway.upstream import Route, SentCall, Upstream
from agentrl.store.base import Store

# Store errors after which the call is not stored.
STORE_REFUSALS = (Invalid, NotFound, Conflict, Forbidden)
REFUSED_FIELDS = (400, 422)  # HTTP status with which servers reject unknown fields


async def answer_call(
    upstream: Upstream, store: Store, dialect: Dialect, caller: CallOrigin, http: web.Request
) -> web.StreamResponse:
    """Answer an HTTP request that is a model call of `dialect`."""
    return await CallHandler(upstream, store, await receive(caller, http, dialect)).run()


class CallHandler:
    """Answers one received call."""

    def __init__(self, upstream: Upstream, store: Store, call: ReceivedCall) -> None:
        self._upstream, self._store, self._call = upstream, store, call
        self._active, self._agent = call.active, Delivery(call.http)

    async def run(self) -> web.StreamResponse:
        """Handle the call. Raises UpstreamError if there is no response and retries cannot succeed
        in time, and RefusedError if the attempt has ended or a feature refuses the call."""
        active, counted, dialect = self._active, self._call.counted, self._call.request.dialect
        try:
            async with asyncio.timeout(active.left):
                return await self._answer(self._call)
        except (asyncio.CancelledError, DisconnectedError) as left:
            active.abandoned[counted.number] = time.monotonic() - self._call.arrived
            # The same cancellation, or the attempt has ended.
            if isinstance(left, asyncio.CancelledError):
                self._record_silence()
                raise
        except (UpstreamError, RefusedError) as error:
            if not self._agent.begun:
                raise
            if dialect.reports_errors:
                event = data_event(dialect.error(502, error.code, error.message))
                with contextlib.suppress(DisconnectedError):
                    await self._agent.send(event, {})
        except TimeoutError:
            self._record_silence()
            if not self._agent.begun:
                failure = active.failures.get(counted.number, "")
                raise active.time_is_up("the model", failure) from None
        finally:
            active.call_ended(counted)
        return self._agent.abort()

    def _record_silence(self) -> None:
        call = self._call
        if not self._agent.shown:
            self._active.model_was_silent(call.counted, time.monotonic() - call.arrived)

    async def _answer(self, call: ReceivedCall) -> web.StreamResponse:
        """Answer from a record of the call if there is one, else by the policy."""
        active = self._active
        active.count_idle_call(call.counted, call.request.messages)
        if undelivered := active.take_undelivered(call.counted, call.role):
            return await self._answer_recorded(call, undelivered, undelivered)
        if call.defaults.seed is not None:
            seed = active.seed_of(question_of(call.request, call.role))
            call = replace(call, defaults=replace(call.defaults, seed=seed))
        for answer in active.answers:
            if rows := await answer(call):
                request = call.request
                new: Any = {"messages": request.messages, "tools": request.tools}
                new |= {"images": request.images, "started": time.time(), "seconds": 0.0}
                renumbered = [
                    replace(row, **self._count_row(), **new, repeats=row.repeats or row.id)
                    for row in rows
                ]
                return await self._answer_recorded(call, rows, renumbered)
        ask = partial(self._ask, call)
        return await self._upstream.retry(call.caller, call.request.model, call.counted, ask)

    async def _answer_recorded(
        self, call: ReceivedCall, rows: Sequence[Transition], stored: Sequence[Transition]
    ) -> web.StreamResponse:
        sent = SentCall(call, RECORD, "", time.time(), time.monotonic(), rows=stored)
        response = await self._deliver_recorded(sent, rows)
        self._active.call_succeeded(call.counted)
        return response

    async def _deliver_recorded(
        self, sent: SentCall, rows: Sequence[Transition]
    ) -> web.StreamResponse:
        """Send a recorded response, or a fixed text of the run file, without a server."""
        request = sent.call.request
        if request.stream:
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return await self._stream(sent, recorded.stream(rows, request), headers)
        headers = {"content-type": "application/json"}
        return await self._whole(sent, recorded.whole(rows, request), headers)

    async def _ask(self, call: ReceivedCall, route: Route) -> web.StreamResponse:
        """Try a route once; again only if the server rejects a field that recording adds to the
        call, or more tokens than fit after the prompt."""
        try:
            if route.text is not None:
                sent = SentCall(call, route, route.policy, time.time(), time.monotonic())
                rows = recorded.fixed_answer(route.text, call.request)
                return await self._deliver_recorded(sent, rows)
            gives_ids = self._upstream.gives_token_ids(route) if self._active.recorded else False
            sent = await self._prepare(call, route, capture=gives_ids is not False)
            while isinstance(answer := await self._post(sent), ServerRefusal):
                again = await self._without_refused(sent, answer, gives_ids)
                if again is None:
                    return self._refused(sent, answer)
                sent = again
        except UpstreamError as error:
            error.final = error.final or self._agent.shown
            raise
        if gives_ids is None and not sent.capture:
            self._upstream.note_token_ids(route, returned=False)
        return answer

    async def _prepare(
        self, call: ReceivedCall, route: Route, *, capture: bool, fitting: int | None = None
    ) -> SentCall:
        """Encode a call for a route's server."""
        started, at, request = time.time(), time.monotonic(), call.request
        if request.translation is not None and request.translation.begun:  # by an earlier attempt
            request = read_request(request.dialect, call.raw, self._active.memory, request.index)
            call = changed(replace(call, request=request))
            request = call.request
        auxiliary = self._upstream.router.is_auxiliary(call.role, self._active.seats)
        if not (route.frozen or auxiliary):
            if why := self._active.image_policy.rejection_reason(call, route.policy):
                call.fail(why)
                raise RefusedError(400, "not_text", why)
            warn_of_name(self._upstream, route, call.caller, request.model)
        if request.dialect.api == CHAT.api:
            messages = await self._upstream.adapt(route, request.messages)
            fields = await self._active.image_policy.sent(call, messages, route)
            request = replace(request, fields=fields)
            call = replace(call, request=request)
        body, sampling = request.encode(route, call.defaults, capture=capture, fitting=fitting)
        limit = self._upstream.max_lengths.get(route.base_url)
        # A body has at least as many bytes as tokens; if it may be too long, the server counts the
        # tokens.
        if limit and len(body) + (sampling.max_tokens or 0) > limit and not fitting:
            fitting = await find_fitting(self._upstream, route, request.fields, sampling.max_tokens)
            body, sampling = request.encode(route, call.defaults, capture=capture, fitting=fitting)
        if self._active.recorded and not (route.frozen or fitting):
            warn_of_sampling(self._upstream, route, sampling, call.defaults)
        # A role outside the agent's work is excluded from training by the name of its policy.
        untrained = auxiliary and not route.frozen
        policy = f"{route.policy}@{AUXILIARY_ROLE}" if untrained else route.policy
        return SentCall(call, route, policy, started, at, body, sampling, capture, fitting)

    async def _post(self, sent: SentCall) -> web.StreamResponse | ServerRefusal:
        call = sent.call
        api, headers = call.request.dialect.api, call.http.headers
        async with self._upstream.post(sent.route, api, sent.body, headers) as reply:
            try:
                return await self._read(sent, reply)
            except ServerRefusal as refusal:
                return refusal

    async def _without_refused(
        self, sent: SentCall, refusal: ServerRefusal, gives_ids: bool | None
    ) -> SentCall | None:
        """Prepare the call without fields that the server may have rejected; None if the agent's
        request itself is invalid. gives_ids: whether the server returns token ids, if known."""
        call, route, fitting = sent.call, sent.route, sent.fitting
        if refusal.status == 400 and fitting is None and not route.frozen:
            fields, most = call.request.fields, sent.sampling.max_tokens
            if fitting := await find_fitting(self._upstream, route, fields, most):
                return await self._prepare(call, route, capture=sent.capture, fitting=fitting)
        captures = sent.capture and gives_ids is None and not self._agent.begun
        if captures and refusal.status in REFUSED_FIELDS:
            return await self._prepare(call, route, capture=False, fitting=fitting)
        return None

    def _refused(self, sent: SentCall, refusal: ServerRefusal) -> web.Response:
        dialect, status = sent.call.request.dialect, refusal.status
        body = translate_error(dialect, status, refusal.words)
        excerpt = body[:MAX_REFUSAL_LENGTH].decode(errors="replace")
        self._active.refused = f"{status}: {excerpt}"
        if self._agent.begun:  # only SSE comments were sent
            raise UpstreamError(f"the policy server answered {self._active.refused}", final=True)
        return web.Response(status=status, body=body, content_type="application/json")

    async def _read(self, sent: SentCall, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        """Answer with the server's response. Raises ServerRefusal for a mistake of the agent."""
        route, streamed = sent.route, sent.call.request.stream
        if reply.status != 200:
            raise ServerRefusal(reply.status, await read(reply))
        if streamed != (reply.content_type == "text/event-stream"):
            raw = await read(reply)
            with contextlib.suppress(*MALFORMED):  # an error may be a single JSON document
                if error := error_in(read_chunk(raw), route, raw):
                    raise error
            form = "a stream" if streamed else "an answer in one piece"
            raise malformed(route, f"{reply.content_type} when it was asked for {form}")
        if streamed:
            return await self._stream(sent, stream(reply), reply.headers)
        return await self._whole(sent, await read(reply), reply.headers)

    async def _whole(self, sent: SentCall, raw: bytes, headers: Headers) -> web.StreamResponse:
        request, route = sent.call.request, sent.route
        response, translation = ModelResponse(request.inexact), request.translation
        with parsing(route, raw):
            part = read_chunk(raw)
            if part.may_be_error and (error := error_in(part, route, raw)):
                raise error
            response.add(part)
            body = part.encode_for(request)
        if not response.choices:
            raise malformed(route, "an answer without choices")
        if translation is not None:
            with parsing(route, raw, NO_TRANSLATION):
                body = translation.whole(msgspec.json.decode(body), len(response.prompt))
        rows = self._make_rows(AnsweredCall(sent, response, headers))
        with self._keep_undelivered(rows):
            await self._store_rows(rows)
        return web.Response(body=body, headers=forwarded(headers))

    async def _stream(
        self, sent: SentCall, parts: AsyncIterator[bytes], headers: Headers
    ) -> web.StreamResponse:
        answered = AnsweredCall(sent, ModelResponse(sent.call.request.inexact), headers)
        rows: list[Transition] = []
        try:
            end = await self._agent.relay(answered, parts)
            rows = self._make_rows(answered)
            with self._keep_undelivered(rows):
                await self._store_rows(rows)
                return await self._agent.send(end, headers)
        except (asyncio.CancelledError, DisconnectedError):
            if self._agent.shown:
                await self._store_shown(answered, rows)
            raise

    def _make_rows(self, answered: AnsweredCall) -> list[Transition]:
        """Build the rows of a response, numbered within the attempt, and log unusual properties.
        Empty for calls that are not recorded."""
        if not (active := self._active).recorded:
            return []
        sent, upstream = answered.sent, self._upstream
        choices = [choice for _, choice in sorted(answered.response.choices.items())]
        for choice in choices:
            active.memory.remember(choice.message, sent.call.request.conversation)
        if sent.rows:
            return list(sent.rows)
        if any(choice.has_token_ids for choice in choices):
            upstream.note_token_ids(sent.route, returned=True)
        common = _common_fields(answered)
        rows = [choice.transition(**self._count_row(), **common) for choice in choices]
        if not sent.route.frozen:
            warn_of_inexact(upstream, sent.route, (choice.inexact for choice in choices))
            warn_of_processors(upstream, sent.route, rows[0].processors)
        for record in active.records:
            rows = [record(sent.call, row) for row in rows]
        return rows

    def _count_row(self) -> dict[str, Any]:
        """Count another transition of the attempt, and return its identifying fields."""
        index, self._active.stored = self._active.stored, self._active.stored + 1
        fields = {"id": f"{self._active.id}-{index}", "attempt": self._active.id, "index": index}
        return fields | {"span": self._call.caller.span}

    async def _store_rows(self, rows: Sequence[Transition]) -> None:
        """Store the rows of a response and wait until they are durable."""
        if not rows:
            return
        try:
            accepted = await self._active.image_policy.add(self._store, self._call, rows)
        except StoreError as error:
            if self._active.continues_unrecorded():
                self._upstream.warn_once("calls are answered but not recorded: %s", error)
                return
            self._call.fail(message := f"the call was not stored: {error}")
            unknown = not isinstance(error, STORE_REFUSALS)
            raise NotStoredError(message, final=True, unknown=unknown) from error
        if not all(accepted) and not self._active.continues_unrecorded():
            self._active.lost = True
            over = f"attempt {self._active.id} has lost its lease"
            raise RefusedError(403, "attempt_ended", over)
        self._active.tokens += sum(len(row.completion) for row in rows)

    @contextlib.contextmanager
    def _keep_undelivered(self, rows: list[Transition]) -> Iterator[None]:
        """Keep a response for the retry if the agent has read nothing of it and it may be stored,
        even after the wait for the store was cancelled: see `Writer.post`."""
        try:
            yield
        except (asyncio.CancelledError, DisconnectedError, NotStoredError) as error:
            stored = not isinstance(error, NotStoredError) or error.unknown
            # A row that a feature has changed, for example by redaction, differs from the model's
            # answer, so it cannot answer a retry.
            if rows and stored and not (self._agent.shown or self._active.records):
                self._active.keep_undelivered(self._call.counted, self._call.role, rows)
            raise

    async def _store_shown(self, answered: AnsweredCall, rows: list[Transition]) -> None:
        """Store the part of a response that was sent to the agent, even if the caller is cancelled
        meanwhile. rows: rows that may be stored already; storing them again has no effect."""
        answered.response.cut(CUT)
        try:
            if answered.response.choices:
                rows = rows or self._make_rows(answered)
                with contextlib.suppress(asyncio.CancelledError):
                    await processes.uncancelled(self._store_rows(rows))
        except (NotStoredError, RefusedError):
            pass  # the call has failed, or was lost with the attempt's lease
        else:
            self._active.call_succeeded(self._call.counted)


def _common_fields(answered: AnsweredCall) -> dict[str, Any]:
    """Return the common fields of a response's rows."""
    sent, request, headers = answered.sent, answered.sent.call.request, answered.headers
    version = headers.get("x-policy-version", "")
    common: dict[str, Any] = {"role": sent.call.role, "policy": sent.policy}
    common |= {"started": sent.started, "seconds": time.monotonic() - sent.at}
    common |= {"version": int(version) if version.isdecimal() else sent.route.version}
    common |= {"messages": request.messages, "tools": request.tools, "ignored": request.ignored}
    if headers.get("x-processors") != "none":
        common["processors"] = request.processors
    return common | {"sampling": sent.sampling, "images": request.images}
