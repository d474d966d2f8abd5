"""One model call from request to answer: forward, capture, store, then let the last byte go.

Always true: nothing is repeated once the agent has a byte of the answer; an answer that breaks
after that cuts the agent's connection, because any other end would look complete.
"""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from agentrl.errors import StoreError
from agentrl.runners.attribution import Caller, RefusedError
from agentrl.runners.capture import Answer, read_call, transition
from agentrl.runners.roles import role_of_model
from agentrl.runners.upstream import Upstream, UpstreamError, events, forwarded
from agentrl.store.base import Store
from agentrl.types import PolicyVersion, Transition


class DisconnectedError(Exception):
    """The agent closed its connection before the answer was complete."""


class Exchange:
    """Owns one request of an agent and its answer."""

    def __init__(
        self, upstream: Upstream, store: Store, caller: Caller, request: web.Request, api: str
    ) -> None:
        self._upstream, self._store, self._caller = upstream, store, caller
        self._request, self._api = request, api
        self._started = 0.0  # unix seconds
        self._sent: web.StreamResponse | None = None  # once the agent has the first byte

    async def run(self) -> web.StreamResponse:
        """Raises UpstreamError when there is no answer and none can come in time, RefusedError when
        the attempt ended meanwhile, msgspec.DecodeError when the request is not a JSON object."""
        live = self._caller.live
        index, live.calls = live.calls, live.calls + 1
        sampling = live.attempt.rollout.sampling
        self._call = call = read_call(self._api, await self._request.read(), sampling, index)
        try:
            return await self._upstream.retry(live, call.model, call.key, self._forward)
        except DisconnectedError:
            return self._cut()
        except (UpstreamError, RefusedError):
            if self._sent is None:
                raise
            return self._cut()

    def _cut(self) -> web.StreamResponse:
        if self._request.transport is not None:
            self._request.transport.abort()
        assert self._sent is not None
        return self._sent

    async def _forward(self, policy: PolicyVersion) -> web.StreamResponse:
        try:
            return await self._once(policy)
        except UpstreamError as error:
            error.final = error.final or self._sent is not None
            raise

    async def _once(self, policy: PolicyVersion) -> web.StreamResponse:
        self._started = time.time()
        url = f"{policy.base_url}/{self._api}"
        body = self._call.encode(policy.model)
        async with self._upstream.post(url, body, forwarded(self._request.headers)) as reply:
            if reply.status != 200:  # the agent's own mistake, in the server's words
                headers = forwarded(reply.headers)
                return web.Response(status=reply.status, body=await reply.read(), headers=headers)
            if reply.content_type == "text/event-stream":
                return await self._stream(policy, reply)
            return await self._whole(policy, reply)

    async def _whole(
        self, policy: PolicyVersion, reply: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        answer = Answer()
        content, _ = self._read(await reply.read(), answer, policy)
        if not answer.choices:
            raise self._bad(policy, "an answer without choices")
        await self._keep(answer, policy, reply)
        return web.Response(body=self._call.tidy(content), headers=forwarded(reply.headers))

    async def _stream(
        self, policy: PolicyVersion, reply: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        answer, held = Answer(), []  # held: what an agent may take for the end
        async for event in events(reply.content.iter_any()):
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                held.append(event)
            elif not event.startswith(b"data:"):  # a comment that keeps the connection alive
                await self._send(event, reply)
            else:
                content, final = self._read(data, answer, policy)
                tidy = b"data: " + self._call.tidy(content) + b"\n\n"
                if final:
                    held.append(tidy)
                else:
                    await self._send(tidy, reply)
        if not answer.complete:
            raise self._bad(policy, "half a stream")
        await self._keep(answer, policy, reply)
        return await self._send(b"".join(held), reply)

    async def _send(self, data: bytes, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        try:
            if self._sent is None:
                self._sent = web.StreamResponse(headers=forwarded(reply.headers))
                await self._sent.prepare(self._request)
            await self._sent.write(data)
        except ConnectionError as error:
            raise DisconnectedError from error
        return self._sent

    def _read(
        self, raw: bytes, answer: Answer, policy: PolicyVersion
    ) -> tuple[dict[str, Any], bool]:
        try:
            content = msgspec.json.decode(raw, type=dict[str, Any])
            return content, answer.absorb(content)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, AttributeError):
            text = raw[:200].decode(errors="replace")
            raise self._bad(policy, f"what is not a completion: {text}") from None

    def _bad(self, policy: PolicyVersion, what: str) -> UpstreamError:
        message = f"the policy server at {policy.base_url} sent {what}"
        return UpstreamError(message, transient=False)

    async def _keep(
        self, answer: Answer, policy: PolicyVersion, reply: aiohttp.ClientResponse
    ) -> None:
        """Returns when the transitions are durable."""
        live = self._caller.live
        rows = self._transitions(answer, policy, reply.headers.get("x-policy-version", ""))
        try:
            kept = await self._store.add_transitions(rows)
        except StoreError as error:
            raise UpstreamError(f"the call was not stored: {error}", final=True) from error
        if not all(kept):
            raise RefusedError(403, "attempt_ended", f"attempt {live.id} has lost its lease")

    def _transitions(self, answer: Answer, policy: PolicyVersion, version: str) -> list[Transition]:
        live, rows = self._caller.live, []
        for _, choice in sorted(answer.choices.items()):
            index, live.stored = live.stored, live.stored + 1
            row = transition(
                choice,
                self._call,
                id=f"{live.id}-{index}",
                attempt=live.id,
                index=index,
                role=role_of_model(self._caller.role, self._call.model, live.roles),
                policy=policy.policy,
                version=int(version) if version.isdigit() else policy.version,
                span=self._caller.span,
                started=self._started,
                seconds=time.time() - self._started,
            )
            rows.append(row)
        return rows
