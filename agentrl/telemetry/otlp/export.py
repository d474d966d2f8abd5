"""Sends traces of a run to an OTLP/HTTP receiver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from gzip import compress

import httpx

from agentrl.base.otlp import PROTOBUF, encode
from agentrl.errors import AgentRLError, NotFound, Unavailable
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.telemetry.otlp.genai import spans_of
from agentrl.types import Span

ROUTE = "/v1/traces"
SPANS_PER_REQUEST = 500  # unless one attempt has more
MOST_TRIES = 6
FIRST_PAUSE = 0.5  # seconds before the second try; doubles
TRANSIENT = frozenset({429, 502, 503, 504})  # retryable statuses of the OTLP specification
REQUEST_TIMEOUT = 30.0  # seconds of one request


async def send(
    store_url: str, run: str, rollouts: Sequence[str], url: str, headers: Mapping[str, str]
) -> tuple[int, int]:
    """Send traces; returns the numbers of attempts and spans. Raises NotFound for an unknown run or
    rollout, Unavailable if the receiver is unreachable, AgentRLError if it refuses spans."""
    attempts = spans = 0
    target = url if url.rstrip("/").endswith(ROUTE) else url.rstrip("/") + ROUTE
    about = {"service.name": "agentrl", "openinference.project.name": run}
    async with (
        open_store(store_url, readonly=True) as store,
        httpx.AsyncClient(timeout=REQUEST_TIMEOUT, headers=dict(headers)) as client,
    ):
        batch: list[Span] = []
        async for found in _traces(store, run, rollouts):
            attempts, spans = attempts + 1, spans + len(found)
            if batch and len(batch) + len(found) > SPANS_PER_REQUEST:
                await _post(client, target, encode(batch, about))
                batch = []
            batch += found
        if batch:
            await _post(client, target, encode(batch, about))
    return attempts, spans


async def _traces(store: Store, run: str, rollouts: Sequence[str]) -> AsyncIterator[list[Span]]:
    if await store.run(run) is None:
        raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
    for rollout in rollouts or [row.id for row in await store.rollouts(run) if row.attempt]:
        trace = await store.trace(rollout)
        if trace is None or trace.rollout.run != run:
            raise NotFound(f"run {run!r} has no rollout {rollout!r} with an attempt to send")
        yield spans_of(trace)


async def _post(client: httpx.AsyncClient, url: str, body: bytes) -> None:
    headers = {"content-type": PROTOBUF, "content-encoding": "gzip"}
    failure, pause = "", 0.0
    for attempt in range(MOST_TRIES):
        await asyncio.sleep(pause)
        pause = FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0)
        try:
            answer = await client.post(url, content=compress(body), headers=headers)
        except httpx.TransportError as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        if answer.status_code not in TRANSIENT:
            return _accept(answer)
        failure = f"status {answer.status_code}"
        wait = answer.headers.get("retry-after", "")
        pause = float(wait) if wait.isdigit() else pause
    raise Unavailable(
        f"nothing receives traces at {url} ({failure}); start the receiver and try again"
    )


def _accept(answer: httpx.Response) -> None:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    if not answer.is_success:
        key = "give its key with --header 'Authorization=...'"
        hint = key if answer.status_code in (401, 403) else f"{answer.text:.200}"
        raise AgentRLError(
            f"{answer.url} refuses the traces with status {answer.status_code}: {hint}"
        )
    if answer.headers.get("content-type", "").startswith(PROTOBUF):
        try:
            response = trace_service_pb2.ExportTraceServiceResponse.FromString(answer.content)
        except DecodeError:
            raise AgentRLError(
                f"{answer.url} did not answer with OTLP; is it the URL of an OTLP/HTTP receiver?"
            ) from None
        partial = response.partial_success
        if partial.rejected_spans:
            reason = partial.error_message or "no reason given"
            raise AgentRLError(f"{answer.url} rejected {partial.rejected_spans} spans: {reason}")
