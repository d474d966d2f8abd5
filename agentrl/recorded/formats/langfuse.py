"""Langfuse: traces, observations and scores of its API and its exports, and the attributes of its
SDK's spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from agentrl.recorded import messages
from agentrl.recorded.nodes import (
    Call,
    Issues,
    Node,
    Note,
    Object,
    ToolUse,
    first,
    nanoseconds,
    number,
    obj,
    parsed,
    python_object,
    rows,
    sampling,
    usage,
)

KINDS = {
    "generation": "llm",
    "tool": "tool",
    "agent": "agent",
    "chain": "chain",
    "span": "chain",
    "retriever": "tool",
    "embedding": "internal",
    "evaluator": "internal",
    "guardrail": "internal",
    "event": "internal",
}


def is_observation(row: Object) -> bool:
    """Whether it is an observation of Langfuse."""
    kind = str(row.get("type") or "").lower()
    return kind in KINDS and _field(row, "trace_id") is not None and "id" in row


def is_trace(row: Object) -> bool:
    """Whether it is a trace of Langfuse with its observations."""
    return isinstance(row.get("observations"), list) and ("id" in row or "trace" in row)


def is_score(row: Object) -> bool:
    """Whether it is a score of Langfuse."""
    kind = _field(row, "data_type")
    subject = obj(row.get("subject"))
    return kind is not None and "name" in row and bool(_field(row, "trace_id") or subject)


def _field(row: Object, name: str) -> Any:
    """A field that the API writes as camelCase and the SDK's objects as snake_case."""
    head, *tail = name.split("_")
    return first(row, name, head + "".join(part.title() for part in tail))


def read_trace(row: Object, issues: Issues) -> Iterator[Node | Note]:
    """A trace with its observations and scores, as downloaded in the UI."""
    about = obj(row.get("trace")) or row
    id = str(about.get("id") or "")
    observed = [
        obj(observation) for observation in row["observations"] if isinstance(observation, dict)
    ]
    roots = [
        observation for observation in observed if not _field(observation, "parent_observation_id")
    ]
    own_root = len(roots) != 1 or not _covers_trace(roots[0], about)
    if own_root:
        yield Node(
            trace=id,
            id=f"trace-{id}",
            name=str(about.get("name") or "trace"),
            kind="chain",
            start=nanoseconds(about.get("timestamp")),
            input=parsed(about.get("input")),
            output=parsed(about.get("output")),
        )
    for observation in observed:
        if own_root and not _field(observation, "parent_observation_id"):
            observation = {**observation, "parentObservationId": f"trace-{id}"}
        yield from read_observation({"traceId": id, "type": "SPAN", **observation}, issues)
    for score in rows(about.get("scores")) or rows(row.get("scores")):
        yield from read_score({"traceId": id, **obj(score)}, issues)


def _covers_trace(root: Object, trace: Object) -> bool:
    """Whether an observation has the input and output of its trace, where the trace has them."""
    return all(
        trace.get(name) in (None, "") or parsed(trace[name]) == parsed(root.get(name))
        for name in ("input", "output")
    )


def read_observation(row: Object, issues: Issues) -> Iterator[Node | Note]:
    """An observation with its scores."""
    kind = KINDS.get(str(row.get("type") or "").lower(), "internal")
    error = str(_field(row, "status_message") or "it failed") if row.get("level") == "ERROR" else ""
    counted = obj(_field(row, "usage_details")) or obj(row.get("usage"))
    cost = (
        _field(row, "total_cost")
        or obj(_field(row, "cost_details")).get("total")
        or _field(row, "calculated_total_cost")
    )
    node = Node(
        trace=str(_field(row, "trace_id")),
        id=str(row.get("id") or ""),
        parent=str(_field(row, "parent_observation_id") or ""),
        name=str(row.get("name") or ""),
        kind=kind,
        start=nanoseconds(_field(row, "start_time")),
        end=nanoseconds(_field(row, "end_time")),
        error=error,
        input=row.get("input"),
        output=row.get("output"),
        about=usage(counted, _number(cost)),
    )
    model = str(row.get("model") or _field(row, "provided_model_name") or "")
    yield _completed(node, model, obj(_field(row, "model_parameters")), obj(row.get("metadata")))
    for score in rows(row.get("scores")):
        ids = {"traceId": _field(row, "trace_id"), "observationId": row.get("id")}
        yield from read_score(ids | obj(score), issues)


def of_attributes(node: Node, attributes: Object) -> Node:
    """The node of a span that Langfuse's SDK sends, with these attributes."""
    fields = {
        key.removeprefix("langfuse.observation."): v
        for key, v in attributes.items()
        if key.startswith("langfuse.observation.")
    }
    metadata = {
        k.removeprefix("metadata."): parsed(v)
        for k, v in fields.items()
        if k.startswith("metadata.")
    }
    kind = KINDS.get(str(fields.get("type") or "span").lower(), "internal")
    error = node.error
    if fields.get("level") == "ERROR":
        error = error or str(fields.get("status_message") or "it failed")
    input_value = fields["input"] if "input" in fields else attributes.get("langfuse.trace.input")
    output = fields["output"] if "output" in fields else attributes.get("langfuse.trace.output")
    about = usage(fields.get("usage_details"), obj(fields.get("cost_details")).get("total"))
    node = replace(node, kind=kind, error=error, input=input_value, output=output, about=about)
    model, options = str(fields.get("model.name") or ""), obj(fields.get("model.parameters"))
    return _completed(node, model, options, metadata)


def _completed(node: Node, model: str, options: Object, metadata: Object) -> Node:
    """A node with its call or its use of a tool, and its role. node: its input and output may be
    texts of JSON."""
    call = tool = None
    if node.kind == "llm":
        history, tools = split_tools(messages_with_tools(node.input))
        call = Call(
            messages=messages.messages_of(history),
            answer=messages.answer_of(node.output),
            tools=tools,
            model=model,
            finish=messages.finish_of(obj(node.output)),
            sampling=sampling(options),
        )
    elif node.kind == "tool":
        arguments = python_object(node.input) if isinstance(node.input, str) else node.input
        result = None if node.output is None else messages.result_text(node.output)
        tool = ToolUse(node.name, arguments, result)
        if messages.has_failed(node.output):
            node = replace(node, error=node.error or "it failed")
    role = first(metadata, "langgraph_node", "agent_name")
    role = str(role or (node.name if node.kind == "agent" else ""))
    input_value, output = parsed(node.input), parsed(node.output)
    return replace(node, role=role, call=call, tool=tool, input=input_value, output=output)


def messages_with_tools(value: Any) -> list[Any]:
    """The messages of a generation as a list, also from an object with messages and tools."""
    body = obj(value)
    if (inner := first(body, "messages", "input", "contents")) is not None and "role" not in body:
        config = obj(body.get("config"))
        tools = messages.tools_of(first(body, "tools") or config.get("tools"))
        return [
            *messages.system_of(body),
            *(inner if isinstance(inner, list) else [{"role": "user", "content": inner}]),
            *({"role": "tool", "content": tool} for tool in tools),
        ]
    return rows(value) or ([value] if value else [])


def split_tools(entries: list[Any]) -> tuple[list[Any], list[Object]]:
    """The messages, and the tools: Langfuse's LangChain handler records the tools of a call as
    messages of the role tool whose content is a definition."""
    history, tools = [], []
    for entry in entries:
        content = parsed(obj(entry).get("content"))
        if (
            obj(entry).get("role") == "tool"
            and not obj(entry).get("tool_call_id")  # answers in JSON have one, too
            and isinstance(content, dict)
            and messages.tool_of(content)
            and ("function" in content or "parameters" in content or "input_schema" in content)
        ):
            tools.append(messages.tool_of(content))
        else:
            history.append(entry)
    return history, tools


def read_score(row: Object, issues: Issues) -> Iterator[Node | Note]:
    """A score. A categorical score has a number only if its configuration defines one: the API
    writes 0 otherwise."""
    subject = obj(row.get("subject"))
    trace = str(
        _field(row, "trace_id")
        or (subject.get("id") if subject.get("kind") == "trace" else _field(subject, "trace_id"))
        or ""
    )
    node = str(
        _field(row, "observation_id")
        or (subject.get("id") if subject.get("kind") == "observation" else "")
        or ""
    )
    kind = str(_field(row, "data_type") or "")
    value = _number(row.get("value"))
    if kind == "CATEGORICAL" and not _field(row, "config_id"):
        value = None
    text = str(row.get("comment") or "")
    correction = row.get("value") if kind == "CORRECTION" else None
    if value is None or kind == "CATEGORICAL":
        label = _field(row, "string_value") or (
            row.get("value") if isinstance(row.get("value"), str) else ""
        )
        text = f"{label} {text}".strip()
    yield Note(
        trace=trace,
        node=node,
        name=str(row["name"]),
        value=value,
        text=text,
        correction=parsed(correction),
        source="langfuse",
        key=str(row.get("id") or ""),
    )


def _number(value: Any) -> float | None:
    """A number, also in the text of a CSV file."""
    try:
        return number(float(value) if isinstance(value, str) else value)
    except ValueError:
        return None
