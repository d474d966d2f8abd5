"""Groups that end without their slowest rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.sampling import collect
from agentrl.algorithms.sampling.collect import cancelled_metrics, close_groups_during
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.core.config import RunConfig
from agentrl.core.errors import NotFound
from agentrl.core.types import Outcome, Reward, RolloutState
from agentrl.store import Store, open_store
from tests import factories


def config() -> RunConfig:
    return factories.config(steps=2, algorithm={"groups": 1, "group_size": 4, "group_quorum": 3})


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(collect, "CHECK_PAUSE", 0.01)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", {})
        yield store


async def end(store: Store, config: RunConfig, n: int) -> None:
    """Run one group, of which `n` rollouts succeed and the others make a call and never end."""
    await store.enqueue(TaskSampler(config, [{"input": "x"}]).rollouts(0))
    for number, attempt in enumerate(await store.claim(4, runner="w", lease=60)):
        call = factories.call(attempt.id, [1], [2, 3], attempt=attempt.id)
        await store.add_transitions([call])
        if number < n:
            ended = Outcome(attempt=attempt.id, fence=1, rewards=[Reward(value=float(number))])
            await store.finish([ended])


async def claimed(store: Store, config: RunConfig) -> Any:
    async with asyncio.timeout(20):
        work = store.claim_groups("r", 1, 1, ordered=True)
        return (await close_groups_during(work, store, config))[0]


async def test_a_straggler_that_never_ends_is_missing_from_its_group(store: Store) -> None:
    own = config()
    await end(store, own, 3)
    group = await claimed(store, own)
    states = [row.state for row in group.rollouts]
    assert states == [RolloutState.SUCCEEDED] * 3 + [RolloutState.CANCELLED]
    batch = build_batch([group])
    assert batch.rewards["outcome"].tolist() == [0, 1, 2]  # and no fourth, of 0
    assert cancelled_metrics([group]) == {
        "rollouts/cancelled": 1,
        "groups/closed_early": 1,
        "tokens/wasted": 2,
    }
    assert await store.heartbeat([group.rollouts[3].attempt], lease=9) == []  # its runner stops


async def test_nothing_is_closed_too_early(store: Store) -> None:
    own = config()
    await end(store, own, 2)
    with pytest.raises(TimeoutError):
        await close_groups_during(asyncio.wait_for(asyncio.sleep(60), 0.2), store, own)
    (row,) = await store.groups("r")
    assert RolloutState.CANCELLED not in row.states


async def test_an_error_of_the_store_ends_the_wait(store: Store) -> None:
    class Lost:
        async def groups(self, *args: Any, **named: Any) -> Any:
            raise NotFound("gone")

    lost: Any = Lost()
    with pytest.raises(NotFound, match="gone"):
        await close_groups_during(asyncio.sleep(60), lost, config())
