"""A version that a user offers, in real processes: it serves its share, and is back though the
algorithm process stands still; then its sessions go on with the serving version."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from agentrl.core.types import Transition
from agentrl.live.records import TOKEN, live_state, policy_of
from agentrl.runners.feedback import session_group
from agentrl.store.base import Store
from tests.agentrl.live.shop import RUN, Shop, running, until


async def agentrl(shop: Shop, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentrl", "live", words[0], str(shop.file), *words[1:],
        cwd=shop.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def say(client: AsyncOpenAI, session: str, *, end: bool) -> str:
    """Call the model in a session; returns the token for its feedback."""
    headers = {"x-session-id": session} | ({"x-agentrl-end": "1"} if end else {})
    said = [{"role": "user", "content": f"Where is {session}?"}]
    given = {"messages": said, "extra_headers": headers}
    calls = client.chat.completions.with_raw_response
    answer = await calls.create(model="gpt-4o", **given)  # type: ignore[call-overload]
    return str(answer.headers.get(TOKEN, ""))


async def calls_of(store: Store, session: str) -> list[Transition]:
    group = session_group(RUN, session)
    (row,) = await store.rollouts(RUN, group=group)
    return (await store.calls([row.id]))[row.id]


async def judge(shop: Shop, tokens: dict[str, str], sessions: Sequence[str], value: float) -> None:
    """Vote on sessions, and end them. tokens: of the sessions, by name."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{shop.port}/v1") as client:
        for name in sessions:
            vote = {"session": name, "value": value}
            headers = {TOKEN: tokens[name]}
            (await client.post("/feedback", json=vote, headers=headers)).raise_for_status()
            (await client.post("/sessions/end", json={"session": name})).raise_for_status()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_worse_version_is_back_while_nothing_learns(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    settings = ("live.share=0.5", "live.sessions=1000")
    settings += ("live.people.per_user=0",)
    async with running(tmp_path, tiny_model_dir, *settings) as (shop, store, client):
        first = tmp_path / "runs/shop/versions/policy-0"
        assert "once the run's training half has copied and loaded it" in await agentrl(
            shop, "offer", str(first)
        )

        async def offered() -> int | None:
            lanes = (await live_state(store, RUN)).lanes
            return lanes.candidate if lanes else None

        worse = await until(offered, what="the candidate is served")
        by_policy: dict[str | None, list[str]] = defaultdict(list)
        tokens = dict[str, str]()
        for number in range(60):
            tokens[f"s{number}"] = await say(client, f"s{number}", end=False)
            (call,) = await calls_of(store, f"s{number}")
            by_policy[call.policy].append(f"s{number}")
        *votes, name = by_policy[policy_of(worse)]
        algorithm = await shop.pid("algorithm")
        os.kill(algorithm, signal.SIGSTOP)
        await judge(shop, tokens, by_policy[policy_of(0)], 1.0)
        await judge(shop, tokens, votes, 0.0)

        async def rolled_back() -> bool:
            return len((await live_state(store, RUN)).events) > 2

        await until(rolled_back, what="the version is rolled back")
        event = (await live_state(store, RUN)).events[2]
        assert (event.kind, event.version, event.worse) == ("rolled back", worse, True)
        assert event.evidence["limit"] == "drop"
        said = " ".join((await agentrl(shop, "status")).split())
        assert "its first 3 outcomes are 0% on average, 100% with version 0" in said
        os.kill(algorithm, signal.SIGCONT)
        await say(client, name, end=True)
        policies = [call.policy for call in await calls_of(store, name)]
        assert policies == [policy_of(worse), policy_of(0)]
