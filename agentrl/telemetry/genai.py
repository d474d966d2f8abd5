"""A stored attempt as an OpenTelemetry trace that Phoenix, Langfuse and Jaeger understand.

One root for the attempt, below it the spans it left behind, and one llm span for each transition
with `gen_ai.*` (OpenTelemetry semantic conventions for generative AI), OpenInference's attributes,
which Phoenix draws from, and `agentrl.*`. A span that somebody recorded of the same model call is
merged with it, never doubled: an llm span around the call, or the bare request.
Always true: the same attempt gives the same ids, so that sending it twice changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.otlp import DESCRIPTION
from agentrl.types import Json, Reward, Scope, Span, Trace, Transition

PROVIDER = "agentrl"  # who answered, as far as the agent can tell
HTTP_ATTRIBUTES = (
    "url.full",
    "http.url",
    "http.method",
    "http.request.method",
)  # marks of HTTP clients
SLACK = 5_000_000  # ns; the clocks of agent and gateway are read at different moments


def spans_of(trace: Trace) -> list[Span]:
    """The whole attempt: its root first, then parents before children in order of their start."""
    spans = {span.id: span for span in trace.spans}
    merged: dict[str, str] = {}  # what was merged -> the llm span that stands for it
    llm_spans: dict[str, Span] = {}
    for transition in trace.transitions:
        span = _llm_span(transition, spans, llm_spans, trace.rollout.rewards)
        llm_spans[span.id] = span
        if transition.span in spans and _is_request(spans[transition.span]):
            merged[transition.span] = span.id
    root = _root_span(trace, [*trace.spans, *llm_spans.values()])
    kept = {id: span for id, span in spans.items() if id not in merged} | llm_spans
    kept.pop(root.id, None)
    children = _without_cycles(
        [_with_parent(span, kept, merged, root.id) for span in kept.values()], root.id
    )
    return [root, *sorted(children, key=lambda span: (span.start, -span.end))]


def _with_parent(span: Span, kept: Mapping[str, Span], merged: dict[str, str], root: str) -> Span:
    parent = merged.get(span.parent or "", span.parent)
    return replace(span, parent=parent if parent in kept and parent != span.id else root)


def _without_cycles(spans: list[Span], root: str) -> list[Span]:
    """Without rings of parents, which anybody may send: one span of each hangs below the root."""
    parents, sound = {span.id: span.parent for span in spans}, {root}
    for span in spans:
        at, passed = span.id, set[str]()
        while at not in sound:
            if at in passed:
                parents[at] = root
                break
            passed.add(at)
            at = parents[at] or root
        sound |= passed
    return [replace(span, parent=parents[span.id]) for span in spans]


def _llm_span(
    transition: Transition,
    spans: Mapping[str, Span],
    llm_spans: Mapping[str, Span],
    rewards: Iterable[Reward],
) -> Span:
    """The span of a model call, in the place of what was recorded of it."""
    start = int(transition.started * 1e9)
    end = start + int(transition.seconds * 1e9)
    about = call_attributes(transition) | _rewards(rewards, Scope.TRANSITION, transition.id)
    request = spans.get(transition.span or "")
    known = _recorded_llm_span(request, spans, llm_spans, start, end)
    if known is not None:
        return replace(known, kind="llm", attributes=known.attributes | about)
    if request is not None and _is_request(request):
        id, parent = request.id, request.parent
    elif request is None and transition.span:  # of a client whose spans went elsewhere
        id, parent = transition.span, None
    else:
        id, parent = _id(transition.id), transition.span
    return Span(
        id=_id(transition.id) if id in llm_spans else id,  # one request may ask for several samples
        attempt=transition.attempt,
        parent=parent,
        name=f"chat {transition.policy}",
        kind="llm",
        start=start,
        end=end,
        attributes=about,
    )


def _recorded_llm_span(
    request: Span | None,
    spans: Mapping[str, Span],
    llm_spans: Mapping[str, Span],
    start: int,
    end: int,
) -> Span | None:
    """The llm span that a framework recorded of the call: around the request, or beside it, as
    OpenInference does for LangChain, and then the shortest that covers it."""
    if request is None:
        return None
    around: Span | None = request
    passed = set[str]()
    while around is not None and around.kind == "internal" and around.id not in passed:
        passed.add(around.id)
        around = spans.get(around.parent or "")
    if around is not None and around.kind == "llm":
        return None if around.id in llm_spans else around
    beside = [
        span
        for span in spans.values()
        if span.kind == "llm"
        and span.parent == request.parent
        and span.id not in llm_spans
        and span.start - SLACK <= start
        and end <= span.end + SLACK
    ]
    return min(beside, key=lambda span: span.end - span.start, default=None)


def _is_request(span: Span) -> bool:
    return span.kind in ("internal", "llm") and any(
        key in span.attributes for key in HTTP_ATTRIBUTES
    )


def _root_span(trace: Trace, spans: list[Span]) -> Span:
    """The attempt itself. One that ran in another process left no span of its own."""
    rollout = trace.rollout
    own = [span for span in trace.spans if span.parent is None and span.name == "attempt"]
    root = (
        own[0]
        if own
        else Span(
            id=_id(trace.attempt),
            attempt=trace.attempt,
            parent=None,
            name="attempt",
            kind="agent",
            start=min((span.start for span in spans), default=0),
            end=max((span.end for span in spans), default=0),
        )
    )
    about: dict[str, Json] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": rollout.run,
        "gen_ai.conversation.id": rollout.id,
        "session.id": rollout.group,
        "agentrl.run": rollout.run,
        "agentrl.group": rollout.group,
        "agentrl.rollout": rollout.id,
        "agentrl.attempt": trace.attempt,
        "agentrl.step": rollout.step,
        "agentrl.purpose": rollout.purpose.value,
        **_openinference_value("input", rollout.task.get("input")),
        **_openinference_value("output", rollout.result),
        **_rewards(rollout.rewards, Scope.ROLLOUT, None),
    }
    for role in sorted({row.target or "" for row in rollout.rewards if row.scope is Scope.ROLE}):
        attributes = _rewards(rollout.rewards, Scope.ROLE, role)
        about |= {
            key.replace("agentrl.reward", f"agentrl.reward.{role}"): attributes[key]
            for key in attributes
        }
    if rollout.failure is not None:
        about |= {"error.type": rollout.failure.kind.value, DESCRIPTION: rollout.failure.message}
    return replace(
        root,
        name=f"invoke_agent {rollout.run}",
        ok=rollout.failure is None,
        attributes=root.attributes | about,
    )


def call_attributes(transition: Transition) -> dict[str, Json]:
    """Of one model call, by both conventions."""
    sampling, answer = transition.sampling, transition.answer or {}
    limits = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or None,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    read, written = len(transition.prompt), len(transition.completion)
    output = _message(answer) | {"finish_reason": transition.finish}
    attributes: dict[str, Json] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": transition.role,
        "gen_ai.request.model": transition.policy,
        "gen_ai.response.model": transition.policy,
        "gen_ai.response.finish_reasons": [transition.finish],
        "gen_ai.usage.input_tokens": read,
        "gen_ai.usage.output_tokens": written,
        "gen_ai.input.messages": _json([_message(message) for message in transition.messages]),
        "gen_ai.output.messages": _json([output]),
        "llm.model_name": transition.policy,
        "llm.invocation_parameters": _json(given),
        "llm.token_count.prompt": read,
        "llm.token_count.completion": written,
        "llm.token_count.total": read + written,
        **_openinference_value("input", transition.messages),
        **_openinference_value("output", answer.get("content") or answer),
        "agentrl.transition": transition.id,
        "agentrl.role": transition.role,
        "agentrl.policy": transition.policy,
        "agentrl.policy.version": transition.version,
        "agentrl.exact": transition.exact,
    }
    attributes |= {f"gen_ai.request.{name}": value for name, value in given.items()}
    if transition.tools:
        attributes["gen_ai.tool.definitions"] = _json(transition.tools)
    for index, tool in enumerate(transition.tools):
        attributes[f"llm.tools.{index}.tool.json_schema"] = _json(tool)
    for index, message in enumerate(transition.messages):
        attributes |= _openinference(f"llm.input_messages.{index}.message", message)
    return attributes | _openinference(
        "llm.output_messages.0.message", {"role": "assistant"} | answer
    )


def _message(message: Mapping[str, Json]) -> dict[str, Json]:
    """A chat message as the semantic conventions write it."""
    role, content = str(message.get("role") or "assistant"), message.get("content")
    parts: list[Json] = []
    if role == "tool":
        parts.append(
            {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        )
    elif isinstance(content, list):
        parts += [_part(part) for part in content]
    elif content:
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = _parsed(function.get("arguments"))
        named = {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}
        parts.append({"type": "tool_call"} | named)
    return {"role": role, "parts": parts}


def _part(part: Json) -> Json:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return {"type": "text", "content": part.get("text")}
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


def _rewards(rewards: Iterable[Reward], scope: Scope, target: str | None) -> dict[str, Json]:
    """`agentrl.reward.NAME`; a list where there are several of one name."""
    attributes: dict[str, list[float]] = {}
    for row in rewards:
        if row.scope is scope and row.target == target:
            attributes.setdefault(f"agentrl.reward.{row.name}", []).append(row.value)
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
    """A span id that is always the same for `name`."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]
