"""`agentrl export traces`: traces of a store in the formats of other tools.

It exports any run, not only imported traces. Each format is a file of JSON lines that the tool's
own parser accepts, and that `agentrl traces import` reads back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from agentrl.algorithms.conversations import conversations_of
from agentrl.core.errors import ConfigError, NotFound
from agentrl.core.files import make_folder, partial_name
from agentrl.core.otlp import AGENT_NAME, DESCRIPTION, json_of
from agentrl.core.types import Reward, Scope, Span, Trace, Transition
from agentrl.recorded.nodes import Object, obj, parsed
from agentrl.recorded.training import traces as traces_of
from agentrl.store import open_store
from agentrl.telemetry.otlp import spans_of


async def export_traces(store_url: str, run: str, form: str, path: Path) -> tuple[int, int]:
    """Write the traces of a run, whole or not at all; returns the numbers of traces and of lines.
    Raises NotFound for an unknown run, ConfigError if it has no traces."""
    traces = lines = 0
    async with open_store(store_url, readonly=True) as store:
        if await store.run(run) is None:
            raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
        make_folder(path.parent)
        partial = partial_name(path)
        try:
            with partial.open("wb") as file:
                async for trace in traces_of(store, run):
                    traces += 1
                    for row in FORMS[form](trace):
                        file.write(msgspec.json.encode(row) + b"\n")
                        lines += 1
            if not traces:
                raise ConfigError(f"run {run!r} has no traces yet")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return traces, lines


def as_otlp(trace: Trace) -> Iterator[Object]:
    """An ExportTraceServiceRequest in OTLP's JSON."""
    yield json_of(spans_of(trace), {"service.name": "agentrl"})


def as_phoenix(trace: Trace) -> Iterator[Object]:
    """Spans and annotations of Phoenix' API."""
    spans = spans_of(trace)
    for span in spans:
        yield {
            "id": span.id,
            "name": span.name,
            "context": {"trace_id": trace.attempt, "span_id": span.id},
            "span_kind": span.kind.upper() if span.kind != "internal" else "UNKNOWN",
            "parent_id": span.parent,
            "start_time": _iso(span.start),
            "end_time": _iso(span.end),
            "status_code": "OK" if span.ok else "ERROR",
            "status_message": _error(span),
            "attributes": span.attributes,
            "events": [],
        }
    for reward, span_id in _feedback(trace, spans):
        yield {
            "span_id": span_id,
            "name": reward.name,
            "annotator_kind": "CODE",
            "result": {"score": reward.value, "explanation": reward.note},
        }


def as_langsmith(trace: Trace) -> Iterator[Object]:
    """Runs and feedback of LangSmith."""
    spans = spans_of(trace)
    calls = _calls(trace, spans)
    ids = {span.id: _uuid(trace.attempt, span.id) for span in spans}
    orders: dict[str, str] = {}
    root = spans[0].id
    for span in _from_root(spans):
        stamp = datetime.fromtimestamp(span.start / 1e9, UTC).strftime("%Y%m%dT%H%M%S%fZ")
        before = orders.get(span.parent or "")
        orders[span.id] = f"{before + '.' if before else ''}{stamp}{ids[span.id]}"
        inputs, outputs = _values(span, trace, calls.get(span.id))
        call = calls.get(span.id)
        metadata: Object = {
            "langgraph_node": call.role if call else span.attributes.get(AGENT_NAME)
        }
        extra: Object = {"metadata": {k: v for k, v in metadata.items() if v is not None}}
        if call:
            parameters = {"model": call.policy, "temperature": call.sampling.temperature}
            extra["invocation_params"] = parameters | ({"tools": call.tools} if call.tools else {})
            extra["metadata"]["ls_model_name"] = call.policy
        yield {
            "id": ids[span.id],
            "name": span.name,
            "run_type": _kind(span),
            "extra": extra,
            "start_time": _iso(span.start),
            "end_time": _iso(span.end),
            "inputs": inputs,
            "outputs": outputs,
            "error": _error(span) or None,
            "trace_id": ids[root],
            "parent_run_id": ids.get(span.parent or ""),
            "dotted_order": orders[span.id],
            "session_id": None,
            "app_path": "",
            "tags": [],
            "serialized": None,
            "events": [],
            "prompt_tokens": len(call.prompt) or None if call else None,
            "completion_tokens": len(call.completion) or None if call else None,
        }
    now = _iso(max(span.end for span in spans))
    for reward, span_id in _feedback(trace, spans):
        yield {
            "id": _uuid(ids[span_id], reward.name + reward.source),
            "run_id": ids[span_id],
            "trace_id": ids[root],
            "key": reward.name,
            "score": reward.value,
            "value": None,
            "comment": reward.note or None,
            "correction": None,
            "created_at": now,
            "modified_at": now,
        }


def as_langfuse(trace: Trace) -> Iterator[Object]:
    """A trace of Langfuse with observations and scores."""
    spans = spans_of(trace)
    calls = _calls(trace, spans)
    root, id = spans[0], trace.attempt
    inputs, outputs = _values(root, trace, None)
    observed: list[Object] = []
    for span in spans:
        call = calls.get(span.id)
        span_input, span_output = _values(span, trace, call)
        kind = {"llm": "GENERATION", "internal": "SPAN"}.get(span.kind, span.kind.upper())
        row: Object = {
            "id": span.id,
            "traceId": id,
            "projectId": "agentrl",
            "type": kind,
            "name": span.name,
            "parentObservationId": span.parent,
            "startTime": _iso(span.start),
            "endTime": _iso(span.end),
            "level": "DEFAULT" if span.ok else "ERROR",
            "statusMessage": _error(span) or None,
            "input": span_input,
            "output": span_output,
            "metadata": {"langgraph_node": call.role if call else span.attributes.get(AGENT_NAME)},
        }
        if call:
            row["model"] = call.policy
            row["modelParameters"] = {"temperature": call.sampling.temperature}
            row["input"] = (
                {"messages": call.messages, "tools": call.tools} if call.tools else call.messages
            )
            row["output"] = call.answer
        observed.append(row)
    scores = [
        {
            "id": _uuid(span_id, reward.name + reward.source),
            "traceId": id,
            "name": reward.name,
            "observationId": None if span_id == root.id else span_id,
            "value": reward.value,
            "dataType": "NUMERIC",
            "source": "API",
            "comment": reward.note or None,
            "timestamp": _iso(root.end),
            "createdAt": _iso(root.end),
            "updatedAt": _iso(root.end),
            "environment": "default",
        }
        for reward, span_id in _feedback(trace, spans)
    ]
    yield {
        "id": id,
        "name": root.name,
        "timestamp": _iso(root.start),
        "input": inputs,
        "output": outputs,
        "observations": observed,
        "scores": scores,
    }


def as_atif(trace: Trace) -> Iterator[Object]:
    """A trajectory of Harbor: the first conversation, and the others as those of subagents."""
    trajectories = [
        _trajectory(trace, role, conversation, number)
        for role in dict.fromkeys(call.role for call in trace.transitions)
        for number, conversation in enumerate(
            conversations_of(c for c in trace.transitions if c.role == role)
        )
    ]
    if trajectories:
        outer, *inner = trajectories
        outer["session_id"] = trace.attempt
        if inner:
            outer["subagent_trajectories"] = inner
        rewards = {
            row.name: row.value for row in trace.rollout.rewards if row.scope is Scope.ROLLOUT
        }
        yield outer | ({"extra": {"rewards": rewards}} if rewards else {})


def _trajectory(trace: Trace, role: str, conversation: Object, number: int) -> Object:
    steps: list[Object] = []
    for index, message in enumerate(conversation["messages"]):
        text = message.get("content")
        if message["role"] == "tool" and steps:
            result = {
                "source_call_id": message.get("tool_call_id"),
                "content": _text(text),
            }
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"assistant": "agent", "system": "system"}.get(message["role"], "user")
        step: Object = {"step_id": len(steps) + 1, "source": source, "message": _text(text)}
        if source == "agent":
            if thought := message.get("reasoning_content"):
                step["reasoning_content"] = thought
            if index not in conversation["imitate"]:
                step["llm_call_count"] = 0
            if calls := message.get("tool_calls"):
                step["tool_calls"] = [
                    {
                        "tool_call_id": c.get("id") or "",
                        "function_name": c["function"]["name"],
                        "arguments": obj(c["function"]["arguments"]),
                    }
                    for c in calls
                ]
        steps.append(step)
    agent: Object = {
        "name": role,
        "version": "unknown",
        "tool_definitions": conversation["tools"] or None,
    }
    id = f"{trace.attempt}-{role}-{number}"
    return {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": id,
        "agent": {k: v for k, v in agent.items() if v},
        "steps": steps,
    }


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(obj(part).get("text") or "") for part in content)
    return content or ""


def as_chats(trace: Trace) -> Iterator[Object]:
    """Rows of chats, one for each conversation, with the role and the rewards of the trace."""
    rewards = {row.name: row.value for row in trace.rollout.rewards if row.scope is Scope.ROLLOUT}
    for role in dict.fromkeys(call.role for call in trace.transitions):
        calls = [call for call in trace.transitions if call.role == role]
        for number, conversation in enumerate(conversations_of(calls)):
            about: Object = {"id": f"{trace.attempt}-{role}-{number}", "role": role}
            yield about | conversation | ({"feedback": rewards} if rewards else {})


FORMS: dict[str, Callable[[Trace], Iterator[Object]]] = {
    "otlp": as_otlp,
    "phoenix": as_phoenix,
    "langsmith": as_langsmith,
    "langfuse": as_langfuse,
    "atif": as_atif,
    "chats": as_chats,
}


def _calls(trace: Trace, spans: list[Span]) -> dict[str, Transition]:
    """The calls by the ids of their spans."""
    by_call = {call.id: call for call in trace.transitions}
    named = ((span.id, span.attributes.get("agentrl.transition")) for span in spans)
    return {id: by_call[str(call)] for id, call in named if str(call) in by_call}


def _values(span: Span, trace: Trace, call: Transition | None) -> tuple[Object, Object]:
    """The input and the output of a span, as objects."""
    if call:
        choice = {"index": 0, "message": call.answer, "finish_reason": call.finish or None}
        inputs: Object = {"messages": call.messages}
        return inputs, {"choices": [choice], "model": call.policy}
    attributes = span.attributes
    if span.kind == "tool":
        span_input = attributes.get("gen_ai.tool.call.arguments")
        span_output = attributes.get("gen_ai.tool.call.result")
    else:
        span_input = parsed(attributes.get("input.value"))
        span_output = parsed(attributes.get("output.value"))
    return _object(span_input, "input"), _object(span_output, "output")


def _object(value: Any, name: str) -> Object:
    """A value as an object: unchanged if it is one, else in a field of this name."""
    if isinstance(value, str) and value[:1] == "{":
        value = parsed(value)
    if isinstance(value, dict):
        return value
    return {} if value is None else {name: value}


def _kind(span: Span) -> str:
    return span.kind if span.kind in ("llm", "tool") else "chain"


def _error(span: Span) -> str:
    return "" if span.ok else str(span.attributes.get(DESCRIPTION) or "it failed")


def _feedback(trace: Trace, spans: list[Span]) -> Iterator[tuple[Reward, str]]:
    """The rewards, each with the id of the span that was rewarded."""
    by_call = {span.attributes.get("agentrl.transition"): span.id for span in spans}
    by_role = {str(span.attributes.get(AGENT_NAME)): span.id for span in reversed(spans)}
    for reward in trace.rollout.rewards:
        places = by_call if reward.scope is Scope.TRANSITION else by_role
        about = None if reward.scope is Scope.ROLLOUT else places.get(reward.target or "")
        yield reward, about or spans[0].id


def _from_root(spans: list[Span]) -> list[Span]:
    """Spans in depth-first order: each comes after its parent and its earlier siblings."""
    below: dict[str | None, list[Span]] = {}
    for span in spans:
        below.setdefault(span.parent, []).append(span)
    ordered, pending = [], [spans[0]]
    while pending:
        ordered.append(span := pending.pop())
        pending += reversed(below.get(span.id, []))
    return ordered


def _iso(time: int) -> str:
    return datetime.fromtimestamp(time / 1e9, UTC).isoformat().replace("+00:00", "Z")


def _uuid(*names: str) -> str:
    return str(UUID(sha256("/".join(names).encode()).hexdigest()[:32], version=4))
