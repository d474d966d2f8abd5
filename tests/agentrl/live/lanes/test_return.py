"""A version that a user offers, in real processes: it serves its share, and is back though the
algorithm process stands still; then its sessions go on with the serving version."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from agentrl.live.records.documents import told
from agentrl.live.records.marks import outcome_of
from agentrl.live.records.table import policy_of
from agentrl.runners.sessions.feedback import session_group
from agentrl.store.base import Store
from agentrl.types import SESSION, Purpose, Reward, StepReward, Transition
from tests.agentrl.live.shop import RUN, Shop, running, until


async def agentrl(shop: Shop, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentrl", "live", words[0], str(shop.file), *words[1:],
        cwd=shop.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def say(client: AsyncOpenAI, session: str, *, end: bool) -> None:
    headers = {"x-session-id": session} | ({"x-agentrl-end": "1"} if end else {})
    said = [{"role": "user", "content": f"Where is {session}?"}]
    given = {"messages": said, "extra_headers": headers}
    await client.chat.completions.create(model="gpt-4o", **given)  # type: ignore[call-overload]


async def calls_of(store: Store, session: str) -> list[Transition]:
    group = session_group(RUN, session)
    (row,) = await store.rollouts(RUN, group=group)
    return (await store.calls([row.id]))[row.id]


async def judge(store: Store, worse: int) -> None:
    """Outcomes of sessions that have none: 0 with a version, else 1."""
    rows = await store.rollouts(RUN, purpose=Purpose.TRAIN, step=SESSION)
    new = [row for row in rows if row.state.terminal and outcome_of(row) != outcome_of(row)]
    await store.add_rewards(
        [
            StepReward(
                rollout=row.id,
                reward=Reward(value=float(row.task["version"] != worse), source="live"),
            )
            for row in new
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_worse_version_is_back_while_nothing_learns(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    settings = ("live.share=0.5", "live.sessions=1000", "live.guard.failures=1.0")
    settings += ("live.people.per_user=0",)
    async with running(tmp_path, tiny_model_dir, *settings) as (shop, store, client):
        first = tmp_path / "runs/shop/versions/policy-0"
        assert "once the run's training half has copied and loaded it" in await agentrl(
            shop, "offer", str(first)
        )

        async def offered() -> int | None:
            lanes = (await told(store, RUN)).lanes
            return lanes.candidate if lanes else None

        worse = await until(offered, what="the candidate is served")
        for number in range(60):
            await say(client, f"s{number}", end=True)
        name = "s0"
        while (await calls_of(store, name))[0].policy != policy_of(worse) or name == "s0":
            number += 1
            await say(client, name := f"s{number}", end=False)
        algorithm = await shop.pid("algorithm")
        os.kill(algorithm, signal.SIGSTOP)
        await judge(store, worse)

        async def taken_back() -> bool:
            return len((await told(store, RUN)).events) > 2

        await until(taken_back, what="the version is taken back")
        event = (await told(store, RUN)).events[2]
        assert (event.kind, event.version, event.worse) == ("taken back", worse, True)
        assert event.evidence["limit"] == "drop"
        said = " ".join((await agentrl(shop, "status")).split())
        assert "its first 3 outcomes are 0% on average, 100% with version 0" in said
        os.kill(algorithm, signal.SIGCONT)
        await say(client, name, end=True)
        policies = [call.policy for call in await calls_of(store, name)]
        assert policies == [policy_of(worse), policy_of(0)]
