"""OpenAI: stored completions and responses with their messages, traces of the Agents SDK."""

from __future__ import annotations

from collections.abc import Iterator

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
    obj,
    parsed,
    sampling,
    usage,
)

KINDS = {
    "agent": "agent",
    "function": "tool",
    "generation": "llm",
    "response": "llm",
    "handoff": "internal",
    "guardrail": "internal",
    "mcp_tools": "internal",
    "custom": "internal",
    "task": "agent",
}


def is_trace(row: Object) -> bool:
    """Whether it is a trace or a span of the Agents SDK."""
    return row.get("object") in ("trace", "trace.span")


def read_trace(row: Object, issues: Issues) -> Iterator[Node | Note]:
    """A trace or a span in the format of the Agents SDK's exporter."""
    if row["object"] == "trace":
        return  # the spans have everything except the workflow's name
    data, id = obj(row.get("span_data")), str(row.get("id") or "")
    trace, kind = str(row.get("trace_id") or ""), str(data.get("type") or "")
    if not (trace and id):
        issues.add("a span has no ids and is left out", str(data.get("name"))[:80])
        return
    error = obj(row.get("error"))
    times = nanoseconds(row.get("started_at")), nanoseconds(row.get("ended_at"))
    call = tool = None
    if kind in ("generation", "response"):
        call = _call(data, issues)
    elif kind == "function":
        result = data.get("output")
        tool = ToolUse(
            str(data.get("name") or ""),
            parsed(data.get("input")),
            None if result is None else messages.result_text(result),
        )
    inner = obj(data.get("data"))
    role = data.get("name") if kind in ("agent", "task") else inner.get("agent_name")
    counted = obj(data.get("usage")) or obj(obj(data.get("response")).get("usage"))
    yield Node(
        trace=trace,
        id=id,
        parent=str(row.get("parent_id") or ""),
        name=str(data.get("name") or kind),
        kind=KINDS.get(kind, "internal"),
        start=times[0],
        end=times[1],
        error=str(error.get("message") or "it failed") if error else "",
        role=str(role or ""),
        input=parsed(data.get("input")),
        output=parsed(data.get("output")),
        call=call,
        tool=tool,
        about=usage(counted),
    )


def _call(data: Object, issues: Issues) -> Call:
    response, options = obj(data.get("response")), obj(data.get("model_config"))
    if data.get("type") == "response" and not response:
        issues.add(
            "a response is given only by its id, so its call has no answer",
            str(data.get("response_id"))[:80],
        )
    prompt = messages.messages_of(data.get("input"))
    if instructions := response.get("instructions"):
        prompt = [messages.message_of({"role": "system", "content": instructions}), *prompt]
    answer = messages.answer_of(first(response, "output") or data.get("output"))
    tools = messages.tools_of(first(response, "tools") or data.get("tools"))
    model = first(response, "model") or data.get("model")
    finish = messages.finish_of(response)
    return Call(
        messages=prompt,
        answer=answer,
        tools=tools,
        model=str(model or ""),
        finish=finish,
        sampling=sampling(options, response),
    )


def is_completion(row: Object) -> bool:
    """Whether a row is a completion or a response, alone or with its request."""
    body = row.get("response") if isinstance(row.get("response"), dict) else row
    return obj(body).get("object") in ("chat.completion", "response")


def read_completion(row: Object, issues: Issues) -> Iterator[Node | Note]:
    """A trace of one call from a stored completion or response, with its `messages` (a list, or the
    API's object with messages), `input` or `request`."""
    body, request = row, obj(row.get("request"))
    if isinstance(row.get("response"), dict):
        body = row["response"]
    id = str(body.get("id") or "")
    history = (
        first(row, "messages", "input_messages")
        or first(request, "messages", "input")
        or body.get("input")
    )
    history = first(obj(history), "data") or history
    prompt = messages.messages_of(history)
    if instructions := first(request, "instructions") or body.get("instructions"):
        prompt = [messages.message_of({"role": "system", "content": instructions}), *prompt]
    if not prompt:
        issues.add("a stored completion has no messages: download them, too (list_messages)", id)
    answer = messages.answer_of(body)
    tools = messages.tools_of(first(body, "tools") or request.get("tools"))
    start = nanoseconds(first(body, "created", "created_at"))
    metadata = obj(body.get("metadata")) or obj(request.get("metadata"))
    role = str(first(metadata, "agent", "role", "node") or "")
    yield Node(
        trace=str(metadata.get("trace_id") or id),
        id=id,
        name="chat",
        kind="llm",
        start=start,
        end=start,
        role=role,
        input=history,
        output=answer,
        call=Call(
            messages=prompt,
            answer=answer,
            tools=tools,
            model=str(body.get("model") or ""),
            finish=messages.finish_of(body),
            sampling=sampling(body, request),
        ),
        about=usage(body.get("usage")),
    )
