"""Each process of a live run is killed under load: no request fails, no answer is lost, no call is
trained twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.agentrl.live.load import Load, keep_labelling, lost, survive, trained_twice
from tests.agentrl.live.shop import RUN, running, until


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_live_run_survives_the_end_of_each_process(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    async with running(tmp_path, tiny_model_dir) as (shop, store, client):
        load = Load(client)
        working = asyncio.create_task(load.run())
        labelling = asyncio.create_task(keep_labelling(store))
        for name in ("gateway", "algorithm", "watch", "supervisor", "gateway"):
            await survive(shop, store, load, name)
        load.stopped = True
        await working

        async def learned() -> bool:
            return len([row for row in await store.steps(RUN) if row.committed]) >= 2

        await until(learned, what="two steps are trained")
        labelling.cancel()
        assert load.failed == []
        assert await lost(load, store) == []
        assert await trained_twice(store) == []
