"""The agents around a model call, by the names that their frameworks gave them.

Always true: what is read here is what a framework keeps for itself, in its own context variables or
in spans of OpenTelemetry; nothing of it is changed, and what is not imported is not looked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing.attempt_log import AttemptLog, HttpCall

AGENT_NAME = "gen_ai.agent.name"  # OpenTelemetry's semantic conventions for generative AI

CREW = ("agent_execution_started", "lite_agent_execution_started")  # events of CrewAI


def names(log: AttemptLog, call: HttpCall) -> list[str]:
    """Nodes and agents around a call that is being sent, of each framework innermost first."""
    found = [*_langgraph(), *_openai_agents(), *_crewai(), *_spans(log, call)]
    return list(dict.fromkeys(filter(None, found)))


def _of(module: str, name: str) -> Any:
    """An object of a module; None where that is not imported, or another version has no such."""
    return getattr(sys.modules.get(module), name, None)


def _langgraph() -> Iterator[str]:
    """LangGraph nodes, then the name of LangChain's agent."""
    config = attempt_log.framework_config()
    said = (config.get("metadata") or {}) if config else {}
    space = said.get("langgraph_checkpoint_ns") or said.get("langgraph_node") or ""
    # "team:<task id>|model:<task id>"; the parts of a node that has no subgraph are its name
    for part in reversed(str(space).split("|")):
        yield part.partition(":")[0]
    yield str(said.get("lc_agent_name") or "")


def _openai_agents() -> Iterator[str]:
    """Agents of OpenAI's Agents SDK, whose spans are there, and empty, where it does not trace."""
    scope = _of("agents.tracing.scope", "Scope")
    span: Any = scope.get_current_span() if scope is not None else None
    while span is not None:
        data = getattr(span, "span_data", None)
        if getattr(data, "type", "") == "agent":
            yield str(getattr(data, "name", ""))
        entered = getattr(span, "_prev_span_token", None)
        span = getattr(entered, "old_value", None)


def _crewai() -> Iterator[str]:
    """Agents of CrewAI, by their role: events that have begun around the caller, and not ended."""
    stack = _of("crewai.events.event_context", "_event_id_stack")
    state = getattr(_of("crewai.events.event_bus", "crewai_event_bus"), "runtime_state", None)
    record: Any = getattr(state, "event_record", None)
    if stack is None or record is None:
        return
    for id, kind in reversed(stack.get()):
        if kind in CREW:
            event = getattr(record.get(id), "event", None)
            told: Any = getattr(event, "agent_info", None) or {}
            role = getattr(getattr(event, "agent", None), "role", None) or told.get("role")
            yield str(role or "").strip()


def _spans(log: AttemptLog, call: HttpCall) -> Iterator[str]:
    """Agents whose framework tells OpenTelemetry of them: AutoGen, Agent Framework and others."""
    for inside in call.inside:
        span = log.started_spans.get(int(inside, 16))
        while span is not None:
            yield str((span.attributes or {}).get(AGENT_NAME, ""))
            span = log.started_spans.get(span.parent.span_id) if span.parent is not None else None
