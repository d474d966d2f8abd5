"""What could be a component: the texts that the calls of a run share, by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from os.path import commonprefix
from typing import Any

from agentrl.errors import ConfigError
from agentrl.store import open_store
from agentrl.types import Json, Transition

SYSTEM = ("system", "developer")


async def find(store_url: str, run: str, rollouts: int = 20) -> str:
    """Possible components as a table of a run file: for each role, the longest common prefix of its
    system messages, and its tools."""
    async with open_store(store_url, readonly=True) as store:
        calls: list[Transition] = []
        for rollout in await store.rollouts(run, limit=rollouts):
            trace = await store.trace(rollout.id)
            calls += trace.transitions if trace else []
    if not calls:
        raise ConfigError(f"run {run!r} has no calls in {store_url}: run it first")
    return "\n\n".join(_component(role, calls) for role in sorted({call.role for call in calls}))


def _component(role: str, calls: list[Transition]) -> str:
    own = [call for call in calls if call.role == role]
    texts = [text for call in own if (text := _system(call.messages))]
    shared = commonprefix(texts)  # noqa: RUF071 - of characters
    tools = Counter(name for call in own for name in _tools(call.tools))
    lines = [f"# {role}: {len(own)} calls, tools: {', '.join(tools) or 'none'}"]
    if shared.strip():
        text = shared.strip().replace("\n", "\n# ")
        lines += [f"# write to prompts/{role}.txt:", f"# {text}", f'{role} = "prompts/{role}.txt"']
    else:
        lines.append(f'{role} = {{ file = "prompts/{role}.txt", insert = true }}  # has no text')
    return "\n".join(lines)


def _system(messages: list[dict[str, Json]]) -> str:
    content = next((m.get("content") for m in messages if m.get("role") in SYSTEM), "")
    parts = content if isinstance(content, list) else [{"text": content}]
    found = (part.get("text") for part in parts if isinstance(part, Mapping))
    return str(next(filter(None, found), ""))


def _tools(tools: list[dict[str, Any]]) -> Iterator[str]:
    for tool in tools:
        yield str((tool.get("function") or {}).get("name"))
