"""max_staleness is a promise: over random latencies and kills no trained token is older, and no
more groups are asked for than it allows. The store here keeps virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import withhold
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.core.config import RunConfig
from agentrl.core.types import (
    Counts,
    Group,
    NewRollout,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Transition,
)
from agentrl.store.records import GroupRow
from tests import factories

STEPS, SIZE, CALLS = 6, 3, 2
UPDATE = 1.0  # seconds, of virtual time


class Killed(Exception):
    pass


@dataclass
class SimulatedStore:
    """Queue, runners and policy server: a rollout makes calls after lognormal pauses, each answered
    by the version that is served then."""

    draw: random.Random
    kill: float = 0.0  # probability that a claim is the process's last
    now: float = 0.0
    served: list[float] = field(default_factory=lambda: [0.0])  # time at which each version came
    times: dict[str, list[float]] = field(default_factory=dict)  # of each rollout, its calls' ends
    asked: dict[str, list[NewRollout]] = field(default_factory=dict)  # by group
    taken: dict[str, str] = field(default_factory=dict)  # group -> trained or discarded
    cancelled: dict[str, float] = field(default_factory=dict)  # rollout -> when

    async def enqueue(self, rollouts: Sequence[NewRollout], *, epoch: int) -> int:
        for row in rollouts:
            if row.id not in self.times:
                pauses = [self.draw.lognormvariate(0.0, 2.0) for _ in range(CALLS)]
                self.times[row.id] = [self.now + sum(pauses[: i + 1]) for i in range(CALLS)]
                self.asked.setdefault(row.group, []).append(row)
        return 0

    def end(self, group: str) -> float:
        return max(self.cancelled.get(r.id, self.times[r.id][-1]) for r in self.asked[group])

    async def claim_groups(self, run: str, epoch: int, n: int, *, ordered: bool) -> list[Group]:
        if self.draw.random() < self.kill:
            raise Killed
        waiting = sorted(self.asked.keys() - self.taken.keys())
        ends = [self.end(g) for g in waiting[:n]] if ordered else sorted(map(self.end, waiting))[:n]
        self.now = max(self.now, ends[n - 1], *ends)
        if self.draw.random() < self.kill:
            raise Killed
        return [self.group(g) for g in waiting if self.end(g) <= self.now][:n]

    def group(self, id: str) -> Group:
        rows = [self.rollout(row) for row in self.asked[id]]
        return factories.group(*rows, id=id, step=rows[0].step)

    def rollout(self, row: NewRollout) -> Rollout:
        until = self.cancelled.get(row.id)
        times = [t for t in self.times[row.id] if t <= (self.now if until is None else until)]
        versions = [sum(came <= t for came in self.served) - 1 for t in times]
        calls = [
            factories.call(f"{row.id}/{i}", [1, i], attempt=row.id, index=i, version=version)
            for i, version in enumerate(versions)
        ]
        rewards = [] if until is not None else [Reward(value=float(hash(row.id) % 2))]
        state = RolloutState.SUCCEEDED if until is None else RolloutState.CANCELLED
        known = {"group": row.group, "index": row.index, "step": row.step, "state": state}
        return factories.rollout(row.id, calls, rewards, **known)

    async def counts(self, run: str) -> Counts:
        return Counts(groups_settled=len(self.asked) - len(self.taken))

    async def groups(
        self,
        run: str,
        *,
        purpose: Purpose,
        limit: int,
        state: str | None = None,
        step: int | None = None,
    ) -> list[GroupRow]:
        """Open ones; of all, the last."""
        found = [
            GroupRow(
                id=id, purpose=purpose, step=rows[0].step, state="", trained=None,
                rollouts=[row.id for row in rows], states=[], outcomes=[],
            )
            for id, rows in sorted(self.asked.items(), reverse=True)
            if step in (None, rows[0].step)
            if state is None or (id not in self.taken and self.end(id) > self.now)
        ]  # fmt: skip
        return found[:limit]

    async def calls(self, rollouts: Sequence[str]) -> dict[str, list[Transition]]:
        rows = [row for asked in self.asked.values() for row in asked if row.id in rollouts]
        return {row.id: self.rollout(row).transitions for row in rows}

    async def cancel(self, rollouts: Sequence[str]) -> int:
        running = [id for id in rollouts if self.times[id][-1] > self.now]
        self.cancelled |= dict.fromkeys(running, self.now)
        return len(running)

    def outstanding(self) -> int:
        return len(self.asked) - len(self.taken)


def config(**algorithm: Any) -> RunConfig:
    settings = {"preset": "grpo+tis", "groups": SIZE, "group_size": 2}
    return factories.config(steps=STEPS, algorithm=settings | algorithm)


async def train(store: SimulatedStore, config: RunConfig, resample: str | None) -> list[int]:
    """Train all steps; returns the largest lag of the trained tokens in each, and checks the
    admission at every step."""
    lags, tasks = [], TaskSampler(config, [{"input": i} for i in range(5)])
    settings, algo = config.algorithm, make("grpo+tis", {})
    room = floor((settings.max_staleness + 1) * SIZE)
    for step in range(STEPS):
        while True:
            try:  # whoever was killed knows nothing of what went before
                own: Any = store
                collector = Collector(config, own, 1, tasks, resample)
                found = await collector.collect(step)
                break
            except Killed:
                pass
        replaced = found.metrics.get("groups/resampled", 0)
        if (
            settings.group_order == "requested" or not store.kill
        ):  # else a claim may take others than before
            assert store.outstanding() == min(room, (STEPS - step) * SIZE) + replaced
        store.now += UPDATE
        store.taken |= {group.id: "trained" for group in found.groups}
        store.taken |= {group.id: "discarded" for group in found.discarded}
        store.served.append(store.now)
        batch = build_batch(found.groups)
        fresh = withhold(algo, batch, step - ceil(settings.max_staleness))
        terms = objective.loss_terms(fresh, batch, GivenLogProbs(), fresh=True)
        lags.append(int((batch.lag(step)[terms.weight > 0]).max()) if batch.n_tokens else 0)
        if settings.group_order == "requested":
            assert fresh is algo  # nothing is withheld
        assert store.outstanding() <= room or store.kill
    assert store.outstanding() == 0 or (settings.group_order == "completed" and store.kill)
    return lags


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        *((ahead, {}) for ahead in (0, 0.5, 1, 4)),
        *((ahead, {"group_order": "completed"}) for ahead in (0.5, 1, 4)),
    ],
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), kill=st.sampled_from([0.0, 0.3]), resample=st.booleans())
def test_no_trained_token_is_older_and_nothing_more_is_asked_for(
    ahead: float, order: dict[str, str], seed: int, kill: float, resample: bool
) -> None:
    store = SimulatedStore(random.Random(seed), kill)
    own = config(max_staleness=ahead, **order, **({"dynamic_sampling": True} if resample else {}))
    reward = "outcome" if resample else None
    assert max(asyncio.run(train(store, own, reward))) <= ceil(ahead)
