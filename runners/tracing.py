"""An attempt is an OpenTelemetry trace: its id is the trace id of every span and model call in it.

Owns: the span lists of the attempts in progress.
Always true: inside `attempt(id)` the current trace id is `id`, in the task, in threads that copied
its context and in every request of httpx and httpx2, whose W3C headers name it.
Who may write: OpenTelemetry's span processor hook, from any thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import msgspec
from opentelemetry import baggage, context, trace
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor, HTTPXClientInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import (
    NonRecordingSpan,
    ProxyTracerProvider,
    SpanContext,
    StatusCode,
    TraceFlags,
)

from agentrl.errors import ConfigError
from agentrl.runners.attribution import ROLE
from agentrl.types import Span

KIND = "openinference.span.kind"
KINDS = frozenset({"agent", "chain", "tool", "llm"})


@cache
def install() -> Tracing:
    """The process's tracing: joins the SDK provider that the user set up, or sets up one.

    Call it after the agent's module was imported, so that a provider set there is the one joined.
    Clients that exist by then are traced all the same."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        unset = isinstance(provider, ProxyTracerProvider)
        provider = TracerProvider()
        if unset:
            trace.set_tracer_provider(provider)
    for instrumentor in (HTTPXClientInstrumentor(), HTTPX2ClientInstrumentor()):
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(tracer_provider=provider)
    return Tracing(provider)


def instrument_frameworks() -> None:
    """Also record the steps of LangChain and LangGraph as spans.

    Raises ConfigError when the package that does it is missing."""
    try:
        from openinference.instrumentation.langchain import LangChainInstrumentor
    except ImportError as error:
        raise ConfigError(
            "runner.framework_spans needs the package openinference-instrumentation-langchain;"
            " install it, or remove the setting"
        ) from error
    instrumentor = LangChainInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument()


class Tracing(SpanProcessor):
    """Runs attempts inside their traces and collects the spans they finish."""

    def __init__(self, provider: TracerProvider) -> None:
        self._spans: dict[int, list[ReadableSpan]] = {}
        self._tracer = provider.get_tracer("agentrl")
        provider.add_span_processor(self)

    @contextmanager
    def attempt(self, attempt: str) -> Iterator[list[ReadableSpan]]:
        """Run the block in the trace of `attempt` (32 hex digits); gives the spans that finish."""
        trace_id = int(attempt, 16)
        parent = SpanContext(
            trace_id, secrets.randbits(64) | 1, is_remote=True, trace_flags=TraceFlags(1)
        )
        spans = self._spans[trace_id] = []
        outer = trace.set_span_in_context(NonRecordingSpan(parent), context.Context())
        try:
            with self._tracer.start_as_current_span(
                "attempt", context=outer, attributes={KIND: "AGENT"}
            ):
                yield spans
        finally:
            del self._spans[trace_id]

    def on_end(self, span: ReadableSpan) -> None:
        spans = self._spans.get(span.context.trace_id) if span.context else None
        if spans is not None:
            spans.append(span)


@contextmanager
def role(name: str) -> Iterator[None]:
    """Model calls made inside the block belong to the role `name`."""
    token = context.attach(baggage.set_baggage(ROLE, name))
    try:
        yield
    finally:
        context.detach(token)


def records(spans: list[ReadableSpan], attempt: str) -> list[Span]:
    """Finished spans as they are stored; a parent outside of the attempt is left out."""
    known = {span.context.span_id for span in spans if span.context}
    return [_record(span, attempt, known) for span in spans if span.context]


def _record(span: ReadableSpan, attempt: str, known: set[int]) -> Span:
    attributes = dict(span.attributes or {})
    kind = str(attributes.pop(KIND, "")).lower()
    parent = span.parent.span_id if span.parent and span.parent.span_id in known else None
    assert span.context is not None
    return Span(
        id=format(span.context.span_id, "016x"),
        attempt=attempt,
        parent=None if parent is None else format(parent, "016x"),
        name=span.name,
        kind=kind if kind in KINDS else "internal",
        start=span.start_time or 0,
        end=span.end_time or 0,
        ok=span.status.status_code is not StatusCode.ERROR,
        attributes=msgspec.to_builtins(attributes, enc_hook=str),
    )
