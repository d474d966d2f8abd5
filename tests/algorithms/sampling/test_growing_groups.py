"""Groups that grow while their step is sampled."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.sampling.collect import Collected, Collector
from agentrl.algorithms.sampling.replays import request_branches
from agentrl.store import Store, open_store
from tests.algorithms.sampling import test_collect as alone
from tests.algorithms.sampling.test_collect import TASKS, Killed, asked, commit, ids, running


def collector(store: Store, *args: Any, **more: Any) -> Collector:
    made = alone.collector(store, *args, **more)
    return replace(made, requested=partial(request_branches, store, made.config))


class Mortal:
    """A store whose process is killed at the `at`-th of its verbs, before or after that took
    place."""

    def __init__(self, store: Store, at: int, *, after: bool) -> None:
        self._store, self._left, self._after = store, at, after

    def __getattr__(self, name: str) -> Any:
        async def verb(*args: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left < 0 and not self._after:
                raise Killed
            result = await getattr(self._store, name)(*args, **named)
            if self._left < 0:
                raise Killed
            return result

        return verb


@pytest.mark.parametrize("after", [False, True])
async def test_killed_anywhere_groups_that_branch_are_the_same(tmp_path: Path, after: bool) -> None:
    """With replacements, and with groups that were sampled ahead."""
    settings = {"max_staleness": 1, "branching": {"kind": "mc"}}
    tasks = [*TASKS, {"input": "good"}]
    found = []
    for at in (None, 0, 1, 2, 4, 7, 11, 18, 29, 47):
        async with open_store(f"sqlite:///{tmp_path / str(at)}.db") as store, running(store):
            epoch = (await store.open_run("r", {})).epoch
            if at is not None:
                mortal: Any = Mortal(store, at, after=after)
                with pytest.raises((Killed, ExceptionGroup)):
                    await collector(mortal, epoch, tasks, **settings).collect(0)
                epoch = (await store.open_run("r", {})).epoch
            made: list[Any] = []
            for step in range(2):
                collected = await collector(store, epoch, tasks, **settings).collect(step)
                await store.commit_step(commit(step, collected, epoch))
                together = [*collected.groups, *collected.discarded]
                sizes = [len(group.rollouts) for group in together]
                made += [ids(collected.groups), ids(collected.discarded), sizes]
            found.append((made, await asked(store)))
    assert found[1:] == found[:1] * 9
    assert set(found[0][0][2]) == {4}  # a branch of each of two rollouts
    assert len(found[0][0][2]) > 3  # there were rounds to be killed between


async def test_a_group_that_an_earlier_step_took_does_not_grow(tmp_path: Path) -> None:
    """A run that branches from now on had groups sampled ahead of their step."""
    plain = {"dynamic_sampling": False}
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store, running(store):
        await store.open_run("r", {})
        await store.enqueue(collector(store).tasks.rollouts(1))
        early = await store.claim_groups("r", 1, 3)
        await store.commit_step(commit(0, Collected(early[:2], early[2:], {})))
        await store.enqueue(collector(store).tasks.rollouts(2))
        collected = await collector(store, **plain, branching={"kind": "mc"}).collect(1)
        assert [group.step for group in collected.groups] == [2] * 3
        assert all(row.branch is None for row in await store.rollouts("r", step=1))
