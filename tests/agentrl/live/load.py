"""Agents under load, and what must be true of a live run whatever was killed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from math import isnan

from openai import AsyncOpenAI, OpenAIError

from agentrl.core.types import Reward, StepReward, Transition
from agentrl.live.records import ended
from agentrl.store.base import Store
from tests.agentrl.live.shop import RUN, Shop, until

CLIENTS, TURNS = 4, 3


@dataclass
class Load:
    """Agents that talk in sessions until told to stop, with the SDK's own retries."""

    client: AsyncOpenAI
    pause: float = 0.0  # seconds between two calls of an agent
    answers: list[tuple[str, str, str]] = field(default_factory=list)  # session, question, answer
    seconds: list[float] = field(default_factory=list)  # of each answer
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
            began = time.monotonic()
            try:
                answer = await self.client.chat.completions.create(
                    model="gpt-4o", messages=said, extra_headers=headers
                )
            except OpenAIError as error:
                self.failed.append(f"{name}: {error!r}")
                return
            self.seconds.append(time.monotonic() - began)
            text = answer.choices[0].message.content or ""
            self.answers.append((name, said[-1]["content"], text))
            said.append({"role": "assistant", "content": text})
            await asyncio.sleep(self.pause)


async def keep_labelling(store: Store) -> None:
    """Give every ended session an outcome, as watch does."""
    while True:
        rows = [row for row in await ended(store, RUN) if isnan(row.reward())]
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


async def lost(load: Load, store: Store) -> list[tuple[str, str, str]]:
    """Answers that agents have read, and that are not in the store."""
    kept = {
        (call.messages[-1]["content"], (call.answer or {}).get("content"))
        for call in await stored(store)
    }
    return [one for one in load.answers if one[1:] not in kept]


async def trained_twice(store: Store) -> list[str]:
    """Questions, each of which agents ask once, that have several trained answers."""
    asked = Counter(c.messages[-1]["content"] for c in await trained(store) if c.repeats is None)
    return [question for question, times in asked.items() if times > 1]


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
