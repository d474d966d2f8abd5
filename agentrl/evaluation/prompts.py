"""The front of a prompt search. It writes the best texts and their lineage to files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console

from agentrl import trainer
from agentrl.base.files import make_folder
from agentrl.base.processes import PHASE
from agentrl.base.threads import run_blocking
from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy
from agentrl.config.prompts import prompt_texts
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.core import evaluation_run, last_checkpoint
from agentrl.prompts import Candidate
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Json, Transition

SYSTEM = ("system", "developer")


def optimise(config: RunConfig, *, fresh: bool = False, level: int = PHASE) -> None:
    """Search in a separate run, and write the best texts to <output>/prompts."""
    config = trainer.hide_secrets(config)
    if not config.prompts.components:
        raise ConfigError("[prompts.components] is missing: name the texts to rewrite")
    if not config.tasks.train:
        raise ConfigError("tasks.train is missing: name a .jsonl file or file.py:name")
    prompt_texts(config)
    checkpoint = None
    if not has_no_own_policy(config) and Path(config.output, "checkpoints").is_dir():
        checkpoint = last_checkpoint(config)
    own = evaluation_run(config, f"{config.name}-prompts", checkpoint)
    store = own.store if trainer.has_own_store(config) else config.store
    own = msgspec.structs.replace(own, store=store)
    trainer.check(own)
    if fresh:
        trainer.clear(own)
    run_blocking(_optimise(own, Path(config.output, "prompts"), level))


async def _optimise(config: RunConfig, folder: Path, level: int) -> None:
    make_folder(Path(config.output))
    console = Console()
    async with open_store(config.store) as store:
        if state := await store.run(config.name):
            # `refuse_changes` refuses fewer steps than a resumed search has committed.
            config = msgspec.structs.replace(config, steps=state.step)
        await trainer.refuse_changes(store, config)
        config = msgspec.structs.replace(config, steps=0)
        seconds = await trainer.supervise(
            store, config, verb="prompts", console=console, level=level
        )
        best = await write_texts(store, config, make_folder(folder))
        for line in await report(store, config, best):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(f"{seconds:.0f} s; the texts are in {folder}", highlight=False)


async def write_texts(store: Store, config: RunConfig, folder: Path) -> Candidate:
    """Write the chosen candidate's texts and lineage.json to a folder; returns the candidate."""
    candidates = await store.candidates(config.name)
    best = next((c for c in reversed(candidates) if c.state == "chosen"), None)
    if best is None:
        raise AgentRLError(f"{config.name}: the search has not ended; repeat the command")
    for text in best.texts:
        (folder / f"{text.component}.txt").write_text(f"{text.text}\n", encoding="utf-8")
    scores: dict[str | None, list[float]] = {}
    for row in await store.rollouts(config.name):
        if not math.isnan(row.reward()):
            scores.setdefault(row.candidate, []).append(row.reward())
    lineage = [
        {
            "id": one.id,
            "parents": one.parents,
            "state": one.state,
            "rollouts": len(scores.get(one.id, [])),
            "mean": fmean(scores[one.id]) if scores.get(one.id) else None,
            "texts": {text.component: text.text for text in one.texts},
        }
        for one in candidates
    ]
    file = folder / "lineage.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(lineage)))
    return best


async def report(store: Store, config: RunConfig, best: Candidate) -> list[str]:
    """Lines with the diff of the texts, the held-out scores and the cost."""
    lines: list[str] = []
    for text in best.texts:
        old, new = prompt_lines(text.seed), prompt_lines(text.text)
        lines += unified_diff(old, new, text.component, f"{text.component} (best)", lineterm="")
    metrics: dict[str, float] = {}
    for row in await store.steps(config.name):
        metrics |= row.metrics
    before, after = (metrics.get(f"prompts/heldout{x}", float("nan")) for x in ("_before", ""))
    asked = await store.reflections(config.name)
    tokens = sum(one.prompt_tokens + one.completion_tokens for one in asked)
    played = metrics.get("prompts/rollouts", 0.0)
    lines += [
        f"held-out score {before:.3f} -> {after:.3f}",
        f"{played:.0f} rollouts of at most {config.prompts.budget}, {len(asked)} reflections with"
        f" {tokens} tokens",
    ]
    return lines


def prompt_lines(text: str) -> list[str]:
    """The sentences of a text as lines, for a diff by sentence."""
    return [line for part in text.splitlines() for line in part.replace(". ", ".\n").split("\n")]


async def find(store_url: str, run: str, rollouts: int = 20) -> str:
    """Possible components as a table of a run file: for each role, the longest common prefix of its
    system messages, and its tools."""
    async with open_store(store_url, readonly=True) as store:
        calls: list[Transition] = []
        for row in await store.rollouts(run, limit=rollouts):
            trace = await store.trace(row.id)
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
