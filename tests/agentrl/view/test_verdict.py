"""Console, report, view and `agentrl why` decide by one rule whether a run became better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from agentrl.algorithms import why as why_rules
from agentrl.algorithms.run_record import read
from agentrl.algorithms.why import verdict
from agentrl.core.config import resolve
from agentrl.core.types import NewRollout, Outcome, Purpose, Reward
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.view import summaries
from agentrl.view.summaries import summary

TASKS = 20


async def evaluate(store: Store, step: int, right: int) -> None:
    """Play the held-out tasks after `step` steps, of which the first `right` ones succeed."""
    group = f"r/eval/{step:06d}/score"
    new: Any = {"run": "r", "group": group, "purpose": Purpose.EVAL, "step": step}
    await store.enqueue(
        [NewRollout(id=f"{group}/{i}", index=i, task={"i": i}, **new) for i in range(TASKS)]
    )
    for one in await store.claim(TASKS, runner="w", lease=60.0, run="r"):
        rewards = [Reward(value=float(one.rollout.index < right))]
        await store.finish([Outcome(attempt=one.id, fence=one.fence, rewards=rewards)])
    score = right / TASKS
    low, high = max(score - 0.2, 0.0), min(score + 0.2, 1.0)
    bounds = {"eval/score_low": low, "eval/score_high": high}
    await store.log("r", step, {"eval/score": score} | bounds)


@pytest.mark.parametrize(
    ("right", "outcome", "why", "reported"),
    [
        ((10, 18), "better", "It learned.", ""),  # the intervals overlap, and the tasks are paired
        ((2, 18, 6), "worse", "It got worse", "it got worse (held-out 10.0% to 30.0%, at best"),
        ((18, 2), "worse", "It got worse", "it got worse (held-out 90.0% to 10.0%"),
        ((10, 12), "same", "no difference is larger than chance", ""),
        ((10, 10), "same", "no difference is larger than chance", "no improvement was measured"),
    ],
)
async def test_one_verdict_everywhere(
    right: tuple[int, ...], outcome: str, why: str, reported: str, tmp_path: Path
) -> None:
    """Also of a run by `Trainer`, whose agent and verifier are objects without a name."""
    config = resolve({"name": "r", "policy": {"model": "m"}, "steps": len(right)}, source="test")
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("r", to_builtins(config))
        for step, number in enumerate(right):
            await evaluate(store, step, number)
        state = await store.run("r")
        assert state is not None
        shown = (await summary(store, state)).verdict
        page = await summaries.page(store, state, await store.metric_names("r"), None)
        (record,) = (await read(store, "r")).values()
        said = why_rules.opening(record, [])
        report = verdict(config, await store.steps("r"))
    assert shown.outcome == page["verdict"].outcome == outcome
    assert why in said
    assert report.startswith(reported) if reported else not report
