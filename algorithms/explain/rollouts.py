"""Explain a rollout of a store."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path

import msgspec

from agentrl.algorithms.explain.explain import compared, explain, pushed, report
from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.registry import ALL_STREAMS
from agentrl.config import RunConfig, from_store
from agentrl.config import policies as team
from agentrl.errors import StoreError
from agentrl.store import open_store, unknown_rollout
from agentrl.store.base import Store
from agentrl.types import Group, Purpose, Rollout


async def explain_rollout(store_url: str, rollout: str, *, tokens: bool) -> list[str]:
    """Lines that explain the credit of a rollout's tokens, from the stored data of its step; the
    first in plain words.

    Raises StoreError for an unknown rollout."""
    async with open_store(store_url, readonly=True) as store:
        trace = await store.trace(rollout)
        state = await store.run(trace.rollout.run) if trace else None
        if trace is None or state is None:
            raise StoreError(await unknown_rollout(store, rollout))
        groups = await _groups(store, trace.rollout)
        members = [member.id for group in groups for member in group.rollouts]
        credits = [row for id in members for row in await store.credits(id)]
    config = from_store(state.config)
    step = trace.rollout.trained
    lines = [compared(rollout, groups)]
    for policy in team.trained_policies(config):
        settings = team.view(config, policy).algorithm
        algo = registry.make(
            settings.preset, settings.options, streams=ALL_STREAMS, root=Path(config.root)
        )
        own = {row.transition: row for row in credits if row.policy == policy}
        oldest = team.steps_learned(config, policy, step or 0) - ceil(settings.max_staleness)
        explanation = explain(
            algo, groups, min_group=settings.min_group, credits=own, policy=policy, oldest=oldest
        )
        if config.policies:
            lines.append(f"policy {policy}")
            if step is not None and not team.learns_in_step(config, policy, step):
                lines.append(f"  step {step} was not its turn to learn")
                continue
            if rollout not in explanation.batch.rollouts:
                lines.append("  it has no trained call in this rollout")
                continue
        spelt = _spelling(config, policy) if tokens else None
        if rollout in explanation.batch.rollouts:
            said = pushed(explanation, rollout)
            lines[-1:] = [lines[-1], f"  {said}"] if config.policies else [f"{lines[-1]} {said}"]
        lines += report(explanation, rollout, groups, tokens, spelt)
    if step is None:
        return [*lines, "this rollout is not trained yet, or was discarded"]
    if not credits:
        return [*lines, "its step stored no credit (algorithm.store_credit): see the note above"]
    return lines


def _spelling(config: RunConfig, policy: str) -> Callable[[int], str] | None:
    """A decoder of single token ids; None if the policy's tokenizer is not on this machine."""
    from transformers import AutoTokenizer

    name = team.view(config, policy).model_path()
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return lambda token: str(tokenizer.decode([token]))


async def _groups(store: Store, rollout: Rollout) -> list[Group]:
    """The groups that were trained (or, if untrained, requested) in the rollout's step."""
    asked = rollout.step if rollout.trained is None else None
    rows = await store.rollouts(
        rollout.run, purpose=Purpose.TRAIN, step=asked, trained=rollout.trained
    )
    members: dict[str, list[Rollout]] = {}
    for row in rows:
        trace = await store.trace(row.id)
        calls = trace.transitions if trace else []
        whole = msgspec.structs.replace(row, transitions=calls)
        members.setdefault(row.group, []).append(whole)
    return [
        Group(id=group, run=rollout.run, step=found[0].step, rollouts=found)
        for group, found in members.items()
    ]
