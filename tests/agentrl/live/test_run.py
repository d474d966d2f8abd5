"""A live run in real processes: it serves, records, learns, moves traffic, and survives kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.types import SESSION, Transition
from agentrl.live.records import Lanes, ended, group_of, live_state
from agentrl.store.base import Store
from tests.agentrl.live.shop import RUN, half, label, move, offered, running, seated, talk, until


async def calls_of(store: Store, step: int) -> list[Transition]:
    rows = await store.rollouts(RUN, trained=step)
    return [
        call for calls in (await store.calls([row.id for row in rows])).values() for call in calls
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_live_run_serves_learns_and_moves_traffic(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    async with running(tmp_path, tiny_model_dir) as (_, store, client):
        for number in range(4):
            await talk(client, f"s{number}")
        rows = await label(store, 4, half)
        assert {row.task["version"] for row in rows} == {0}
        await offered(store, 1)
        (step,) = [row for row in await store.steps(RUN) if row.committed]
        assert step.metrics["live/sessions"] == 4
        assert step.metrics["calls/inexact"] == 0
        assert {(call.policy, call.version) for call in await calls_of(store, 0)} == {
            ("policy@0", 0)
        }
        await move(store, Lanes(serving=0, candidate=1, share=1.0), kind="candidate", version=1)

        await seated(store, client, 1)
        await move(store, Lanes(serving=0), kind="rolled back", version=1)
        await seated(store, client, 0)
        for number in range(4):
            await talk(client, f"t{number}")
        await label(store, 4, half)
        await offered(store, 2)  # after the learner has gone on from version 0

        async def printed() -> bool:
            text = (tmp_path / "front.log").read_text()
            return (
                "continues from version 0: version 1, from which the learner comes, was rejected"
                in text
            )

        await until(printed, what="the console says it")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_sessions_without_a_signal_are_discarded_although_nothing_can_be_trained(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    async with running(tmp_path, tiny_model_dir, "live.every=1") as (_, store, client):

        async def none() -> bool:
            counts = await store.counts(RUN)
            return counts.groups_discarded == discarded and not await ended(store, RUN)

        for discarded in (1, 2):
            await talk(client, f"unlabelled {discarded}")
            await until(none, what="the session is discarded")
        assert [*(await live_state(store, RUN)).versions] == [0]  # nothing new is offered
        for number in range(4):
            await talk(client, f"s{number}")
        rows = await label(store, 4, half)
        assert {row.task["version"] for row in rows} == {0}
        await offered(store, 3)


FRAGILE = """
from agentrl.algorithms import Algo, preset


def outcome(batch):
    return batch.rewards["outcome"][batch.token_rollout]


def break_(groups, trained):
    for group in groups:
        for row in group.rollouts:
            if any("poison" in str(call.messages) for call in row.transitions):
                raise KeyError("poison")
    return groups


@preset("fragile", clip=(0.2, 0.2))
def fragile() -> Algo:
    return Algo(outcome, prepare=(break_,))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_session_that_breaks_the_learner_is_discarded_and_the_others_are_trained(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    (tmp_path / "mine.py").write_text(FRAGILE)
    settings = (
        "algorithm.preset=mine.py:fragile+tis",
        "live.sessions=2",
        "live.every=1",
        "live.wait=20",
    )
    async with running(tmp_path, tiny_model_dir, *settings) as (_, store, client):
        for number in range(4):
            await talk(client, f"s{number}", about="poison" if number == 1 else "Ada")
        poisoned = group_of(RUN, "s1", 1)
        await label(store, 4, half)

        async def over() -> bool:
            groups = await store.groups(RUN, step=SESSION)
            return all(row.state in ("trained", "discarded") for row in groups)

        await until(over, what="each session is trained or discarded", seconds=180.0)
        found = {row.id: row.state for row in await store.groups(RUN, step=SESSION)}
        assert found.pop(poisoned) == "discarded"
        assert [*found.values()] == ["trained"] * 3
