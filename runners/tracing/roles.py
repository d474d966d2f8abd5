"""Determines the role that makes a model call inside a multi-agent system.

The role of a call is the first of
  1. the role in the path, `/a/{attempt}/{role}/v1`;
  2. the role in the baggage, `agentrl.role`, which `agentrl.role("critic")` sets around a call;
  3. of the frameworks' names of nodes and agents around the call, the innermost known role: one
     that the run file maps to a policy or an upstream, or that has a seat in the rollout;
  4. the requested model's name, if it is a known role;
and "agent" by default. Unknown names are ignored: the node "model" inside every `create_agent` is
the agent itself. An explicit role (1, 2) need not be known.

Names are read from a framework's own context variables or from OpenTelemetry spans. Frameworks are
not patched, and those that the process has not imported are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from opentelemetry import baggage, context

from agentrl.base.span_names import AGENT_NAME, with_current_names
from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing.attempt_log import AttemptLog, HttpCall

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
    if attempt_log.current() is None:
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
    found = [*_langgraph(), *_openai_agents(), *_crewai(), *_spans(log, call)]
    return list(dict.fromkeys(filter(None, found)))


def _of(module: str, name: str) -> Any:
    """Return an attribute of a module; None if it is not imported or lacks it in this version."""
    return getattr(sys.modules.get(module), name, None)


def _langgraph() -> Iterator[str]:
    """Yield LangGraph nodes, then the name of LangChain's agent."""
    config = attempt_log.framework_config() or {}
    # What a caller gives as metadata of one call replaces the step's, which its callbacks keep.
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
    """Yield roles of CrewAI agents, from the open events around the caller: of an agent at work, or
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
