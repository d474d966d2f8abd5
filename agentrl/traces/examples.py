"""A success and a failure of a finished run."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rich.console import RenderableType

from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.traces.show import in_words, render_trace
from agentrl.types import Purpose, Rollout, RolloutState, StepRow

LOOK_BACK = 3  # last evaluations to search for examples


async def examples(
    store: Store, config: RunConfig, steps: list[StepRow]
) -> AsyncIterator[tuple[str, RenderableType]]:
    """Titles, and what rich prints of each."""
    for title, rollout in (await find(store, config, steps)).items():
        trace = await store.trace(rollout.id)
        if trace:
            yield title, render_trace(await in_words(store, trace), longest=400)


async def find(store: Store, config: RunConfig, steps: list[StepRow]) -> dict[str, Rollout]:
    """Title -> a successful and an unsuccessful rollout from the last evaluations; one that failed
    only if no other was unsuccessful, because the report tells of it."""
    found: dict[str, Rollout] = {}
    evaluated = [row.step for row in steps if any(name.startswith("eval/") for name in row.metrics)]
    for step in evaluated[: -LOOK_BACK - 1 : -1]:
        rows = await store.rollouts(config.name, purpose=Purpose.EVAL, step=step)
        for row in sorted(rows, key=lambda row: row.state is RolloutState.FAILED):
            good = row.state is RolloutState.SUCCEEDED and row.reward() > 0
            found.setdefault("A success" if good else "A failure", row)
        if len(found) == 2:
            break
    after = ", after {} steps" if config.steps else ""
    titles = sorted(found, reverse=True)
    return {title + after.format(found[title].step): found[title] for title in titles}
