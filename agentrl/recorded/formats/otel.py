"""Spans of OpenTelemetry: OTLP in JSON, the SDKs' own JSON, and Phoenix's exports of both kinds.

Attributes follow the current semantic conventions for generative AI (`gen_ai.input.messages`),
their two older forms (`gen_ai.prompt.0.content`, and events such as `gen_ai.user.message`), or
OpenInference (`llm.input_messages.0.message.role`). Langfuse's SDK also sends OTLP, with its own
attributes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from agentrl.core.otlp import AGENT_NAME, TOOL_NAME, kind_of, with_current_names
from agentrl.recorded import messages
from agentrl.recorded.formats import langfuse
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
    rows,
    sampling,
    usage,
)

Item = Node | Note


def is_otlp(row: Object) -> bool:
    """Whether it is a request of OTLP in JSON."""
    return "resourceSpans" in row or "resource_spans" in row


def read_otlp(row: Object, issues: Issues) -> Iterator[Item]:
    """An ExportTraceServiceRequest, such as a line of the collector's file exporter."""
    for resource in rows(first(row, "resourceSpans", "resource_spans")):
        shared = attributes_of(obj(resource.get("resource")).get("attributes"))
        for scope in rows(
            first(resource, "scopeSpans", "scope_spans", "instrumentationLibrarySpans")
        ):
            for span in rows(scope.get("spans")):
                if isinstance(span, dict):
                    yield from _span(span, obj(scope.get("scope")), shared, issues)


def attributes_of(pairs: Any) -> Object:
    """OTLP's list of keys and values as an object."""
    if isinstance(pairs, dict):
        return pairs
    return {
        str(p["key"]): _value(p.get("value"))
        for p in rows(pairs)
        if isinstance(p, dict) and "key" in p
    }


def _value(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return value if not isinstance(value, dict) else None
    ((kind, inner), *_) = value.items()
    if kind in ("intValue", "int_value"):
        return int(inner) if str(inner).lstrip("-").isdigit() else inner
    if kind in ("arrayValue", "array_value"):
        return [_value(item) for item in rows(obj(inner).get("values"))]
    if kind in ("kvlistValue", "kvlist_value"):
        return attributes_of(obj(inner).get("values"))
    return inner


def _span(span: Object, scope: Object, shared: Object, issues: Issues) -> Iterator[Item]:
    trace = _hex(first(span, "traceId", "trace_id"), 32)
    id = _hex(first(span, "spanId", "span_id"), 16)
    if not (trace and id):
        issues.add("a span has no ids and is left out", str(span.get("name"))[:80])
        return
    status = obj(span.get("status"))
    attributes = _whole_lists(attributes_of(span.get("attributes")), span.get("name"), issues)
    events = [
        (str(e.get("name")), attributes_of(e.get("attributes")))
        for e in rows(span.get("events"))
        if isinstance(e, dict)
    ]
    failed = status.get("code") in (2, "2", "STATUS_CODE_ERROR", "ERROR")
    about = {"service": shared["service.name"]} if shared.get("service.name") else {}
    if scope.get("name"):
        about["instrumentation"] = f"{scope['name']} {scope.get('version') or ''}".strip()
    node = Node(
        trace=trace,
        id=id,
        parent=_hex(first(span, "parentSpanId", "parent_span_id"), 16),
        name=str(span.get("name") or ""),
        start=nanoseconds(first(span, "startTimeUnixNano", "start_time_unix_nano")),
        end=nanoseconds(first(span, "endTimeUnixNano", "end_time_unix_nano")),
        error=str(status.get("message") or "it failed") if failed else "",
        about=about,
    )
    yield from span_items(node, attributes, events)


def _hex(value: Any, size: int) -> str:
    """An id in hexadecimal; the standard JSON of protobuf has base64."""
    text = str(value or "").removeprefix("0x")
    if len(text) == size or not text:
        return "" if set(text) <= {"0"} else text.lower()
    try:
        decoded = base64.b64decode(text, validate=True).hex()
    except ValueError:
        return text
    return decoded if len(decoded) == size else text


def is_span(row: Object) -> bool:
    """Whether it is a span as SDKs (`to_json`) and Phoenix write it, also with dotted columns."""
    return ("context" in row and "trace_id" in obj(row["context"])) or "context.trace_id" in row


def read_span(row: Object, issues: Issues) -> Iterator[Item]:
    """A span of an SDK or of Phoenix, with its annotations."""
    row = nested(row)
    context, attributes = obj(row.get("context")), flat(obj(row.get("attributes")))
    if kind := first(row, "span_kind"):
        attributes.setdefault("openinference.span.kind", kind)
    status = row.get("status")
    code = first(obj(status), "status_code", "code") or first(row, "status_code")
    failed = str(code).upper().endswith("ERROR")
    message = first(obj(status), "description", "message") or first(row, "status_message")
    events = [
        (str(e.get("name")), flat(obj(e.get("attributes"))))
        for e in rows(row.get("events"))
        if isinstance(e, dict)
    ]
    trace = str(context.get("trace_id") or "").removeprefix("0x")
    id = str(context.get("span_id") or "").removeprefix("0x")
    if not (trace and id):
        issues.add("a span has no ids and is left out", str(row.get("name"))[:80])
        return
    attributes = _whole_lists(attributes, row.get("name"), issues)
    node = Node(
        trace=trace,
        id=id,
        parent=str(row.get("parent_id") or "").removeprefix("0x"),
        name=str(row.get("name") or ""),
        start=nanoseconds(row.get("start_time")),
        end=nanoseconds(row.get("end_time")),
        error=str(message or "it failed") if failed else "",
    )
    yield from span_items(node, attributes, events)
    for note in rows(row.get("annotations")):
        yield from read_annotation({"span_id": id, **obj(note)}, issues)


def is_annotation(row: Object) -> bool:
    """Whether it is an annotation of Phoenix."""
    return "annotator_kind" in row and ("span_id" in row or "trace_id" in row)


def read_annotation(row: Object, issues: Issues) -> Iterator[Item]:
    """An annotation of a span or trace, as Phoenix' API and its exports have it."""
    result = obj(row.get("result")) or row
    yield Note(
        trace=str(row.get("trace_id") or "").removeprefix("0x"),
        node=str(row.get("span_id") or "").removeprefix("0x"),
        name=str(first(row, "name", "annotation_name") or "annotation"),
        value=number(result.get("score")),
        text=str(first(result, "explanation", "label") or ""),
        source=str(row.get("annotator_kind") or "feedback").lower(),
        key=str(row.get("id") or ""),
    )


def nested(row: Object) -> Object:
    """A row with the dotted columns of Phoenix' data frames as objects."""
    if "context.trace_id" not in row:
        return row
    grouped: Object = {"context": {}, "attributes": {}}
    for key, value in row.items():
        head, _, tail = key.partition(".")
        if value is None:
            continue
        if head in ("context", "attributes") and tail:
            grouped[head][tail] = value
        else:
            grouped[key] = value
    return grouped


def flat(attributes: Object, prefix: str = "") -> Object:
    """Attributes by dotted names, from dotted names or from objects and lists of objects."""
    flattened: Object = {}
    for key, value in attributes.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not name.startswith(("metadata", "gen_ai.")):
            flattened |= flat(value, f"{name}.")
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(x, dict) for x in value)
            and not name.startswith("gen_ai.")
        ):
            for index, item in enumerate(value):
                flattened |= flat(item, f"{name}.{index}.")
        else:
            flattened[name] = value
    return flattened


Events = list[tuple[str, Object]]


def span_items(node: Node, attributes: Object, events: Events) -> Iterator[Item]:
    """The node of a span, for any of the conventions, and its scores. node: with the fields that
    all spans have."""
    for event, more in events:
        if event == "exception" and not node.error:
            error = more.get("exception.message") or more.get("exception.type") or "exception"
            node = replace(node, error=str(error))
    if "langfuse.observation.type" in attributes or "langfuse.trace.name" in attributes:
        yield langfuse.of_attributes(node, attributes)
        return
    kind = kind_of(attributes := dict(attributes))
    current = with_current_names(attributes)
    call = tool = None
    if kind == "llm":
        call = _call(current, events)
    elif kind == "tool":
        tool = _tool(current, node.name)
        if messages.has_failed(current.get("output.value")):
            node = replace(node, error=node.error or "it failed")
    tokens = {
        "input": first(current, "gen_ai.usage.input_tokens", "llm.token_count.prompt"),
        "output": first(current, "gen_ai.usage.output_tokens", "llm.token_count.completion"),
    }
    cost = first(current, "gen_ai.usage.cost", "llm.cost.total")
    metadata = obj(current.get("metadata"))
    role = first(metadata, "langgraph_node") or first(current, AGENT_NAME, "langgraph_node")
    input_value = first(current, "input.value", "traceloop.entity.input", "gen_ai.input.messages")
    output = first(current, "output.value", "traceloop.entity.output", "gen_ai.output.messages")
    yield replace(
        node,
        kind=kind,
        role=str(role or ""),
        input=parsed(input_value),
        output=parsed(output),
        call=call,
        tool=tool,
        about=node.about | usage(tokens, cost),
    )
    yield from _scores(node, current)


def _scores(node: Node, attributes: Object) -> Iterator[Note]:
    """Scores that instrumentations write into spans: agentrl's rewards, and evaluations."""
    for key, value in attributes.items():
        if key.startswith("agentrl.reward.") and number(value) is not None:
            yield Note(
                trace=node.trace,
                node="" if "agentrl.rollout" in attributes else node.id,
                name=key.removeprefix("agentrl.reward."),
                value=number(value),
                source="agentrl",
                derived=True,
            )
    if (name := attributes.get("gen_ai.evaluation.name")) is not None:
        score = number(attributes.get("gen_ai.evaluation.score.value"))
        text = str(
            first(attributes, "gen_ai.evaluation.explanation", "gen_ai.evaluation.score.label")
            or ""
        )
        yield Note(
            trace=node.trace,
            node=node.id,
            name=str(name),
            value=score,
            text=text,
            source="evaluation",
        )


def _tool(attributes: Object, name: str) -> ToolUse:
    named = str(first(attributes, TOOL_NAME, "tool.name") or name)
    arguments = parsed(
        first(
            attributes,
            "gen_ai.tool.call.arguments",
            "tool.parameters",
            "input.value",
            "traceloop.entity.input",
        )
    )
    result = first(attributes, "gen_ai.tool.call.result", "output.value", "traceloop.entity.output")
    schema: Object = {}
    if parameters := obj(attributes.get("tool.json_schema")) or obj(
        attributes.get("gen_ai.tool.definition")
    ):
        schema = messages.tool_of(parameters)
    return ToolUse(
        named,
        arguments,
        messages.result_text(result) if result is not None else None,
        schema,
    )


def _call(attributes: Object, events: Events) -> Call:
    """A model call, in any of the conventions for messages."""
    prompt, answer = _messages(attributes, events)
    tools = first(
        attributes, "gen_ai.tool.definitions", "gen_ai.request.tools", "model_request_parameters"
    )
    definitions = messages.tools_of(tools) if tools is not None else _numbered_tools(attributes)
    options = obj(first(attributes, "llm.invocation_parameters", "gen_ai.request.parameters"))
    definitions = definitions or messages.tools_of(options.get("tools"))
    (reason, *_) = rows(attributes.get("gen_ai.response.finish_reasons")) or [None]
    (output, *_) = rows(attributes.get("gen_ai.output.messages")) or [None]
    finish = (
        reason
        or first(attributes, "llm.finish_reason", *FINISHES)
        or obj(output).get("finish_reason")
        or messages.finish_of(obj(attributes.get("output.value")))
    )
    model = first(attributes, "gen_ai.response.model", "llm.model_name", "gen_ai.request.model")
    requested = {
        key.removeprefix("gen_ai.request."): v
        for key, v in attributes.items()
        if key.startswith("gen_ai.request.")
    }
    return Call(
        messages=prompt,
        answer=answer,
        tools=definitions,
        model=str(model or ""),
        finish=_finish(finish),
        sampling=sampling(requested, options),
    )


FINISHES = tuple(f"gen_ai.completion.{n}.finish_reason" for n in range(3))  # OpenLLMetry


def _numbered_tools(attributes: Object) -> list[Object]:
    """Tools: `llm.tools.0` of OpenInference, `llm.request.functions.0` of OpenLLMetry."""
    entries = [
        *numbered(attributes, "llm.tools", ""),
        *numbered(attributes, "llm.request.functions", ""),
    ]
    return [tool for tool in map(messages.tool_of, entries) if tool]


def _finish(reason: Any) -> str:
    text = str(reason or "")
    return {"tool_call": "tool_calls"}.get(text, text)


def _messages(attributes: Object, events: Events) -> tuple[list[Object], Object | None]:
    if "gen_ai.input.messages" in attributes or "gen_ai.output.messages" in attributes:
        system = attributes.get("gen_ai.system_instructions")
        start = (
            [messages.message_of({"role": "system", "content": rows(system) or system})]
            if system
            else []
        )
        prompt = [*start, *messages.messages_of(attributes.get("gen_ai.input.messages"))]
        outputs = rows(attributes.get("gen_ai.output.messages"))
        choices = all("finish_reason" in obj(output) for output in outputs)
        return prompt, messages.answer_of(outputs[:1] if choices else outputs)
    for prefix, suffix, answers in NUMBERED:
        if any(key.startswith(f"{prefix}.0.") for key in attributes):
            prompt = messages.messages_of([*map(_fields, numbered(attributes, prefix, suffix))])
            outputs = [*map(_fields, numbered(attributes, answers, suffix))]
            items = obj(attributes.get("output.value")).get("object") == "response"
            count = next(
                (n for n, output in enumerate(outputs) if output.get("role") != "thinking"), 0
            )
            answer = messages.answer_of(outputs if items else outputs[: count + 1])
            return prompt, _whole(answer, attributes.get("output.value"))
    recorded = [obj(event) for event in rows(first(attributes, "events", "all_messages_events"))]
    recorded += [{"event.name": name, **about} for name, about in events]
    if conversation := _from_events(recorded):
        return conversation
    prompt = messages.messages_of(attributes.get("input.value"))
    return prompt, messages.answer_of(attributes.get("output.value"))


def _whole(answer: Object | None, output: Any) -> Object | None:
    """The answer, or the one in the whole output if that has more fields: OpenInference's numbered
    attributes of LangChain lack reasoning and invalid calls."""
    whole = messages.answer_of(output) if messages.choice_of(obj(output)) else None
    return whole if whole and {*whole} > {*(answer or {})} else answer


NUMBERED = (
    ("llm.input_messages", ".message", "llm.output_messages"),
    ("gen_ai.prompt", "", "gen_ai.completion"),
    ("llm.prompts", "", "llm.completions"),
)


def _whole_lists(attributes: Object, name: Any, issues: Issues) -> Object:
    """The attributes without numbered messages whose first ones are missing: SDKs keep only the
    newest 128 attributes of a span."""
    for inputs, _, outputs in NUMBERED:
        for prefix in (f"{inputs}.", f"{outputs}."):
            indices = {
                key: key[len(prefix) :].partition(".")[0]
                for key in attributes
                if key.startswith(prefix)
            }
            numbers = {int(number) for number in indices.values() if number.isdigit()}
            if numbers and min(numbers) > 0:
                issues.add(
                    "a span has lost messages to its SDK's limit of attributes "
                    "(OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT) and is no call",
                    str(name)[:80],
                )
                attributes = {key: x for key, x in attributes.items() if key not in indices}
    return attributes


def numbered(attributes: Object, prefix: str, suffix: str) -> Iterable[Object]:
    """The objects that attributes such as `prefix.0.message.tool_calls.1.id` describe, in order."""
    tree: Object = {}
    for key, value in attributes.items():
        if key.startswith(prefix + "."):
            place = tree
            *path, last = key[len(prefix) + 1 :].split(".")
            for step in path:
                place = place.setdefault(step, {})
                if not isinstance(place, dict):
                    break
            else:
                place[last] = value
    for _, subtree in sorted(
        tree.items(), key=lambda pair: int(pair[0]) if pair[0].isdigit() else 0
    ):
        entry = _listed(subtree)
        yield obj(entry.get(suffix[1:])) if suffix else entry


def _listed(value: Any) -> Any:
    """Objects with numbers for keys as lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(item) for key, item in value.items()}
    if inner and all(key.isdigit() for key in inner):
        return [item for _, item in sorted(inner.items(), key=lambda pair: int(pair[0]))]
    return inner


def _fields(fields: Object) -> Object:
    """A message in numbered attributes as `messages_of` reads it."""
    contents = [obj(part).get("message_content") or part for part in rows(fields.get("contents"))]
    content = fields.get("content")
    if contents:
        text = [] if any(obj(c).get("type") == "text" for c in contents) else [content or ""]
        content = text + [
            {**obj(c), "image_url": obj(obj(c).get("image")).get("image")}
            if obj(c).get("image")
            else c
            for c in contents
        ]
    elif isinstance(content, str) and content[:2] == "[{":
        parts = rows(content)
        content = parts if parts and all("type" in obj(part) for part in parts) else content
    calls = [obj(call).get("tool_call") or call for call in rows(fields.get("tool_calls"))]
    legacy = {
        "name": fields.get("function_call_name"),
        "arguments": fields.get("function_call_arguments_json"),
    }
    if legacy["name"] and not calls:
        calls = [{"function": legacy}]
    return {"role": "", **fields, "content": content, "tool_calls": calls, "contents": None}


def _from_events(recorded: list[Object]) -> tuple[list[Object], Object | None] | None:
    """Read the oldest form: one event per message and per choice."""
    prompt: list[Object] = []
    answer = None
    for event in recorded:
        name = str(event.get("event.name") or "")
        if name == "gen_ai.content.prompt":
            prompt += messages.messages_of(event.get("gen_ai.prompt"))
        elif name == "gen_ai.content.completion":
            answer = messages.answer_of(event.get("gen_ai.completion"))
        elif name == "gen_ai.choice":
            answer = answer or messages.answer_of(
                obj(event.get("message")) or {"role": "assistant", "content": event.get("content")}
            )
        elif name.startswith("gen_ai.") and name.endswith(".message"):
            body = obj(event.get("body")) or obj(event.get("gen_ai.event.content")) or event
            role = name.split(".")[1]
            prompt.append(messages.message_of({"role": role, **body}))
    return (prompt, answer) if prompt or answer else None
