"""An attempt is an OpenTelemetry trace: its id is the trace id of every span and model call in it.

Owns: what the process is taught once, so that its clients, threads, frameworks and tracers take
part; the logs belong to `attempt_log`.
Always true: inside `attempt(id)` the current trace id is `id`, in its tasks and threads and in
every request of the HTTP clients, whose W3C headers name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import ProxyTracerProvider, StatusCode

from agentrl.errors import ConfigError
from agentrl.otlp import DESCRIPTION, KIND, kind_of
from agentrl.runners.tracing import attempt_log, http_clients, thread_context
from agentrl.runners.tracing import langchain as steps
from agentrl.runners.tracing.attempt_log import AttemptLog
from agentrl.runners.tracing.roles import role
from agentrl.types import Span

__all__ = ["KIND", "Tracing", "install", "instrument_frameworks", "records", "role"]


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
    http_clients.install()
    thread_context.install()
    return Tracing(provider)


def instrument_frameworks() -> None:
    """Also record what the steps of LangChain and LangGraph say, as spans of OpenInference.

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
    steps.set_recorder(instrumentor.get_span)


class Tracing(SpanProcessor):
    """Runs attempts inside their traces and notes the spans that end in them."""

    def __init__(self, provider: TracerProvider) -> None:
        provider.add_span_processor(self)

    @contextmanager
    def attempt(self, attempt: str) -> Iterator[AttemptLog]:
        """Run the block in the trace of `attempt` (32 hex digits); gives what it leaves behind."""
        steps.install()  # here, not at the start: an agent may import LangChain when it is called
        with attempt_log.open_log(attempt) as log:
            yield log

    def on_start(self, span: ReadableSpan, parent_context: Context | None = None) -> None:
        attempt_log.span_started(span)

    def on_end(self, span: ReadableSpan) -> None:
        attempt_log.span_ended(span)


def records(log: AttemptLog, attempt: str) -> list[Span]:
    """Finished spans as they are stored. One whose parent was not recorded, because it had not
    ended or was not sampled, is a child of the attempt."""
    known = {span.id for span in log.spans}
    known |= {_hex(span.context.span_id) for span in log.finished if span.context}
    own = [
        span if span.parent is None or span.parent in known else _adopt(span, log)
        for span in log.spans
    ]
    return own + [_record(span, attempt, known, log.root) for span in log.finished]


def _adopt(span: Span, log: AttemptLog) -> Span:
    return msgspec.structs.replace(span, parent=log.root)


def _record(span: ReadableSpan, attempt: str, known: set[str], root: str) -> Span:
    assert span.context is not None
    attributes = dict(span.attributes or {})
    kind = kind_of(attributes)
    if span.status.description:
        attributes[DESCRIPTION] = span.status.description
    parent = _hex(span.parent.span_id) if span.parent else root
    return Span(
        id=_hex(span.context.span_id),
        attempt=attempt,
        parent=parent if parent in known else root,
        name=span.name,
        kind=kind,
        start=span.start_time or 0,
        end=span.end_time or 0,
        ok=span.status.status_code is not StatusCode.ERROR,
        attributes=msgspec.to_builtins(attributes, enc_hook=str),
    )


def _hex(span_id: int) -> str:
    return format(span_id, "016x")
