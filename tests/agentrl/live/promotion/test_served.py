"""Which sessions a look sees: all that began up to some time, whatever became of them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.core.config.live import IDLE, LiveConfig
from agentrl.core.types import Purpose, Reward, Rollout, RolloutState, StepCommit
from agentrl.live import served as served_module
from agentrl.live.records import RESULT_ENDED, SOURCE, Lanes
from agentrl.live.served import EARLY, HELD, MAX_SESSIONS_READ, ServedSessions, early_of
from agentrl.store import open_store
from tests.agentrl.live.promotion.drawn import mark
from tests.agentrl.live.promotion.played import RUN, Shop, config

WAIT = 100.0
LANES = Lanes(serving=0, candidate=4)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    settings = config(tmp_path, wait=WAIT, share=0.5)
    async with open_store(settings.store) as store:
        yield await Shop(store, settings).opened(0, 4)


async def seen(shop: Shop) -> list[float]:
    """The outcomes that a look compares."""
    await shop.decided()
    return [one.outcome for one in shop.decider._served.compared(4, 0)]


async def test_who_complains_at_once_counts_no_earlier_than_the_others(shop: Shop) -> None:
    for outcome in (0.0, 1.0):
        await shop.session(outcome, lane="candidate")
    assert await seen(shop) == []
    shop.now += WAIT
    assert await seen(shop) == [0.0, 1.0]


async def test_what_is_said_after_the_wait_changes_nothing(shop: Shop) -> None:
    """Sessions of a young version have not had as much time."""
    for outcome in (None, 1.0):
        await shop.session(outcome, lane="candidate")
    shop.now += WAIT
    assert await seen(shop) == [1.0]
    for row in await shop.store.rollouts(RUN, group_state="settled"):
        await shop.label(row.id, 0.0, {})
    assert await seen(shop) == [1.0]


async def test_sessions_wait_for_those_that_began_before_them(shop: Shop) -> None:
    """Sessions that go wrong may be shorter, or longer."""
    await shop.session(1.0, lane="candidate")
    await shop.session(1.0, lane="candidate", ends=False)
    await shop.session(0.0, lane="candidate")
    shop.now += WAIT
    assert await seen(shop) == [1.0]
    shop.now += HELD * IDLE
    assert await seen(shop) == [1.0, 0.0]  # but not for ever


async def test_complaints_at_once_count_after_seconds_and_at_the_same_age(shop: Shop) -> None:
    """Sessions of which more may become known count as far as their users complain at once."""
    await shop.session(0.0, lane="candidate", vote=0.0)
    await shop.session(None, lane="candidate")  # nothing is known yet
    await shop.session(1.0, lane="candidate", ends=False)
    await shop.session(0.0, lane="candidate", vote=0.0)
    served = shop.decider._served

    async def early() -> list[float]:
        await shop.decided()
        return served.outcomes(4, lane="candidate", early=True)

    assert await early() == []
    shop.now += EARLY
    assert await early() == [0.0, 1.0]
    assert served.outcomes(4) == []
    shop.now += WAIT
    assert await early() == [0.0, 1.0]
    assert served.outcomes(4) == [0.0]


def test_what_a_user_says_later_is_no_complaint_at_once() -> None:
    soon, late = (
        replace(ended(1, 0, 0.0), rewards=[one, Reward(value=0.0, source=SOURCE)])
        for one in (
            mark(1.0, explicit=True, posted={"feedback": 0.0}, delays={"feedback": delay})
            for delay in (0.4, EARLY + 1)
        )
    )
    assert (early_of(soon), early_of(late), early_of(ended(1, 0, 0.0))) == (0.0, 1.0, 1.0)


async def test_a_session_that_is_trained_before_its_wait_has_passed_counts_then_and_once(
    shop: Shop,
) -> None:
    await shop.session(1.0, lane="candidate")
    assert await seen(shop) == []
    state = await shop.store.run(RUN)
    assert state is not None
    (group,) = await shop.store.claim_groups(RUN, state.epoch, 1)
    assert await seen(shop) == []
    commit = StepCommit(
        run=RUN, epoch=state.epoch, step=0, groups=[group.id], versions={}, checkpoint=None,
        metrics={},
    )  # fmt: skip
    await shop.store.commit_step(commit)
    assert await seen(shop) == []
    shop.now += WAIT
    for _ in range(3):
        assert await seen(shop) == [1.0]


@pytest.mark.parametrize("trained", [True, False])
async def test_a_session_is_counted_once_on_its_way_through_a_step(
    shop: Shop, trained: bool
) -> None:
    await shop.session(1.0, lane="candidate")
    shop.now += WAIT
    assert await seen(shop) == [1.0]
    state = await shop.store.run(RUN)
    assert state is not None
    (group,) = await shop.store.claim_groups(RUN, state.epoch, 1)
    for _ in range(3):  # looks during a long update
        assert await seen(shop) == [1.0]
    commit = StepCommit(
        run=RUN, epoch=state.epoch, step=0, groups=[group.id] * trained,
        discarded=[group.id] * (not trained), versions={}, checkpoint=None, metrics={},
    )  # fmt: skip
    await shop.store.commit_step(commit)
    for _ in range(3):
        assert await seen(shop) == [1.0]
    shop.decider = type(shop.decider)(shop.store, shop.settings)  # a watch that starts
    assert await seen(shop) == [1.0]


async def test_a_session_that_is_deleted_holds_nothing_back(shop: Shop) -> None:
    await shop.session(lane="candidate", ends=False)
    (row,) = await shop.store.rollouts(RUN, state=RolloutState.RUNNING)
    await shop.session(0.0, lane="candidate")
    shop.now += WAIT
    assert await seen(shop) == []
    await shop.store.cancel([row.id])
    await shop.store.forget([row.id])
    assert await seen(shop) == [0.0]


def ended(number: int, version: int, outcome: float, **task: Any) -> Rollout:
    known = [Reward(value=outcome, source=SOURCE)] if not math.isnan(outcome) else []
    return Rollout(
        id=f"s{number}", run=RUN, group=f"s{number}", index=0, purpose=Purpose.TRAIN,
        task={"version": version, "lane": "serving", "began": float(number)} | task,
        state=RolloutState.SUCCEEDED, step=-1, attempts=1, attempt=None, failure=None,
        result={RESULT_ENDED: number + 0.5}, rewards=[mark(number + 0.5), *known],
    )  # fmt: skip


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "WATCHED", 20)
    served: Any = ServedSessions(None, RUN, LiveConfig(wait=0.0))  # type: ignore[arg-type]
    rival = {"candidate": 4, "share": 0.1}
    for number in range(3000):
        outcome = math.nan if number % 3 == 0 else float(number % 2)
        rows = [ended(number, 0, outcome, **(rival if number > 2950 else {}))]
        rows.append(ended(number + 10_000, 9, outcome))  # of a version that serves no more
        served.see(rows, 1e6, LANES)
    compared = served.compared(4, 0)
    assert len(compared) == 33
    assert len(served.known[0]) <= 2 * (20 + 20) + len(compared)
    assert served.outcomes(0)[:20] == [float(n % 2) for n in range(30) if n % 3]  # the first
    assert len(served.newest[0]) == MAX_SESSIONS_READ
    assert 9 not in served.known
    assert len(served._seen) <= 4
    assert served._open == {}
