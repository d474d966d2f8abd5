"""The trace of an attempt: ids, headers, spans, roles."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import httpx
import pytest
from opentelemetry import trace

from agentrl.core import processes
from agentrl.runners.tracing import core as tracing


@pytest.fixture
def attempt() -> str:
    return secrets.token_hex(16)


def current() -> str:
    return format(trace.get_current_span().get_span_context().trace_id, "032x")


async def test_inside_an_attempt_its_id_is_the_trace_id_everywhere(attempt: str) -> None:
    with tracing.install().attempt(attempt):
        assert current() == attempt
        assert await asyncio.create_task(asyncio.to_thread(current)) == attempt
        assert await processes.call(current) == attempt
    assert current() != attempt


async def test_attempts_side_by_side_keep_apart() -> None:
    async def one(attempt: str) -> tuple[str, str, int]:
        with tracing.install().attempt(attempt) as left:
            await asyncio.sleep(0)
            with trace.get_tracer("agent").start_as_current_span("tool"):
                await asyncio.sleep(0)
                seen = current()
        return attempt, seen, len(tracing.records(left, attempt))

    for attempt, seen, count in await asyncio.gather(
        *(one(secrets.token_hex(16)) for _ in range(8))
    ):
        assert seen == attempt
        assert count == 2  # the tool and the attempt itself


async def test_spans_are_stored_as_a_tree(attempt: str) -> None:
    tracer = trace.get_tracer("agent")
    with tracing.install().attempt(attempt) as finished:
        with tracer.start_as_current_span("call", attributes={tracing.KIND: "TOOL", "x": 1}):
            tracer.start_span("inner").end()
        with pytest.raises(ValueError, match="no"), tracer.start_as_current_span("broken"):
            raise ValueError("no")
    spans = {span.name: span for span in tracing.records(finished, attempt)}
    root = spans["attempt"]
    assert root.parent is None
    assert (root.kind, spans["call"].kind, spans["inner"].kind) == ("agent", "tool", "internal")
    assert (spans["call"].parent, spans["inner"].parent) == (root.id, spans["call"].id)
    assert spans["call"].attributes == {"x": 1}
    assert not spans["broken"].ok
    assert all(span.attempt == attempt and span.end >= span.start > 0 for span in spans.values())


async def test_requests_carry_trace_and_role(attempt: str, model: Any) -> None:
    async with httpx.AsyncClient() as client:
        with tracing.install().attempt(attempt), tracing.role("critic a"):
            await client.post(f"{model.base_url}/completions", json={"prompt": "p"}, timeout=None)
    (headers,) = [dict(h) for h in model.headers]
    assert headers["traceparent"].split("-")[1] == attempt
    assert headers["baggage"] == "agentrl.role=critic%20a"
