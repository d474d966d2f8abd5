"""The guard takes a version back soon, and only one that is worse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config.live import LiveConfig, PromotionConfig
from agentrl.core.types import Reward, RolloutState, StepReward
from agentrl.live.promotion import REFUSAL
from agentrl.live.records import FAILED, GATEWAY, Lanes
from agentrl.live.served import EARLY
from agentrl.store import open_store
from tests.agentrl.live.promotion.played import RUN, Shop, config

WORSE: dict[str, dict[str, Any]] = {
    "failures": {"said": ""},
    "refusals": {"said": "I'm sorry, but I can't help with that."},
    "length": {"tokens": 40},
    "cut": {"finish": "length"},
}


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Shop]:
    settings = config(tmp_path, wait=0.0)
    async with open_store(settings.store) as store:
        shop = await Shop(store, settings).opened(0)
        for _ in range(25):
            await shop.session(0.9)
        await shop.offer(4)
        await shop.decided()
        yield shop


@pytest.mark.parametrize("kind", WORSE)
async def test_a_candidate_is_back_while_its_first_sessions_go_on(live: Shop, kind: str) -> None:
    served = 0
    while not (events := await live.decided()):
        served += 1
        await live.session(lane="candidate", ends=False, **WORSE[kind])
    (event,) = events
    assert served <= 10
    assert (event.kind, event.worse, event.lanes) == ("rolled back", True, Lanes(serving=0))
    assert event.evidence["limit"] == {"cut": "failures"}.get(kind, kind)
    assert event.why.endswith("more than the guard allows")


async def test_a_version_that_serves_is_rolled_back_for_the_one_before(live: Shop) -> None:
    await live.promote()
    assert await live.decided() == []
    served = 0
    while not (events := await live.decided()):
        served += 1
        await live.session(0.2)
    assert (events[0].kind, events[0].lanes) == ("rolled back", Lanes(serving=0))
    assert events[0].evidence["limit"] == "drop"
    assert served < 50
    await live.decided()
    assert {version for version, _ in live.decider._guard._calls} == set()  # 4 is in no lane
    assert live.decider._guard._usual.keys() == {0}


@pytest.mark.parametrize(("usual", "kind"), [(0.9, "rolled back"), (0.0, None)])
async def test_a_version_that_makes_users_complain_is_back_before_their_wait_has_passed(
    tmp_path: Path, usual: float, kind: str | None
) -> None:
    settings = config(tmp_path, wait=600.0, people={"per_user": 0})
    async with open_store(settings.store) as store:
        live = await Shop(store, settings).opened(0)
        for _ in range(25):
            await live.session(usual, vote=usual)
        live.now += 700
        await live.offer(4)
        await live.decided()
        for _ in range(12):
            await live.session(0.0, lane="candidate", vote=0.0)
        assert await live.decided() == []
        live.now += EARLY
        events = await live.decided()
        assert [event.kind for event in events] == ([kind] if kind else [])
        for event in events:
            assert event.why.startswith("its first 6 outcomes, as far as users complain at once,")


async def test_what_also_happens_to_the_other_version_is_no_alarm(live: Shop) -> None:
    for _ in range(40):
        await live.session(0.9, said="", lane="serving")
    live.decider = type(live.decider)(live.store, live.settings)  # which knows of no usual calls
    for _ in range(40):
        await live.session(0.9, said="", lane="candidate")
        assert await live.decided() == []


async def test_what_begins_to_happen_to_both_versions_is_no_alarm(live: Shop) -> None:
    for _ in range(3):  # what is usual is known now
        await live.session(0.9, lane="candidate")
        assert await live.decided() == []
    for _ in range(60):
        await live.session(0.9, said="", lane="serving")
    for _ in range(10):
        await live.session(0.9, said="", lane="candidate")
        assert await live.decided() == []


async def test_calls_that_got_no_answer_are_failed_ones(live: Shop) -> None:
    await live.session(lane="candidate", ends=False)
    (row,) = await live.store.rollouts(RUN, state=RolloutState.RUNNING)
    assert await live.decided() == []
    lost = Reward(name=FAILED, value=6.0, source=GATEWAY)
    await live.store.add_rewards([StepReward(rollout=row.id, reward=lost)])
    (event,) = await live.decided()
    assert event.why.startswith("80% of its first 5 calls failed, 0% with version 0")


async def test_calls_of_other_policies_are_not_the_candidates(live: Shop) -> None:
    """A session that was seated anew has calls of another version."""
    real, live.seated = live.seated, None  # type: ignore[method-assign,assignment]

    async def seated(lane: str = "") -> tuple[str, int]:
        return "candidate", 99

    live.seated = seated  # type: ignore[method-assign]
    for _ in range(5):
        await live.session(said="", ends=False)
    assert await live.decided() == []
    live.seated = real  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("said", "refuses"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot assist with this request.", True),
        ("Sorry, I am unable to do so", True),
        ("I'm sorry to hear that! I will refund it.", False),
        ("Your parcel arrives on Monday; I cannot say when.", False),
    ],
)
def test_refusals_are_known_by_how_they_begin(said: str, refuses: bool) -> None:
    assert bool(REFUSAL.search(said)) is refuses


def test_impossible_settings_are_sentences() -> None:
    live = LiveConfig(share=1.0, promotion=PromotionConfig(most=19))
    assert [*live.problems(None)] == [
        "live.promotion.rule = 'better' compares two versions that serve at the same time: "
        "live.share must be between 0 and 1, not 1",
        "live.promotion.most = 19: no decision is made on fewer than 20",
    ]
