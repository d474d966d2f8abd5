"""An attempt as an OpenTelemetry trace: its id is the trace id of its spans and model calls.

Owns: the patches, applied once per process, of HTTP clients, threads and tracers; the logs belong
to `attempt_log`.
Invariant: inside `attempt(id)` the current trace id is `id`, in its tasks and threads and in the
W3C headers of every HTTP request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import cache, partial, wraps
from typing import Any

import msgspec
from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.context import Context as TraceContext
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import ProxyTracerProvider, StatusCode

from agentrl.core.otlp import DESCRIPTION, KIND, kind_of
from agentrl.core.types import Span
from agentrl.runners.tracing import attempt_log, http_clients, langchain_steps, shared_servers
from agentrl.runners.tracing.attempt_log import AttemptLog, role

__all__ = ["KIND", "Tracing", "install", "records", "role"]


@cache
def install() -> Tracing:
    """Set up tracing for the process, with the user's SDK tracer provider or a new one.

    Call it after the import of the agent's module, which may set a provider. Clients that exist
    already are traced too."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        unset = isinstance(provider, ProxyTracerProvider)
        provider = TracerProvider()
        if unset:
            trace.set_tracer_provider(provider)
    http_clients.install()
    shared_servers.install()
    _patch_imported()
    _inherit_in_threads()
    return Tracing(provider)


def _inherit_in_threads() -> None:
    """Let threads inherit the attempt of their starter, like asyncio tasks.

    Python starts a thread with an empty context (until 3.14's `-X thread_inherit_context`), so its
    model calls would belong to no rollout. Inside attempts, and only there, a thread starts in a
    copy of its starter's context, and so does each work item of a `ThreadPoolExecutor`. A thread
    started inside one attempt that also serves others belongs to the first: pass it work with
    `submit`, `asyncio.run_coroutine_threadsafe`, or the context of the caller."""
    start = threading.Thread.start
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    @wraps(start)
    def start_inside(self: threading.Thread) -> None:
        if attempt_log.current() is not None:
            vars(self)["run"] = partial(_run, self, self.run, copy_context())
        start(self)

    @wraps(submit)
    def submit_inside(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if attempt_log.current() is None:
            return submit(self, fn, *args, **kwargs)
        item = partial(copy_context().run, fn)
        # From an empty context: a worker thread that starts now will serve other attempts too.
        return Context().run(submit, self, item, *args, **kwargs)

    setattr(threading.Thread, "start", start_inside)  # noqa: B010 - mypy refuses the assignment
    setattr(ThreadPoolExecutor, "submit", submit_inside)  # noqa: B010


def _run(thread: threading.Thread, run: Callable[[], None], inherited: Context) -> None:
    try:
        inherited.run(run)
    finally:
        vars(thread).pop("run", None)  # breaks the reference cycle with the thread


def _patch_imported() -> None:
    """Patch what the process has imported by now, each module once."""
    langchain_steps.install()
    shared_servers.install_imported()


class Tracing(SpanProcessor):
    """Runs attempts inside their traces and collects the SDK spans that end in them."""

    def __init__(self, provider: TracerProvider) -> None:
        provider.add_span_processor(self)

    @contextmanager
    def attempt(self, attempt: str) -> Iterator[AttemptLog]:
        """Run the block in the trace of `attempt` (32 hex digits); yields its log."""
        _patch_imported()  # at each attempt: an agent may import LangChain when it is called
        with attempt_log.open_log(attempt) as log:
            yield log

    def on_start(self, span: ReadableSpan, parent_context: TraceContext | None = None) -> None:
        if (log := attempt_log.of_span(span)) and span.context:
            log.started_spans[span.context.span_id] = span

    def on_end(self, span: ReadableSpan) -> None:
        if log := attempt_log.of_span(span):
            log.finished.append(span)


def records(log: AttemptLog, attempt: str) -> list[Span]:
    """Convert finished spans to records. The attempt's root replaces a parent that was not
    recorded, because it had not ended or was not sampled."""
    recorded: set[str | None] = {None, *(span.id for span in log.spans)}
    recorded |= {_hex(span.context.span_id) for span in log.finished if span.context}
    spans = [*log.spans, *(_record(span, attempt, log.root) for span in log.finished)]
    return [s if s.parent in recorded else replace(s, parent=log.root) for s in spans]


def _record(span: ReadableSpan, attempt: str, root: str) -> Span:
    assert span.context is not None
    attributes = dict(span.attributes or {})
    kind = kind_of(attributes)
    if span.status.description:
        attributes[DESCRIPTION] = span.status.description
    return Span(
        id=_hex(span.context.span_id),
        attempt=attempt,
        parent=_hex(span.parent.span_id) if span.parent else root,
        name=span.name,
        kind=kind,
        start=span.start_time or 0,
        end=span.end_time or 0,
        ok=span.status.status_code is not StatusCode.ERROR,
        attributes=msgspec.to_builtins(attributes, enc_hook=str),
    )


def _hex(span_id: int) -> str:
    return format(span_id, "016x")
