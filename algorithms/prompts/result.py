"""What a search leaves: the best texts and their lineage in files, and lines for the console."""

from __future__ import annotations

import math
from difflib import unified_diff
from pathlib import Path
from statistics import fmean

import msgspec

from agentrl.algorithms.prompts.records import Candidate, candidates_of, reflections_of
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError
from agentrl.scores import are_shares, score_text
from agentrl.store.base import Store


async def write_texts(store: Store, config: RunConfig, folder: Path) -> Candidate:
    """Write the chosen candidate's texts and lineage.json to a folder; returns the candidate."""
    candidates = await candidates_of(store, config.name)
    best = next((c for c in reversed(candidates) if c.state == "chosen"), None)
    if best is None:
        raise AgentRLError(f"{config.name}: the search has not ended; repeat the command")
    for text in best.texts:
        (folder / f"{text.component}.txt").write_text(f"{text.text}\n", encoding="utf-8")
    scores: dict[str | None, list[float]] = {}
    for rollout in await store.rollouts(config.name):
        if not math.isnan(rollout.reward()):
            scores.setdefault(rollout.candidate, []).append(rollout.reward())
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
    share = are_shares({"eval/score": score} for score in (before, after))
    asked = await reflections_of(store, config.name)
    tokens = sum(one.prompt_tokens + one.completion_tokens for one in asked)
    played = metrics.get("prompts/rollouts", 0.0)
    lines += [
        f"held-out score {score_text(before, share)} -> {score_text(after, share)}",
        f"{played:.0f} rollouts of at most {config.prompts.budget}, {len(asked)} reflections "
        f"with {tokens} tokens",
    ]
    return lines


def prompt_lines(text: str) -> list[str]:
    """The sentences of a text as lines, for a diff by sentence."""
    return [line for part in text.splitlines() for line in part.replace(". ", ".\n").split("\n")]
