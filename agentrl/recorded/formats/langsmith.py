"""LangSmith: run trees and feedback, as its client's `Run` and `Feedback` and its bulk export
write them (JSON, JSON lines, parquet), nested `child_runs` too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    "llm": "llm",
    "tool": "tool",
    "chain": "chain",
    "retriever": "tool",
    "prompt": "internal",
    "parser": "internal",
}


def is_run(row: Object) -> bool:
    """Whether it is a run of LangSmith."""
    return "run_type" in row and "id" in row


def is_feedback(row: Object) -> bool:
    """Whether it is feedback of LangSmith."""
    return "key" in row and "run_id" in row and "score" in row


def read_feedback(row: Object, issues: Issues) -> Iterator[Node | Note]:
    """Feedback on a run; a value that is not a number becomes text."""
    value = number(row.get("score"))
    text = str(first(row, "comment") or "")
    if value is None and row.get("value") is not None:
        text = f"{row['value']} {text}".strip()
    yield Note(
        trace=str(row.get("trace_id") or ""),
        node=str(row.get("run_id") or ""),
        name=str(row["key"]),
        value=value,
        text=text,
        correction=parsed(row.get("correction")),
        source="langsmith",
        key=str(row.get("id") or ""),
    )


def read_run(row: Object, issues: Issues) -> Iterator[Node | Note]:
    """A run and its descendants, with their feedback."""
    above = _above(row)
    trace = str(first(row, "trace_id") or next(iter(above), row["id"]))
    yield _node(row, trace)
    for note in rows(row.get("feedback")):
        yield from read_feedback({"run_id": row["id"], "trace_id": trace, **obj(note)}, issues)
    for key, stats in obj(row.get("feedback_stats")).items():
        if obj(stats).get("n") == 1:  # a mean of several values is not one person's feedback
            value = number(obj(stats).get("avg"))
            yield Note(
                trace=trace,
                node=str(row["id"]),
                name=str(key),
                value=value,
                source="langsmith",
                derived=True,
            )
        elif obj(stats).get("n"):
            issues.add(
                "feedback of several people is there as a mean only, and is left out", str(key)
            )
    for child in rows(row.get("child_runs")):
        if is_run(obj(child)):
            parent = {"parent_run_id": row["id"], "trace_id": trace}
            yield from read_run(parent | {k: v for k, v in child.items() if v is not None}, issues)


def _above(row: Object) -> list[str]:
    """The ids of the runs above a run, from the root on, in its dotted order: TIMEZid.TIMEZid. Bulk
    exports may have no other parent."""
    order = str(row.get("dotted_order") or "").split(".")
    return [part.partition("Z")[2] for part in order[:-1]]


def _node(row: Object, trace: str) -> Node:
    extra, inputs, outputs = (
        obj(row.get("extra")),
        parsed(row.get("inputs")),
        parsed(row.get("outputs")),
    )
    metadata = obj(extra.get("metadata"))
    kind = KINDS.get(str(row["run_type"]), "internal")
    role = first(metadata, "langgraph_node", "lc_agent_name") or ""
    if not role and kind == "chain" and metadata.get("ls_agent_type"):
        role = row.get("name")
    call = _call(row, extra, metadata, inputs, outputs) if kind == "llm" else None
    failed = row.get("status") == "error" or (kind == "tool" and messages.has_failed(outputs))
    return Node(
        trace=trace,
        id=str(row["id"]),
        parent=str(row.get("parent_run_id") or next(reversed(_above(row)), "")),
        name=str(row.get("name") or ""),
        kind=kind,
        start=nanoseconds(row.get("start_time")),
        end=nanoseconds(row.get("end_time")),
        error=str(row.get("error") or ("it failed" if failed else "")),
        role=str(role),
        input=_plain(inputs),
        output=_plain(outputs),
        call=call,
        tool=_tool(row, inputs, outputs) if kind == "tool" else None,
        about=_usage(row, metadata, outputs),
    )


def _plain(value: Any) -> Any:
    """The value of inputs or outputs with a single field."""
    inner = obj(value)
    (name, *more) = inner or [""]
    return inner[name] if name in ("input", "output") and not more else value


def _usage(row: Object, metadata: Object, outputs: Any) -> Object:
    counted = {
        "input": first(row, "prompt_tokens")
        or obj(metadata.get("usage_metadata")).get("input_tokens"),
        "output": first(row, "completion_tokens")
        or obj(metadata.get("usage_metadata")).get("output_tokens"),
    }
    cost = row.get("total_cost")
    return usage(counted, float(cost) if isinstance(cost, str) and cost else cost)


def _call(row: Object, extra: Object, metadata: Object, inputs: Any, outputs: Any) -> Call:
    options = obj(extra.get("invocation_params"))
    tools = first(options, "tools", "functions") or obj(inputs).get("tools")
    # Some tracers write the messages of a chat model as one text, in `prompts`, which cannot be
    # split into messages.
    history = first(obj(inputs), "messages", "prompt", "input", "contents")
    prompt = messages.messages_of(
        history if history is not None or "prompts" in obj(inputs) else inputs
    )
    if isinstance(inputs, dict) and history is not None:
        prompt = [*messages.system_of(inputs), *prompt]
    answer = messages.answer_of(outputs)
    generation = messages.choice_of(obj(outputs))
    message = messages.langchain_fields(obj(generation.get("message")))
    info = obj(generation.get("generation_info")) | obj(message.get("response_metadata"))
    model = (
        first(info, "model_name")
        or obj(outputs).get("model")
        or first(options, "model", "model_name")
        or metadata.get("ls_model_name")
    )
    return Call(
        messages=prompt,
        answer=answer,
        tools=messages.tools_of(tools),
        model=str(model or ""),
        finish=messages.finish_of(obj(outputs)),
        sampling=sampling(options, metadata),
    )


def _tool(row: Object, inputs: Any, outputs: Any) -> ToolUse:
    arguments = _plain(inputs)
    if isinstance(arguments, str) and arguments[:1] == "{":
        arguments = python_object(arguments)
    result = _plain(outputs)
    result = obj(result).get("output", result) if isinstance(result, dict) else result
    return ToolUse(
        str(row.get("name") or ""),
        arguments,
        None if result is None else messages.result_text(result),
    )
