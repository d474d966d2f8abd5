"""OpenTelemetry traces of stored attempts, and their OTLP/HTTP sender.

Phoenix, Langfuse and Jaeger read them.

The root is the attempt. Below it are its recorded spans and one llm span for each call, with
attributes of OpenTelemetry's semantic conventions for generative AI (`gen_ai.*`, version 0.1.0 of
open-telemetry/semantic-conventions-genai), of OpenInference, which Phoenix reads, and of agentrl
(`agentrl.*`). Recorded spans keep their attributes and get the current names too. If the agent
recorded a span for the same model call (from a framework or the HTTP request), the two are merged.
Ids are a function of the attempt, so sending it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from gzip import compress
from typing import Any

import httpx
import msgspec
from msgspec.structs import asdict, replace

from agentrl.core.errors import AgentRLError, NotFound, Unavailable
from agentrl.core.otlp import (
    AGENT_NAME,
    DESCRIPTION,
    OPERATION,
    PROTOBUF,
    TOOL_NAME,
    encode,
    with_current_names,
)
from agentrl.core.types import Json, Reward, Scope, Span, Trace, Transition, step_number
from agentrl.store import open_store
from agentrl.store.base import Store

PROVIDER = "agentrl"  # provider of the answers for the agent
# Attributes of the span of an HTTP client.
HTTP_ATTRIBUTES = {"url.full", "http.url", "http.method", "http.request.method"}
FINISH = {"tool_calls": "tool_call", "function_call": "tool_call"}  # OpenAI's words -> GenAI's
CLOCK_SLACK = 5_000_000  # ns of difference between the clocks of agent and gateway
Spans = Mapping[str, Span]  # by id


def spans_of(trace: Trace) -> list[Span]:
    """All spans of the attempt: the root first, then the others by start."""
    spans = {span.id: span for span in trace.spans}
    merged: dict[str, str] = {}  # id of a request's span -> id of its llm span
    llm_spans: dict[str, Span] = {}
    for call in trace.transitions:
        about = call_attributes(call)
        about |= _rewards(trace.rollout.rewards, Scope.TRANSITION, call.id)
        span = _llm_span(call, spans, llm_spans, about)
        llm_spans[span.id] = span
        if call.span in spans and _is_request(spans[call.span]):
            merged[call.span] = span.id
    root = _root_span(trace, [*trace.spans, *llm_spans.values()])
    remaining = {id: span for id, span in spans.items() if id not in merged} | llm_spans
    remaining.pop(root.id, None)
    parents = _parents(remaining, merged, root.id)
    children = [
        replace(span, parent=parents[span.id], attributes=_current(span))
        for span in remaining.values()
    ]
    return [root, *sorted(children, key=lambda span: (span.start, -span.end))]


def _current(span: Span) -> dict[str, Json]:
    """A span's attributes with their current names, and its operation."""
    attributes = with_current_names(span.attributes)
    if span.kind == "agent":
        return {OPERATION: "invoke_agent", AGENT_NAME: span.name} | attributes
    if span.kind == "tool":
        return {OPERATION: "execute_tool", TOOL_NAME: span.name} | attributes
    return attributes


def _parents(spans: Spans, merged: Mapping[str, str], root: str) -> dict[str, str]:
    """The parent of each span; the root if it is missing. Clients may send cycles of parents; one
    span of each cycle gets the root as its parent."""
    parents: dict[str, str] = {}
    for span in spans.values():
        parent = merged.get(span.parent or "") or span.parent
        parents[span.id] = parent if parent and parent in spans else root
    below_root = {root}
    for at in list(parents):
        passed = set[str]()
        while at not in below_root:
            if at in passed:
                parents[at] = root
                break
            passed.add(at)
            at = parents[at]
        below_root |= passed
    return parents


def _llm_span(call: Transition, spans: Spans, llm_spans: Spans, about: dict[str, Json]) -> Span:
    """The span of a model call: a framework's recorded span, or else a new one."""
    request, id, parent = spans.get(call.span or ""), _id(call.id), call.span
    if request is not None and _is_request(request):
        id, parent = request.id, request.parent
    elif request is None and call.span:  # the client exported its spans elsewhere
        id, parent = call.span, None
    start = int(call.started * 1e9)
    new_span = Span(
        id=_id(call.id) if id in llm_spans else id,  # one request may ask for several samples
        attempt=call.attempt,
        parent=parent,
        name=f"chat {call.policy}",
        kind="llm",
        start=start,
        end=start + int(call.seconds * 1e9),
        attributes=about,
    )
    recorded = _recorded_llm_span(request, new_span, spans, llm_spans) if request else None
    return replace(recorded, attributes=recorded.attributes | about) if recorded else new_span


def _recorded_llm_span(request: Span, call: Span, spans: Spans, llm_spans: Spans) -> Span | None:
    """The llm span that a framework recorded for the call: an ancestor of the request or, for
    OpenInference with LangChain, its shortest sibling that covers the call."""
    ancestor: Span | None = request
    passed = set[str]()
    while ancestor is not None and ancestor.kind == "internal" and ancestor.id not in passed:
        passed.add(ancestor.id)
        ancestor = spans.get(ancestor.parent or "")
    if ancestor is not None and ancestor.kind == "llm":
        return None if ancestor.id in llm_spans else ancestor
    covering = (
        span
        for id, span in spans.items()
        if (span.kind, span.parent) == ("llm", request.parent) and id not in llm_spans
        if span.start - CLOCK_SLACK <= call.start and call.end <= span.end + CLOCK_SLACK
    )
    return min(covering, key=lambda span: span.end - span.start, default=None)


def _is_request(span: Span) -> bool:
    return span.kind in ("internal", "llm") and not HTTP_ATTRIBUTES.isdisjoint(span.attributes)


def _root_span(trace: Trace, spans: list[Span]) -> Span:
    """The recorded span of the attempt, or a new one that covers `spans`."""
    rollout = trace.rollout
    new_span = Span(
        id=_id(trace.attempt),
        attempt=trace.attempt,
        parent=None,
        name="attempt",
        kind="agent",
        start=min((span.start for span in spans), default=0),
        end=max((span.end for span in spans), default=0),
    )
    recorded = (span for span in trace.spans if span.parent is None and span.name == "attempt")
    root = next(recorded, new_span)
    about: dict[str, Json] = {
        OPERATION: "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        AGENT_NAME: rollout.run,
        "gen_ai.conversation.id": rollout.id,
        "session.id": rollout.group,
        "agentrl.run": rollout.run,
        "agentrl.group": rollout.group,
        "agentrl.rollout": rollout.id,
        "agentrl.attempt": trace.attempt,
        "agentrl.step": step_number(rollout.step, rollout.purpose),
        "agentrl.purpose": rollout.purpose.value,
        **_openinference_value("input", rollout.task.get("input")),
        **_openinference_value("output", rollout.result),
        **_rewards(rollout.rewards, Scope.ROLLOUT, None),
    }
    for role in sorted({row.target or "" for row in rollout.rewards if row.scope is Scope.ROLE}):
        about |= _rewards(rollout.rewards, Scope.ROLE, role, f"agentrl.reward.{role}")
    if rollout.failure is not None:
        about |= {"error.type": rollout.failure.kind.value, DESCRIPTION: rollout.failure.message}
    return replace(
        root,
        name=f"invoke_agent {rollout.run}",
        ok=rollout.failure is None,
        attributes=root.attributes | about,
    )


def call_attributes(call: Transition) -> dict[str, Json]:
    """The attributes of one model call in all three conventions."""
    sampling, answer = call.sampling, call.answer or {}
    limits = asdict(sampling) | {"top_k": sampling.top_k or None, "override_agent": None}
    request_options = {name: value for name, value in limits.items() if value is not None}
    read, written = len(call.prompt), len(call.completion)
    finish = FINISH.get(call.finish, call.finish)
    output = _message(answer) | {"finish_reason": finish}
    attributes: dict[str, Json] = {
        OPERATION: "chat",
        "gen_ai.provider.name": PROVIDER,
        AGENT_NAME: call.role,
        "gen_ai.request.model": call.policy,
        "gen_ai.response.model": call.policy,
        "gen_ai.response.finish_reasons": [call.finish],
        "gen_ai.input.messages": _json([_message(message) for message in call.messages]),
        "gen_ai.output.messages": _json([output]),
        "llm.model_name": call.policy,
        "llm.invocation_parameters": _json(request_options),
        **_openinference_value("input", call.messages),
        **_openinference_value("output", answer.get("content") or answer),
        "agentrl.transition": call.id,
        "agentrl.role": call.role,
        "agentrl.policy": call.policy,
        "agentrl.policy.version": call.version,
        "agentrl.exact": call.exact,
    }
    attributes |= {f"gen_ai.request.{name}": value for name, value in request_options.items()}
    if call.exact or read or written:  # otherwise the numbers of tokens are unknown
        attributes |= {
            "gen_ai.usage.input_tokens": read,
            "gen_ai.usage.output_tokens": written,
            "llm.token_count.prompt": read,
            "llm.token_count.completion": written,
            "llm.token_count.total": read + written,
        }
    if call.tools:
        definitions = [_tool_definition(tool) for tool in call.tools]
        attributes["gen_ai.tool.definitions"] = _json(definitions)
    for index, tool in enumerate(call.tools):
        attributes[f"llm.tools.{index}.tool.json_schema"] = _json(tool)
    for index, message in enumerate(call.messages):
        attributes |= _openinference(f"llm.input_messages.{index}.message", message)
    return attributes | _openinference(
        "llm.output_messages.0.message", {"role": "assistant"} | answer
    )


def _tool_definition(tool: Mapping[str, Json]) -> dict[str, Json]:
    """A tool of a chat request without OpenAI's nesting."""
    kind = str(tool.get("type") or "function")
    inner = tool.get(kind)
    about = inner if isinstance(inner, Mapping) else tool
    fields = {key: about[key] for key in ("name", "description", "parameters") if key in about}
    return {"type": kind, "name": kind} | fields


def _message(message: Mapping[str, Json]) -> dict[str, Json]:
    """A chat message in the format of the semantic conventions."""
    role, content = str(message.get("role") or "assistant"), message.get("content")
    parts: list[Json] = []
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        parts.append({"type": "reasoning", "content": thought})
    if role == "tool":
        parts.append(
            {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        )
    elif isinstance(content, list):
        parts += map(_part, content)
    elif content:
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = _parsed(function.get("arguments"))
        named = {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}
        parts.append({"type": "tool_call"} | named)
    return {"role": role, "parts": parts}


def _part(part: Json) -> Json:
    """A part of a message's content; parts without a counterpart stay unchanged."""
    if not isinstance(part, Mapping):
        return {"type": "text", "content": part}
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "content": part.get("text")}
    about = part.get(kind) if kind in ("image_url", "input_audio") else None
    if kind == "image_url" and isinstance(about, Mapping | str):
        url = str(about if isinstance(about, str) else about.get("url"))
        mime, encoded, data = url.removeprefix("data:").partition(";base64,")
        if encoded and url.startswith("data:"):
            return {"type": "blob", "modality": "image", "mime_type": mime, "content": data}
        return {"type": "uri", "modality": "image", "uri": url}
    if kind == "input_audio" and isinstance(about, Mapping):
        mime = f"audio/{about.get('format')}"
        audio = {"type": "blob", "modality": "audio", "mime_type": mime}
        return audio | {"content": about.get("data")}
    return part


def _openinference(prefix: str, message: Mapping[str, Json]) -> dict[str, Json]:
    content = message.get("content")
    attributes: dict[str, Json] = {
        f"{prefix}.role": message.get("role"),
        f"{prefix}.content": content if content is None or type(content) is str else _json(content),
        f"{prefix}.tool_call_id": message.get("tool_call_id"),
    }
    for index, call in enumerate(message.get("tool_calls") or ()):
        where, function = f"{prefix}.tool_calls.{index}.tool_call", call.get("function") or {}
        attributes[f"{where}.id"] = call.get("id")
        attributes[f"{where}.function.name"] = function.get("name")
        attributes[f"{where}.function.arguments"] = function.get("arguments")
    return {key: value for key, value in attributes.items() if value is not None}


def _rewards(
    rewards: Iterable[Reward], scope: Scope, target: str | None, prefix: str = "agentrl.reward"
) -> dict[str, Json]:
    """`prefix.NAME` -> the value of the reward; a list if several have the same name."""
    attributes: dict[str, list[float]] = {}
    for row in rewards:
        if row.scope is scope and row.target == target:
            attributes.setdefault(f"{prefix}.{row.name}", []).append(row.value)
    return {key: values[0] if len(values) == 1 else values for key, values in attributes.items()}


def _openinference_value(key: str, value: Json) -> dict[str, Json]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {f"{key}.value": value, f"{key}.mime_type": "text/plain"}
    return {f"{key}.value": _json(value), f"{key}.mime_type": "application/json"}


def _parsed(arguments: Json) -> Json:
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, TypeError):
        return arguments


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _id(name: str) -> str:
    """A deterministic span id for `name`."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


ROUTE = "/v1/traces"
SPANS_PER_REQUEST = 500  # unless one attempt has more
MAX_TRIES = 6
FIRST_PAUSE = 0.5  # seconds before the second try; doubles
TRANSIENT = frozenset({429, 502, 503, 504})  # retryable statuses of the OTLP specification
REQUEST_TIMEOUT = 30.0  # seconds of one request


async def send(
    store_url: str, run: str, rollouts: Sequence[str], url: str, headers: Mapping[str, str]
) -> tuple[int, int]:
    """Send traces; returns the numbers of attempts and spans. Raises NotFound for an unknown run or
    rollout, Unavailable if the receiver is unreachable, AgentRLError if it refuses spans."""
    attempts = spans = 0
    target = url if url.rstrip("/").endswith(ROUTE) else url.rstrip("/") + ROUTE
    about = {"service.name": "agentrl", "openinference.project.name": run}
    async with (
        open_store(store_url, readonly=True) as store,
        httpx.AsyncClient(timeout=REQUEST_TIMEOUT, headers=dict(headers)) as client,
    ):
        batch: list[Span] = []
        async for trace_spans in _traces(store, run, rollouts):
            attempts, spans = attempts + 1, spans + len(trace_spans)
            if batch and len(batch) + len(trace_spans) > SPANS_PER_REQUEST:
                await _post(client, target, encode(batch, about))
                batch = []
            batch += trace_spans
        if batch:
            await _post(client, target, encode(batch, about))
    return attempts, spans


async def _traces(store: Store, run: str, rollouts: Sequence[str]) -> AsyncIterator[list[Span]]:
    if await store.run(run) is None:
        raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
    for rollout in rollouts or [row.id for row in await store.rollouts(run) if row.attempt]:
        trace = await store.trace(rollout)
        if trace is None or trace.rollout.run != run:
            raise NotFound(f"run {run!r} has no rollout {rollout!r} with an attempt to send")
        yield spans_of(trace)


async def _post(client: httpx.AsyncClient, url: str, body: bytes) -> None:
    headers = {"content-type": PROTOBUF, "content-encoding": "gzip"}
    failure, pause = "", 0.0
    for attempt in range(MAX_TRIES):
        await asyncio.sleep(pause)
        pause = FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0)
        try:
            answer = await client.post(url, content=compress(body), headers=headers)
        except httpx.TransportError as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        if answer.status_code not in TRANSIENT:
            return _accept(answer)
        failure = f"status {answer.status_code}"
        wait = answer.headers.get("retry-after", "")
        pause = float(wait) if wait.isdigit() else pause
    raise Unavailable(
        f"nothing receives traces at {url} ({failure}); start the receiver and try again"
    )


def _accept(answer: httpx.Response) -> None:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    if not answer.is_success:
        key = "give its key with --header 'Authorization=...'"
        hint = key if answer.status_code in (401, 403) else f"{answer.text:.200}"
        raise AgentRLError(
            f"{answer.url} refuses the traces with status {answer.status_code}: {hint}"
        )
    if answer.headers.get("content-type", "").startswith(PROTOBUF):
        try:
            response = trace_service_pb2.ExportTraceServiceResponse.FromString(answer.content)
        except DecodeError:
            raise AgentRLError(
                f"{answer.url} did not answer with OTLP; is it the URL of an OTLP/HTTP receiver?"
            ) from None
        partial = response.partial_success
        if partial.rejected_spans:
            reason = partial.error_message or "no reason given"
            raise AgentRLError(f"{answer.url} rejected {partial.rejected_spans} spans: {reason}")
