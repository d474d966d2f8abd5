"""Which groups a step trains, with a runner that answers at once and a process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.sampling import collect
from agentrl.algorithms.sampling.collect import (
    Collected,
    Collector,
    resampling_reward,
    split_unreadable,
    unreadable_reason,
)
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.errors import ConfigError, Fenced
from agentrl.core.types import Group, Outcome, Purpose, Reward, Rollout, RolloutState, StepCommit
from agentrl.store import Store, open_store
from tests import factories
from tests.algorithms.train.test_policy_set import config as team
from tests.algorithms.train.test_policy_set import shared

TASKS = [{"input": name} for name in ("easy", "fair", "easy", "hard", "easy", "missing")]
REWARDS: dict[str, list[float | None]] = {
    "easy": [1.0, 1.0],
    "hard": [0.0, 0.0],
    "fair": [0.1, 0.1 + 1e-9],  # a difference of rounding
    "missing": [1.0, None],
    "good": [1.0, 0.0],
    "broken": [None],
    "foreign": [1.0, 0.0],  # of a model with another tokenizer
}


class Killed(Exception):
    """What happens to a process at the worst moment."""


def config(**algorithm: Any) -> RunConfig:
    settings = {"groups": 3, "group_size": 2, "dynamic_sampling": True}
    return factories.config(steps=4, algorithm=settings | algorithm)


def collector(store: Store, epoch: int = 1, tasks: list[Any] = TASKS, **more: Any) -> Collector:
    settings = config(**more)
    stream = TaskSampler(settings, tasks)
    reward = resampling_reward(settings.algorithm, make("grpo", {}))
    return Collector(settings, store, epoch, stream, reward, {"policy": 7})


@contextlib.asynccontextmanager
async def running(store: Store) -> AsyncIterator[None]:
    """A runner that does whatever is queued."""

    async def work() -> None:
        while True:
            for attempt in await store.claim(64, runner="w", lease=60, timeout=60):
                name = attempt.rollout.task["input"]
                values, token = REWARDS[name], 7 if name == "foreign" else 2
                value = values[attempt.rollout.index % len(values)]
                calls = [
                    factories.call(
                        f"{attempt.rollout.id}/{index}",
                        [1],
                        [token],
                        attempt=attempt.id,
                        index=index,
                    )
                    for index in range(2)
                ]
                await store.add_transitions(calls)
                rewards = [] if value is None else [Reward(value=value)]
                outcome = Outcome(attempt=attempt.id, fence=attempt.fence, rewards=rewards)
                await store.finish([outcome])

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", {})
        async with running(store):
            yield store


def commit(step: int, collected: Collected, epoch: int = 1) -> StepCommit:
    return StepCommit(
        run="r", epoch=epoch, step=step, groups=ids(collected.groups), versions={},
        checkpoint=str(step), metrics={}, discarded=ids(collected.discarded),
    )  # fmt: skip


def ids(groups: list[Group]) -> list[str]:
    return [group.id for group in groups]


async def asked(store: Store) -> dict[str, str]:
    return {row.id: row.task["input"] for row in await store.rollouts("r")}


def inputs(groups: list[Group]) -> list[str]:
    return [group.rollouts[0].task["input"] for group in groups]


async def test_without_a_rule_a_step_takes_what_it_asked_for(store: Store) -> None:
    plain = collector(store, dynamic_sampling=False)
    await store.commit_step(commit(0, await plain.collect(0)))
    collected = await plain.collect(1)
    assert ids(collected.groups) == [f"r/train/g000000{number}" for number in (3, 4, 5)]
    assert (collected.discarded, collected.metrics) == ([], {})


@pytest.mark.parametrize("verb", ["groups", "counts"])
async def test_a_former_owner_that_wakes_requests_no_more(
    store: Store, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended after it had read something."""
    read = getattr(store, verb)

    async def suspended(*args: Any, **more: Any) -> Any:
        found = await read(*args, **more)
        monkeypatch.undo()
        await store.open_run("r", {})
        await collector(store, epoch=2).ask(0)
        return found

    monkeypatch.setattr(store, verb, suspended)
    with pytest.raises(Fenced):
        await collector(store).ask(0)
    assert len(await asked(store)) == 3 * 2


def test_what_several_policies_learn_from_has_a_signal(store: Store) -> None:
    settings = team(algorithm={"dynamic_sampling": True})
    own = Collector(settings, store, 1, TaskSampler(settings, TASKS), "outcome")
    assert own.is_informative(shared("a", 1.0, 0.0))
    assert not own.is_informative(shared("a", 1.0, 1.0))


@pytest.mark.parametrize(("exact", "known"), [(False, []), (True, [1.0, 0.0])])
def test_calls_without_token_ids_have_no_signal(
    store: Store, exact: bool, known: list[float]
) -> None:
    made, own = shared("a", 1.0, 0.0), collector(store)
    rows = [
        replace(
            row, transitions=[replace(c, policy="policy", exact=exact) for c in row.transitions]
        )
        for row in made.rollouts
    ]
    assert own.known_values(replace(made, rollouts=rows)) == known
    assert own.is_informative(replace(made, rollouts=rows)) == bool(known)


@pytest.mark.parametrize("again", [True, False])
async def test_an_unreadable_group_is_discarded(
    store: Store, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    tasks = [{"input": name} for name in ("good", "foreign", "good", "good", "good", "good")]
    own = collector(store, tasks=tasks, dynamic_sampling=again)
    collected = await own.collect(0)
    await store.commit_step(commit(0, collected))
    after = await own.collect(1)
    assert inputs(collected.groups) == ["good"] * (3 if again else 2)
    assert inputs(collected.discarded) == ["foreign"]
    assert collected.metrics["groups/unreadable"] == 1
    assert collected.metrics.get("groups/discarded", 0) == 0
    (said,) = {record.message for record in caplog.records if "discarded" in record.message}
    assert "the token id 7, but policy 'policy' has only ids" in said
    assert len(after.groups) == 3


@pytest.mark.parametrize("value", [1e308, -1e16, float("nan")])
def test_what_an_older_store_did_not_refuse_is_not_learned_from(value: float) -> None:
    def group(reward: float, logprob: float, *, exact: bool = True) -> Group:
        call = factories.call("call", exact=exact, logprob=logprob)
        row = Rollout(
            id="g/0", run="r", group="g", index=0, task={}, purpose=Purpose.TRAIN, step=0,
            state=RolloutState.SUCCEEDED, attempts=1, attempt="a", result=None, failure=None,
            rewards=[Reward(value=reward)], transitions=[call],
        )  # fmt: skip
        return factories.group(row)

    good, bad = group(1e15, 1e-6), [group(value, -1.0), group(1.0, 0.5)]
    assert split_unreadable([good, group(1.0, 0.5, exact=False)], {}) == (
        [good, group(1.0, 0.5, exact=False)],
        [],
    )
    assert [unreadable_reason(one, {}) is None for one in bad] == [False, False]


async def test_groups_that_teach_nothing_are_replaced(store: Store) -> None:
    tasks = [*TASKS, *({"input": "good"} for _ in range(6))]
    steps = [await step_of(store, number, tasks) for number in range(3)]
    for number, collected in enumerate(steps):
        kept = [group.rollouts[0].task["input"] for group in collected.groups]
        assert kept == ["good"] * 3
        discarded = [group.rollouts[0].task["input"] for group in collected.discarded]
        assert "good" not in discarded
        assert collected.metrics["groups/discarded"] == len(discarded)
        assert collected.metrics["groups/resampled"] == len(discarded)
        names = ids([*collected.groups, *collected.discarded])
        assert all(f"g{3 * number:07d}" <= name[8:16] < f"g{3 * number + 3:07d}" for name in names)
    assert sum(len(collected.discarded) for collected in steps) > 3
    counts = await store.counts("r")
    assert (counts.groups_trained, counts.groups_settled, counts.groups_open) == (9, 0, 0)
    assert counts.groups_discarded == sum(len(one.discarded) for one in steps)


async def step_of(store: Store, step: int, tasks: list[Any]) -> Collected:
    collected = await collector(store, tasks=tasks).collect(step)
    await store.commit_step(commit(step, collected))
    return collected


async def test_a_step_does_with_fewer_after_the_last_round(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MAX_ROUNDS", 2)
    collected = await collector(store).collect(0)
    assert collected.groups == []
    assert len(collected.discarded) == 9  # three, and three more twice
    assert collected.metrics["groups/resampled"] == 6
    assert 0 < collected.metrics["reward/sampled_mean"] < 1


async def test_what_is_broken_is_not_sampled_again(store: Store) -> None:
    collected = await collector(store, tasks=[{"input": "broken"}]).collect(0)
    assert (collected.groups, len(collected.discarded)) == ([], 3)


class Dying:
    """A store whose process is killed at a claim of groups, before or after it took place."""

    def __init__(self, store: Store, at: int, *, after: bool) -> None:
        self.enqueue, self.counts, self.groups = store.enqueue, store.counts, store.groups
        self._store, self._left, self._after = store, at, after

    async def claim_groups(self, *args: Any, **named: Any) -> list[Group]:
        self._left -= 1
        if self._left < 0 and not self._after:
            raise Killed
        groups = await self._store.claim_groups(*args, **named)
        if self._left < 0:
            raise Killed
        return groups


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_killed_between_rounds_a_step_ends_with_the_same_groups(
    tmp_path: Path, at: int, after: bool
) -> None:
    tasks = [*TASKS, {"input": "good"}]
    found = []
    for name, lives in (("whole", 1), ("killed", 2)):
        async with open_store(f"sqlite:///{tmp_path / name}.db") as store, running(store):
            for life in range(lives):
                epoch = (await store.open_run("r", {})).epoch
                if life + 1 < lives:
                    dying: Any = Dying(store, at, after=after)
                    with pytest.raises(Killed):
                        await collector(dying, epoch, tasks).collect(0)
            collected = await collector(store, epoch, tasks).collect(0)
            await store.commit_step(commit(0, collected, epoch))
            groups, discarded = ids(collected.groups), ids(collected.discarded)
            found.append((groups, discarded, collected.metrics, await asked(store)))
    assert found[0] == found[1]
    assert len(found[0][1]) > 3  # there were rounds to be killed between


async def test_nothing_is_lost_of_what_was_sampled_ahead(store: Store) -> None:
    tasks = [*TASKS, *({"input": "good"} for _ in range(6))]
    seen: list[str] = []
    for step in range(4):
        ahead = collector(store, tasks=tasks, max_staleness=2)
        collected = await ahead.collect(step)
        assert len(collected.groups) == 3
        await store.commit_step(commit(step, collected))
        seen += ids([*collected.groups, *collected.discarded])
    assert len(seen) == len(set(seen))
    assert set(seen) == {name.rpartition("/")[0] for name in await asked(store)}


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("resampled", [False, True])
async def test_pruned_groups_of_rewound_steps_are_played_again(
    store: Store, ahead: int, resampled: bool
) -> None:
    """In the steps that had asked for them, and not replaced by groups of later steps."""
    rule = {} if resampled else {"dynamic_sampling": False}
    tasks = [*TASKS, *({"input": "good"} for _ in range(6))]
    played = collector(store, tasks=tasks, max_staleness=ahead, **rule)

    async def step(number: int) -> Collected:
        collected = await played.collect(number)
        await store.commit_step(commit(number, collected))
        return collected

    before = [await step(number) for number in range(3)]
    await store.prune(run="r", keep_last=1)
    await store.rewind("r", 1, 1, "1")
    again = [await step(number) for number in (1, 2, 3)]
    for first, second in zip(before[1:], again, strict=False):
        assert ids(first.groups) == ids(second.groups)
        assert ids(first.discarded) == ids(second.discarded)
        assert all(len(group.rollouts) == 2 for group in second.groups)


def test_replacements_are_the_same_whoever_asks() -> None:
    stream = TaskSampler(config(), TASKS)
    one, more = stream.replacements(2, 1, 1), stream.replacements(2, 1, 9)
    assert more[:2] == one
    assert len({row.task["input"] for row in more[:12]}) == len({t["input"] for t in TASKS})
    names = [row.group for row in more]
    assert names == sorted(names)
    assert max(r.group for r in stream.rollouts(2)) < names[0]
    assert names[-1] < min(r.group for r in stream.rollouts(3))
    assert not set(names) & {row.group for row in stream.replacements(2, 2, 9)}


@pytest.mark.parametrize(
    ("preset", "settings", "expected"),
    [
        ("grpo", {}, None),
        ("grpo", {"dynamic_sampling": True}, "outcome"),
        ("dapo", {}, "outcome"),
        ("dapo", {"dynamic_sampling": False}, None),
    ],
)
def test_a_preset_or_the_run_file_asks_for_it(
    preset: str, settings: dict[str, Any], expected: str | None
) -> None:
    assert resampling_reward(AlgorithmConfig(**settings), make(preset, {})) == expected


def test_settings_of_what_is_off_are_refused() -> None:
    distill = make("distill", {}, supplies=("teacher",))
    with pytest.raises(ConfigError, match=r"'distill' reads no reward"):
        resampling_reward(AlgorithmConfig(dynamic_sampling=True), distill)
