"""The log of an attempt in this process: framework steps, HTTP calls, rewards, and roles.

Owns: the logs of the attempts in progress.
Invariant: code inside an attempt finds the attempt's log in its OpenTelemetry context, in any task
or thread. It finds it also after the attempt has ended, when entries are ignored, so no late call
is attributed to another attempt. Outside of attempts `current` is None.
Writer: code inside the attempt, from any thread.

The role of a call is the first of
  1. the role in the path, `/a/{attempt}/{role}/v1`;
  2. the role in the baggage, `agentrl.role`, which `agentrl.role("critic")` sets around a call;
  3. of the frameworks' names of nodes and agents around the call, the innermost known role: one
     that the run file maps to a policy or an upstream, or that has a seat in the rollout;
  4. the requested model's name, if it is a known role;
and "agent" by default. Unknown names are ignored: the node "model" inside every `create_agent` is
the agent itself. An explicit role (1, 2) need not be known. Names are read from a framework's own
context variables or from OpenTelemetry spans. Frameworks are not patched, and those that the
process has not imported are skipped.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from uuid import UUID

from opentelemetry import baggage, context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from agentrl.core.otlp import AGENT_NAME, with_current_names
from agentrl.core.types import Json, Reward, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


DEFAULT = "agent"
ROLE = "agentrl.role"  # baggage key: the explicit role
NAMES = "agentrl.names"  # baggage key: names of the steps around the call, innermost first
CREW = ("agent_execution_started", "lite_agent_execution_started")  # events of CrewAI
CREW_TASK = "task_started"


@contextmanager
def role(name: str) -> Iterator[None]:
    """Assign model calls inside the block, also in its tasks and threads, to the role `name`.

    Has no effect outside of a rollout. Raises ValueError for an empty name."""
    if not name or not isinstance(name, str):
        raise ValueError(f"a role needs a name, not {name!r}")
    if current() is None:
        yield
        return
    token = context.attach(baggage.set_baggage(ROLE, name))
    try:
        yield
    finally:
        context.detach(token)


def baggage_items(log: AttemptLog, call: HttpCall) -> list[str]:
    """Return the W3C baggage of a call: its role, or the names that determine its role, which the
    gateway reads (`agentrl.runners.gateway.attribution`)."""
    values = {key: str(value) for key, value in baggage.get_all().items()}
    if ROLE not in values:
        names = ",".join(quote(name, safe="") for name in framework_names(log, call))
        values |= {NAMES: names} if names else {}
    return [f"{key}={quote(value, safe='')}" for key, value in values.items()]


def framework_names(log: AttemptLog, call: HttpCall) -> list[str]:
    """Return the names of nodes and agents around a call, of each framework innermost first."""
    names = [*_langgraph(), *_openai_agents(), *_crewai(), *_spans(log, call)]
    return list(dict.fromkeys(filter(None, names)))


def _of(module: str, name: str) -> Any:
    """Return an attribute of a module; None if it is not imported or lacks it in this version."""
    return getattr(sys.modules.get(module), name, None)


def _langgraph() -> Iterator[str]:
    """Yield LangGraph nodes, then the name of LangChain's agent."""
    config = framework_config() or {}
    # Metadata of a single call replaces the step's metadata, but the step's callbacks still have
    # it.
    inherited = getattr(config.get("callbacks"), "inheritable_metadata", None) or {}
    metadata = {**inherited, **(config.get("metadata") or {})}
    space = metadata.get("langgraph_checkpoint_ns") or metadata.get("langgraph_node") or ""
    # "team:<task id>|model:<task id>", or the name of a node without a subgraph
    for part in reversed(str(space).split("|")):
        yield part.partition(":")[0]
    yield str(metadata.get("lc_agent_name") or "")


def _openai_agents() -> Iterator[str]:
    """Yield agents of OpenAI's Agents SDK, which has empty spans even if tracing is disabled."""
    scope = _of("agents.tracing.scope", "Scope")
    span: Any = scope.get_current_span() if scope is not None else None
    while span is not None:
        data = getattr(span, "span_data", None)
        if getattr(data, "type", "") == "agent":
            yield str(getattr(data, "name", ""))
        entered = getattr(span, "_prev_span_token", None)
        span = getattr(entered, "old_value", None)


def _crewai() -> Iterator[str]:
    """Yield roles of CrewAI agents, from the open events around the caller: of a running agent, or
    of the agent of a task whose answer is being converted."""
    stack = _of("crewai.events.event_context", "_event_id_stack")
    state = getattr(_of("crewai.events.event_bus", "crewai_event_bus"), "runtime_state", None)
    record: Any = getattr(state, "event_record", None)
    if stack is None or record is None:
        return
    for id, kind in reversed(stack.get()):
        event = getattr(record.get(id), "event", None)
        if kind in CREW:
            info: Any = getattr(event, "agent_info", None) or {}
            role = getattr(getattr(event, "agent", None), "role", None) or info.get("role")
            yield str(role or "").strip()
        elif kind == CREW_TASK:
            agent = getattr(getattr(event, "task", None), "agent", None)
            yield str(getattr(agent, "role", "")).strip()


def _spans(log: AttemptLog, call: HttpCall) -> Iterator[str]:
    """Yield agents of frameworks with OpenTelemetry spans: AutoGen, Agent Framework, Pydantic AI
    and others."""
    for inside in call.inside:
        span = log.started_spans.get(int(inside, 16))
        while span is not None:
            yield str(with_current_names(span.attributes or {}).get(AGENT_NAME, ""))
            span = log.started_spans.get(span.parent.span_id) if span.parent is not None else None


Recorded = Callable[[], str | None] | None  # returns the span id in another tracer
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
MODEL_ROUTE = re.compile(r"/(?:completions|responses|messages)$|[gG]enerateContent(?:\?|$)")
KEY = context.create_key("agentrl-journal")
Place = tuple[int, int]  # ids of a thread and of its task
NO_TASK = 0  # for a thread without an event loop, such as a sync agent's
_open: dict[int, AttemptLog] = {}  # trace id -> log
# The step of the LangChain model that is being called, because `batch` of a sequence sets no
# context for it.
model_step: ContextVar[str | None] = ContextVar("agentrl_model_step", default=None)
_latest: ContextVar[HttpCall | None] = ContextVar("agentrl_latest_call", default=None)


@dataclass(slots=True, eq=False)
class HttpCall:
    """An outgoing HTTP request. `inside`: ids of the spans around it, innermost first."""

    id: str
    inside: tuple[str, ...]
    before: HttpCall | None  # the previous call in its context
    around: HttpCall | None  # the call that was being sent when this one began
    asks_model: bool  # at the gateway; other requests may reach it through a proxy
    ended: bool = False


class FrameworkStep(NamedTuple):
    """A running or finished step of a framework."""

    name: str
    kind: str
    parent: str
    around: str  # the current OpenTelemetry span at its start
    start: int
    recorded: Recorded


@dataclass(slots=True, eq=False)
class AttemptLog:
    """The log of one attempt. Span ids are 16 hex digits, times unix nanoseconds."""

    attempt: str
    root: str
    start: int = field(default_factory=time.time_ns)
    spans: list[Span] = field(default_factory=list)  # finished spans of this log
    started_spans: dict[int, ReadableSpan] = field(default_factory=dict)  # SDK spans by id
    finished: list[ReadableSpan] = field(default_factory=list)  # ended SDK spans
    rewards: list[Reward] = field(default_factory=list)  # targets may be span ids of calls
    calls: list[HttpCall] = field(default_factory=list)
    steps: dict[str, FrameworkStep] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)  # keys of `steps`
    needs_no_call: bool = False  # success without a model call is correct here
    ended: bool = False
    homes: set[Place] = field(default_factory=set)  # the agent's own tasks and threads

    def enter(
        self, step: str, name: str, kind: str, parent: str | None, recorded: Recorded = None
    ) -> None:
        """Begin a framework's step inside the step `parent`, by default inside the current span. A
        step that another tracer has `recorded` does not become a span here."""
        around = _current_span_id()
        outer = parent if parent is not None and parent in self.steps else around
        self.steps[step] = FrameworkStep(name, kind, outer, around, time.time_ns(), recorded)
        self.running.add(step)

    def leave(self, step: str, ok: bool = True, attributes: dict[str, Json] | None = None) -> None:
        """End a step; has no effect if it is not running."""
        if step not in self.running:
            return
        self.running.discard(step)
        begun = self.steps[step]
        if begun.recorded is None:
            about = {"name": begun.name, "kind": begun.kind, "parent": begun.parent}
            self._add(begun.start, id=step, ok=ok, attributes=attributes or {}, **about)

    def inside(self) -> tuple[str, ...]:
        """Return the ids of the spans around the caller, innermost first, ending with the root."""
        current, path = _current_span_id(), []
        asking = model_step.get() or ""
        step = asking if asking in self.running else framework_step() or ""
        if step in self.steps and self.steps[step].around != current:
            path.append(current)  # a span of user code inside the step
        while step in self.steps:
            path.append(step)
            step = self.steps[step].parent
        outer = (step, current, self.root) if path else (current, self.root)
        return tuple(dict.fromkeys((*path, *outer)))

    @contextmanager
    def call(self, name: str, url: str, attributes: dict[str, Json]) -> Iterator[HttpCall]:
        """Log a request that is sent inside the block; the block completes `attributes`."""
        id, asks_model = secrets.token_hex(8), name == "POST" and _is_model_url(url)
        call = HttpCall(id, self.inside(), _latest.get(), being_sent(), asks_model)
        self.calls.append(call)
        _latest.set(call)
        start, ok = time.time_ns(), False
        token = context.attach(_context(self.attempt, call.id, context.get_current()))
        try:
            yield call
            ok = attributes.get("http.response.status_code", 0) < 400
        finally:
            call.ended = True
            context.detach(token)
            around = self.steps.get(call.inside[0])
            recorded = around.recorded() if around and around.recorded else None
            parent = recorded or call.inside[0]
            about = {"name": name, "kind": "internal", "parent": parent}
            self._add(start, id=call.id, ok=ok, attributes=attributes, **about)

    def latest(self) -> list[HttpCall]:
        """Return the HTTP calls that may be the latest model call, the latest first. The list ends
        with a call to a model; the calls before it belong to a tool, or reach the gateway through a
        proxy. The latest call is that of the caller's context, else of the innermost enclosing span
        with one; calls of parallel branches that began later are ignored."""
        latest_calls, calls, last = list[HttpCall](), self.calls, _latest.get()
        while call := self._latest_of(calls, last):
            calls, last = calls[: calls.index(call)], call.before
            while call.around is not None and call.around.ended:
                call = call.around  # sent by the HTTP client of this call, such as its transport
            if call not in latest_calls:
                latest_calls.append(call)
            if call.asks_model:
                break
        return latest_calls

    def _latest_of(self, calls: list[HttpCall], last: HttpCall | None) -> HttpCall | None:
        for span in self.inside():
            for call in reversed(calls):
                if span in call.inside and (last is None or _comes_after(call, last)):
                    return call
        return None

    def close(self) -> None:
        self.ended = True
        for step in sorted(self.running.copy(), key=lambda step: -self.steps[step].start):
            self.leave(step, ok=False)
        self._add(self.start, id=self.root, name="attempt", kind="agent", parent=None)

    def _add(self, start: int, **about: Any) -> None:
        end = max(start, time.time_ns())
        self.spans.append(Span(attempt=self.attempt, start=start, end=end, **about))


def being_sent() -> HttpCall | None:
    """Return the request that is being sent around the caller, for example an httpx request that is
    sent by aiohttp."""
    call = _latest.get()
    while call is not None and call.ended:
        call = call.around
    return call


def current() -> AttemptLog | None:
    """Return the log of the caller's attempt, None outside of attempts."""
    log = context.get_value(KEY)
    return log if isinstance(log, AttemptLog) else None


def enter_agent() -> None:
    """Note that the agent itself, not something that it started, runs in this task or thread."""
    if log := current():
        log.homes.add(place())


def place() -> Place:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        task = None
    return threading.get_ident(), NO_TASK if task is None else id(task)


@contextmanager
def open_log(attempt: str) -> Iterator[AttemptLog]:
    """Run the block in the trace of `attempt` (32 hex digits), with a new log."""
    trace_id = int(attempt, 16)
    log = _open[trace_id] = AttemptLog(attempt, secrets.token_hex(8))
    inside = context.set_value(KEY, log, context.Context())
    token = context.attach(_context(attempt, log.root, inside))
    latest = _latest.set(None)
    try:
        yield log
    finally:
        del _open[trace_id]
        _latest.reset(latest)
        context.detach(token)
        log.close()


def of_span(span: ReadableSpan) -> AttemptLog | None:
    """Return the log of the attempt of an OpenTelemetry SDK span."""
    return _open.get(span.context.trace_id) if span.context else None


def framework_config() -> Any:
    """Return the LangChain or LangGraph config of the running step, if any."""
    module = sys.modules.get("langchain_core.runnables.config")
    variable = getattr(module, "var_child_runnable_config", None)
    return None if variable is None else variable.get()


def framework_step() -> str | None:
    """Return the span id of the LangChain or LangGraph step around the caller, if any."""
    config = framework_config()
    run = getattr(config.get("callbacks"), "parent_run_id", None) if config else None
    return None if run is None else step_id(run)


def step_id(run: UUID) -> str:
    """Return the span id of a LangChain run: the random half of its UUID."""
    return run.hex[16:]


def _is_model_url(url: str) -> bool:
    gateway = os.environ.get("OPENAI_BASE_URL", "").removesuffix("/v1")
    return bool(gateway) and url.startswith(gateway) and bool(MODEL_ROUTE.search(url))


def _comes_after(call: HttpCall | None, earlier: HttpCall) -> bool:
    while call is not None and call is not earlier:
        call = call.before
    return call is not None


def _current_span_id() -> str:
    return format(trace.get_current_span().get_span_context().span_id, "016x")


def _context(attempt: str, span: str, outer: context.Context) -> context.Context:
    identity = SpanContext(int(attempt, 16), int(span, 16), is_remote=False, trace_flags=SAMPLED)
    return trace.set_span_in_context(NonRecordingSpan(identity), outer)
