"""A summary of recorded traces: contents, what would be trained, what is left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.otlp import TOOL_NAME
from agentrl.core.types import Scope, Trace
from agentrl.recorded.nodes import number, obj
from agentrl.recorded.training import Training, Where, started, traces, training_of, usual_where
from agentrl.store import Store


@dataclass(slots=True)
class RoleLook:
    """The calls of a role. Lengths are characters."""

    calls: int = 0
    models: Counter[str] = field(default_factory=Counter)
    prompts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    tool_calls: int = 0
    failed: int = 0
    tokens: float = 0.0  # completion tokens, where recorded


@dataclass(slots=True)
class ToolLook:
    """The uses of a tool."""

    calls: int = 0
    failed: int = 0


@dataclass(slots=True)
class Look:
    """The summary of a store of traces."""

    traces: int = 0
    failed: int = 0
    tasks: int = 0  # different first inputs
    duplicates: int = 0  # traces with the same content as another one
    first: float = 0.0  # unix seconds, 0: unknown
    last: float = 0.0
    cost: float = 0.0
    roles: dict[str, RoleLook] = field(default_factory=dict)
    tools: dict[str, ToolLook] = field(default_factory=dict)
    feedback: dict[str, list[float]] = field(default_factory=dict)
    where: str = ""
    why_not: str = ""  # why nothing would be trained
    training: Training = field(default_factory=Training)


async def look_at(store: Store, where: Where | None) -> Look:
    """Summarise a store of traces. where: which traces are good; None: the default condition."""
    look = Look()
    contents: Counter[str] = Counter()
    groups: set[str] = set()
    async for trace in traces(store):
        _count(look, trace)
        contents[str(obj(obj(trace.rollout.task).get("recorded")).get("content"))] += 1
        groups.add(trace.rollout.group)
    look.tasks, look.duplicates = len(groups), sum(contents.values()) - len(contents)
    try:
        where = where or await usual_where(store)
        look.where, look.training = str(where), await training_of(store, where)
    except ConfigError as error:
        look.why_not = str(error)
    return look


def _count(look: Look, trace: Trace) -> None:
    row, at = trace.rollout, started(trace.rollout)
    look.traces += 1
    look.failed += row.failure is not None
    if at:
        look.first, look.last = min(look.first or at, at), max(look.last, at)
    for reward in row.rewards:
        name = (
            reward.name
            if reward.scope is Scope.ROLLOUT
            else f"{reward.name} ({reward.scope.value})"
        )
        look.feedback.setdefault(name, []).append(reward.value)
    by_id = {span.id: span for span in trace.spans}
    for call in trace.transitions:
        role = look.roles.setdefault(call.role, RoleLook())
        role.calls += 1
        role.models[call.policy] += 1
        role.prompts.append(sum(len(str(m.get("content") or "")) for m in call.messages))
        role.answers.append(len(str(obj(call.answer).get("content") or "")))
        role.tool_calls += len(obj(call.answer).get("tool_calls") or ())
        span = by_id.get(call.span or "")
        role.failed += bool(span and not span.ok)
        role.tokens += number(span.attributes.get("gen_ai.usage.output_tokens")) or 0 if span else 0
    for span in trace.spans:
        look.cost += number(span.attributes.get("gen_ai.usage.cost")) or 0
        if span.kind == "tool":
            name = str(span.attributes.get(TOOL_NAME) or span.name)
            tool = look.tools.setdefault(name, ToolLook())
            tool.calls += 1
            tool.failed += not span.ok


def lines_of(look: Look) -> Iterator[str]:
    """The summary for the console."""
    when = f", {_day(look.first)} to {_day(look.last)}" if look.first else ", without times"
    cost = f", which cost {look.cost:.2f}" if look.cost else ""
    yield (
        f"{look.traces} traces of {look.tasks} tasks{when}{cost}; {look.failed} failed,"
        f" {look.duplicates} have the content of another one"
    )
    for name, role in sorted(look.roles.items(), key=lambda pair: -pair[1].calls):
        models = ", ".join(model for model, _ in role.models.most_common(3))
        tokens = f", {role.tokens / role.calls:.0f} tokens each" if role.tokens else ""
        yield (
            f"  {name}: {role.calls} calls of {models}; prompts of {median(role.prompts):.0f}"
            f" characters (at most {max(role.prompts)}), answers of {median(role.answers):.0f}"
            f"{tokens};"
            f" {role.tool_calls} calls of tools, {role.failed} failed"
        )
    for name, tool in sorted(look.tools.items(), key=lambda pair: -pair[1].calls):
        yield f"  tool {name}: {tool.calls} calls, {tool.failed} failed"
    for name, values in sorted(look.feedback.items()):
        mean, ends = sum(values) / len(values), f"{min(values):g} to {max(values):g}"
        yield f"  feedback {name}: {len(values)} times, mean {mean:.3g}, {ends}"
    if look.why_not:
        yield f"Nothing would be trained: {look.why_not}"
        return
    training = look.training
    roles = Counter(str(row["role"]) for row in training.demonstrations)
    by_role = ", ".join(f"{count} of {role}" for role, count in roles.most_common()) or "none"
    why = Counter(str(row["why"]) for row in training.pairs)
    pairs = f" ({', '.join(f'{n} by {name}' for name, n in why.items())})" if why else ""
    yield (
        f"Where {look.where}: {len(training.demonstrations)} demonstrations ({by_role}),"
        f" {len(training.pairs)} pairs{pairs}, {len(training.tasks)} tasks and"
        f" {len(training.heldout)} held out, {len(training.tools)} different answers of tools"
    )
    for reason, count in training.left_out.most_common():
        yield f"  left out: {count} {reason}"


def _day(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")


def as_json(look: Look) -> dict[str, Any]:
    """The summary as JSON."""
    training = look.training
    return {
        "traces": look.traces,
        "tasks": look.tasks,
        "failed": look.failed,
        "duplicates": look.duplicates,
        "first": look.first,
        "last": look.last,
        "cost": look.cost,
        "roles": {
            name: {
                "calls": role.calls,
                "models": dict(role.models),
                "tool_calls": role.tool_calls,
                "failed": role.failed,
                "prompt_characters": median(role.prompts),
                "answer_characters": median(role.answers),
            }
            for name, role in look.roles.items()
        },
        "tools": {name: asdict(tool) for name, tool in look.tools.items()},
        "feedback": {
            name: {"times": len(v), "mean": sum(v) / len(v)} for name, v in look.feedback.items()
        },
        "where": look.where,
        "why_not": look.why_not,
        "demonstrations": dict(Counter(str(row["role"]) for row in training.demonstrations)),
        "pairs": len(training.pairs),
        "train": len(training.tasks),
        "heldout": len(training.heldout),
        "tool_answers": len(training.tools),
        "left_out": dict(training.left_out),
    }
