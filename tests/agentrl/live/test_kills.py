"""Each process of a live run is killed under load: no request fails, no answer is lost, no call is
trained twice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAIError

from agentrl.live.sessions import ended
from agentrl.store.base import Store
from agentrl.types import Reward, StepReward, Transition
from tests.agentrl.live.shop import RUN, Shop, running, until

CLIENTS, TURNS = 4, 3


@dataclass
class Load:
    """Agents that talk in sessions until told to stop, with the SDK's own retries."""

    client: AsyncOpenAI
    answers: list[tuple[str, str, str]] = field(default_factory=list)  # session, question, answer
    failed: list[str] = field(default_factory=list)
    stopped: bool = False

    async def run(self) -> None:
        await asyncio.gather(*(self.agent(number) for number in range(CLIENTS)))

    async def agent(self, number: int) -> None:
        session = 0
        while not self.stopped:
            await self.talk(f"agent{number}-{session}")
            session += 1

    async def talk(self, name: str) -> None:
        said = []
        for turn in range(TURNS):
            said.append({"role": "user", "content": f"{name} asks {turn}"})
            headers = {"x-session-id": name} | ({"x-agentrl-end": "1"} if turn == TURNS - 1 else {})
            try:
                answer = await self.client.chat.completions.create(
                    model="gpt-4o", messages=said, extra_headers=headers
                )
            except OpenAIError as error:
                self.failed.append(f"{name}: {error!r}")
                return
            text = answer.choices[0].message.content or ""
            self.answers.append((name, said[-1]["content"], text))
            said.append({"role": "assistant", "content": text})


async def keep_labelling(store: Store) -> None:
    """Give every ended session an outcome, as watch does."""
    while True:
        rows = [row for row in await ended(store, RUN) if row.reward() != row.reward()]
        given = [Reward(value=float(row.group[-1] < "8"), source="live") for row in rows]
        await store.add_rewards(
            [StepReward(rollout=row.id, reward=one) for row, one in zip(rows, given, strict=True)]
        )
        await asyncio.sleep(0.2)


async def stored(store: Store) -> list[Transition]:
    rows = await store.rollouts(RUN, step=-1)
    return [
        call for calls in (await store.calls([row.id for row in rows])).values() for call in calls
    ]


async def trained(store: Store) -> list[Transition]:
    rows = [row for row in await store.rollouts(RUN, step=-1) if row.trained is not None]
    return [
        call for calls in (await store.calls([row.id for row in rows])).values() for call in calls
    ]


async def check(load: Load, store: Store) -> None:
    """Nothing failed; what agents read is in the store; nothing was trained twice."""
    assert load.failed == []
    kept = {(call.messages[-1]["content"], call.answer["content"]) for call in await stored(store)}
    lost = [one for one in load.answers if one[1:] not in kept]
    assert lost == []
    asked = [c.messages[-1]["content"] for c in await trained(store) if c.repeats is None]
    twice = {one for one in asked if asked.count(one) > 1}
    assert twice == set()


async def survive(shop: Shop, store: Store, load: Load, name: str) -> None:
    """Kill a process, and wait until it is back and agents were answered after it."""
    old = await shop.kill(name)
    if name == "supervisor":
        await shop.start()
    else:
        await shop.pid(name, other=old)
    before = len(load.answers)

    async def going_on() -> bool:
        return len(load.answers) >= before + 2 * CLIENTS or bool(load.failed)

    await until(going_on, what=f"agents are answered after the end of {name}")


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
        await check(load, store)
