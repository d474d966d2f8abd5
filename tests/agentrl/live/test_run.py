"""A live run in real processes: it serves, records, learns, moves traffic, and survives kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.live.records.documents import Lanes
from agentrl.store.base import Store
from agentrl.types import Transition
from tests.agentrl.live.shop import (
    RUN,
    half,
    label,
    move,
    offered,
    running,
    seated,
    talk,
    until,
)


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
        await move(store, Lanes(serving=0), kind="taken back", version=1)
        await seated(store, client, 0)
        for number in range(4):
            await talk(client, f"t{number}")
        await label(store, 4, half)
        await offered(store, 2)  # after the learner has gone on from version 0

        async def printed() -> bool:
            text = (tmp_path / "front.log").read_text()
            return "goes on from version 0: version 1 was found bad" in text

        await until(printed, what="the console says it")
