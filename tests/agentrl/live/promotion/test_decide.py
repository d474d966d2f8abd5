"""What the watch decides about versions, in a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from agentrl.cli import live
from agentrl.core.errors import Conflict
from agentrl.core.types import StepCommit
from agentrl.live import promotion, supervisor
from agentrl.live import promotion as verdict
from agentrl.live.promotion import Decider
from agentrl.live.records import EVENTS, GIVEN, Compared, Documents, HeldOutScore, Lanes, put_score
from agentrl.store import open_store
from tests.agentrl.live.promotion.played import RUN, Shop, config

Open = Callable[..., AbstractAsyncContextManager[Shop]]


@pytest.fixture
def shop(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def opened(*versions: int, **live: Any) -> AsyncIterator[Shop]:
        settings = config(tmp_path, **{"wait": 0.0, "share": 0.5} | live)
        async with open_store(settings.store) as store:
            yield await Shop(store, settings).opened(*versions)

    return opened


async def test_the_first_version_serves_and_the_next_is_its_candidate(shop: Open) -> None:
    async with shop(0) as live:
        assert await live.lanes() == Lanes(serving=0, share=0.5)
        await live.offer(2)
        await live.offer(3)
        (event,) = await live.decided()
        assert (event.kind, event.version, event.why) == ("candidate", 3, "made by 3 steps")
        assert await live.lanes() == Lanes(serving=0, candidate=3, share=0.5)
        assert await live.decided() == []  # version 2 waits until there is no candidate


async def test_a_better_candidate_is_promoted_with_its_reason(shop: Open) -> None:
    async with shop(0, 4) as live:
        for _ in range(120):
            lane, _ = await live.seated()
            await live.session(float(lane == "candidate"), lane=lane, thumb=0.5)
        (event,) = await live.decided()
        assert event.kind == "promoted"
        assert event.lanes == Lanes(serving=4, previous=0, share=0.5)
        assert event.why.startswith("its sessions are better: by ")
        shown = (await live.state()).compared[4]
        assert event.evidence["low"] == shown.low > 0.5
        assert shown.means == (1.0, 0.0)
        assert shown.signals == {"thumb": (0.5, 0.5)}


async def test_a_look_at_every_session_and_one_at_the_end_decide_the_same(shop: Open) -> None:
    async with shop(0, 4) as live:
        at_end = Decider(live.store, live.settings)
        for number in range(60):
            await live.session(float(number % 3 == 0))
            assert await live.decided() == []
        assert await at_end.look(live.now) is None
        found = [one._served.compared(4, 0) for one in (live.decider, at_end)]
        assert {one.rollout for one in found[0]} == {one.rollout for one in found[1]}
        assert len(found[0]) == 60


async def test_a_worse_candidate_is_dropped_before_it_has_served_much(shop: Open) -> None:
    async with shop(0, 4, guard=None) as live:
        served = 0
        while (await live.lanes()).candidate is not None:
            lane, _ = await live.seated()
            served += lane == "candidate"
            await live.session(float(lane == "serving"), lane=lane)
            await live.decided()
        event = (await live.state()).events[-1]
        assert (event.kind, event.worse, event.serving) == ("dropped", True, 0)
        assert served < 20


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("better", "dropped"),
        ("not_worse", "promoted"),
        ("always", "promoted"),
        ("never", "dropped"),
    ],
)
async def test_rules_on_a_candidate_that_is_equal(
    shop: Open, rule: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "MIN_SESSIONS", 5)
    promotion = {"rule": rule, "margin": 0.3, "most": 60}
    async with shop(0, 4, promotion=promotion) as live:
        for _ in range(150):
            await live.session(0.5)
        await live.decided()
        event = next(one for one in (await live.state()).events[2:] if one.version == 4)
        assert (event.kind, event.worse) == (kind, False)
        assert {"dropped": "did not decide", "promoted": ""}[kind] in event.why


async def test_sessions_that_could_not_have_been_the_candidates_do_not_count(shop: Open) -> None:
    async with shop(0) as live:
        for _ in range(30):
            await live.session(0.0)  # before there was a candidate
        await live.offer(4)
        await live.decided()
        for _ in range(10):
            await live.session(1.0)
            await live.session(None)  # nothing is known of it
        live.now += promotion.SHOWN
        await live.decided()
        assert sum((await live.state()).compared[4].sessions) == 10


async def test_trained_sessions_count_though_they_were_trained_between_two_looks(
    shop: Open,
) -> None:
    async with shop(0, 4) as live:
        await live.session(1.0, lane="serving")
        state = await live.store.run(RUN)
        assert state is not None
        (group,) = await live.store.claim_groups(RUN, state.epoch, 1)
        commit = StepCommit(
            run=RUN, epoch=state.epoch, step=0, groups=[group.id], versions={}, checkpoint=None,
            metrics={},
        )  # fmt: skip
        await live.store.commit_step(commit)
        live.now += promotion.SHOWN
        await live.decided()
        assert (await live.state()).compared[4].sessions == (0, 1)


def score(version: int, mean: float) -> HeldOutScore:
    return HeldOutScore(version=version, score=mean, low=mean - 0.1, high=mean + 0.1, tasks=50)


@pytest.mark.parametrize("rule", ["better", "always"])
@pytest.mark.parametrize(("reached", "kind"), [(0.4, "dropped"), (0.7, "promoted")])
async def test_held_out_scores_are_waited_for_and_drop_a_worse_candidate(
    tmp_path: Path, rule: str, reached: float, kind: str
) -> None:
    settings = config(tmp_path, wait=0.0, share=0.5, promotion={"rule": rule})
    settings = replace(settings, tasks=replace(settings.tasks, heldout="tasks.jsonl"))
    async with open_store(settings.store) as store:
        live = await Shop(store, settings).opened(0, 4)
        for _ in range(120):
            lane, _ = await live.seated()
            await live.session(float(lane == "candidate"), lane=lane)
        await put_score(store, RUN, score(0, 0.8))
        assert await live.decided() == []
        await put_score(store, RUN, score(4, reached))
        (event,) = await live.decided()
        assert (event.kind, event.worse) == (kind, kind == "dropped")
        assert event.evidence["held_out"] == (reached, 0.8)
        if kind == "dropped":
            assert event.why == "it solves fewer held-out tasks: 40% (at most 50%) against 80%"


@pytest.mark.parametrize("rule", ["better", "always", "not_worse"])
@pytest.mark.parametrize("fails", ["candidate", "serving"])
async def test_a_candidate_that_cannot_be_scored_does_not_hold_up_newer_ones(
    tmp_path: Path, rule: str, fails: str
) -> None:
    settings = config(tmp_path, wait=0.0, share=0.5, promotion={"rule": rule, "most": 60})
    settings = replace(settings, tasks=replace(settings.tasks, heldout="tasks.jsonl"))
    async with open_store(settings.store) as store:
        live = await Shop(store, settings).opened(0, 4)
        for _ in range(200):  # one that is slow is waited for, though its sessions are better
            lane, _ = await live.seated()
            await live.session(float(lane == "candidate"), lane=lane)
        assert await live.decided() == []
        failing = HeldOutScore(version=4 if fails == "candidate" else 0, failed="no such model")
        await put_score(store, RUN, failing)
        (event,) = await live.decided()
        assert (event.kind, event.worse) == ("dropped", False)
        assert event.why.endswith("sessions there is no held-out score: no such model")
        await live.offer(5)
        (event,) = await live.decided()
        assert (event.kind, event.version) == ("candidate", 5)


@pytest.mark.parametrize("side", ["candidate", "serving"])
async def test_a_score_of_one_task_decides_nothing(tmp_path: Path, side: str) -> None:
    settings = config(tmp_path, wait=0.0, promotion={"rule": "always"})
    settings = replace(settings, tasks=replace(settings.tasks, heldout="tasks.jsonl"))
    async with open_store(settings.store) as store:
        live = await Shop(store, settings).opened(0, 4)
        for version, mean in ((0, 1.0), (4, 0.0)):
            known = score(version, mean)
            if (side == "candidate") == (version == 4):
                known = replace(known, low=None, high=None, tasks=1)
            await put_score(store, RUN, known)
        (event,) = await live.decided()
        assert event.kind == "promoted"


async def test_what_is_offered_by_hand_comes_first(shop: Open) -> None:
    async with shop(0, 4) as live:
        await live.offer(GIVEN + 1, kind="offered by hand")
        await live.offer(GIVEN, kind="offered by hand")
        (event,) = await live.decided()
        assert (event.version, event.lanes.candidate) == (GIVEN, GIVEN)
        assert event.why == "offered by hand: /made; version 4 is not compared any more"
        await live.promote()
        (event,) = await live.decided()
        assert (event.version, event.lanes.candidate) == (GIVEN + 1, GIVEN + 1)


async def test_two_watches_decide_once(shop: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has looked before the first decided, and looks again."""
    async with shop(0) as live:
        other = Decider(live.store, live.settings)
        await live.offer(4)
        seen = await live.state()
        with monkeypatch.context() as patch:
            patch.setattr(Documents, "state", AsyncMock(return_value=seen))
            assert await live.decider.look(live.now) is not None
            with pytest.raises(Conflict, match="version 4: candidate meanwhile"):
                await other.look(live.now + 1)
        assert [event.kind for event in (await live.state()).events] == ["first", "candidate"]
        assert await other.look(live.now + 1) is None


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_a_clock_that_jumps_loses_no_decision(shop: Open, jump: float) -> None:
    async with shop(0, 4) as live:
        for number in range(120):
            lane, _ = await live.seated()
            await live.session(float(lane == "candidate"), lane=lane)
            live.now += jump if number == 60 else 1.0
        (event,) = await live.decided()
        assert event.kind == "promoted"
        assert [one.kind for one in (await live.state()).events] == [
            "first",
            "candidate",
            "promoted",
        ]


async def test_a_damaged_document_is_logged_and_decisions_go_on_after_its_repair(
    shop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = asyncio.Queue[str]()
    monkeypatch.setattr(
        supervisor.log, "warning", lambda text, *args, **_: said.put_nowait(text % args)
    )
    async with shop(0, 4) as live:
        good = (await live.store.documents(RUN, EVENTS))["0000001"]
        await live.store.put_documents(RUN, EVENTS, {"0000001": {"kind": 7}}, replace=True)
        work = partial(promotion.decide_promotions, live.store, live.settings)
        watching = asyncio.create_task(supervisor.keep_working("nothing is decided", work))
        assert "the document 'live-events 0000001' of a live run is damaged" in await said.get()
        await live.store.put_documents(RUN, EVENTS, {"0000001": good}, replace=True)
        cursor = await live.store.cursor()
        await live.offer(9, kind="offered by hand")
        while len((await live.state()).events) < 3:
            cursor = await live.store.wait(cursor, timeout=10.0)
        watching.cancel()


def test_what_a_score_leaves_out_is_said_beside_it() -> None:
    ours, theirs = replace(score(4, 0.4), missing=3), score(0, 0.8)
    assert verdict.held_out_worse(ours, theirs) == (
        "it solves fewer held-out tasks: 40%, 3 rollouts without a score (at most 50%) against 80%"
    )
    found = Compared(
        version=4, serving=0, time=0.0, sessions=(9, 9), low=-1.0, high=1.0, means=(None, None),
        held_out=(0.4, 0.8), missing=(3, 0),
    )  # fmt: skip
    figures = [live._figures(found, side)[-1] for side in (0, 1)]
    assert figures == ["40.0%, 3 rollouts without a score", "80.0%"]
