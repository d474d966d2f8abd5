"""A live run whose gateway, labels and algorithm process are played by the test."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import msgspec

from agentrl.cli.live import by_hand
from agentrl.core.config import RunConfig, resolve
from agentrl.core.types import (
    SESSION,
    Attempt,
    NewRollout,
    Outcome,
    Reward,
    StepReward,
    Transition,
    float32,
    int32,
)
from agentrl.live.promotion import Decider
from agentrl.live.records import (
    MARK,
    OUTCOME,
    SOURCE,
    Event,
    Lanes,
    LiveState,
    Mark,
    Version,
    VersionKind,
    decide,
    live_state,
    policy_of,
    put_version,
)
from agentrl.store.base import Store

RUN = "shop"


def config(folder: Path, **live: Any) -> RunConfig:
    given = {"name": RUN, "store": f"sqlite:///{folder}/store.db", "output": str(folder)}
    return resolve({**given, "root": str(folder), "live": live}, source="shop.toml")


class Shop:
    """Serves sessions by the run's lanes, and asks what is decided about them."""

    def __init__(self, store: Store, settings: RunConfig, *, seed: int = 0) -> None:
        self.store, self.settings = store, settings
        self.random, self.now, self.sessions = random.Random(seed), time.time(), 0
        self.decider = Decider(store, settings)

    async def opened(self, *versions: int) -> Shop:
        """With these versions, the first of which serves."""
        await self.store.open_run(RUN, {})
        for version in versions:
            await self.offer(version, kind="trained" if version else "first")
            await self.decided()
        return self

    async def offer(self, version: int, kind: VersionKind = "trained", step: int = 0) -> None:
        made: dict[str, Any] = {"version": version, "step": step or version, "kind": kind}
        made |= {"path": f"versions/policy-{version}", "offered": self.now}
        made |= {"given": "/made"} if kind == "offered by hand" else {}
        await put_version(self.store, RUN, Version(**made))

    async def promote(self) -> None:
        """The candidate, by hand."""
        await decide(self.store, RUN, known := await self.state(), by_hand(known, "promoted", None))

    async def state(self) -> LiveState:
        return await live_state(self.store, RUN)

    async def lanes(self) -> Lanes:
        known = (await self.state()).lanes
        assert known is not None
        return known

    async def decided(self) -> list[Event]:
        """What the watch decides now."""
        found = []
        while event := await self.decider.look(self.now):
            found.append(event)
        return found

    async def seated(self, lane: str = "") -> tuple[str, int]:
        """Lane and version of a new session, drawn as a gateway does unless it is given."""
        lanes = await self.lanes()
        drawn = self.random.random() < lanes.share and lanes.candidate is not None
        lane = lane or ("candidate" if drawn else "serving")
        version = lanes.candidate if lane == "candidate" else lanes.serving
        assert version is not None
        return lane, version

    async def session(
        self,
        outcome: float | None = 1.0,
        *,
        lane: str = "",
        said: str = "It arrives on Monday.",
        tokens: int = 4,
        finish: str = "stop",
        ends: bool = True,
        **signals: float,
    ) -> str:
        """A session of one call; returns the lane in which it was. outcome: None is unknown."""
        lane, version = await self.seated(lane)
        attempt = await self._begin(lane, version)
        call = Transition(
            id=f"{attempt.id}-0", attempt=attempt.id, index=0, prompt=int32([1]),
            completion=int32([2] * tokens), logprobs=float32([-1.0] * tokens),
            policy=policy_of(version), version=version, finish=finish,
            answer={"role": "assistant", "content": said},
        )  # fmt: skip
        await self.store.add_transitions([call])
        if ends:
            await self.store.finish([Outcome(attempt=attempt.id, fence=attempt.fence)])
            await self.label(attempt.rollout.id, outcome, signals)
        return lane

    async def label(self, id: str, outcome: float | None, signals: dict[str, float]) -> None:
        day = time.strftime("%Y-%m-%d", time.gmtime(self.now))
        mark = Mark(ended=self.now, day=day, explicit=True, posted=signals)
        note = msgspec.json.encode(mark).decode()
        rows = [Reward(name=MARK, value=1.0, source=SOURCE, note=note)]
        if outcome is not None and not math.isnan(outcome):
            rows.append(Reward(name=OUTCOME, value=outcome, source=SOURCE))
        await self.store.add_rewards([StepReward(rollout=id, reward=row) for row in rows])

    async def _begin(self, lane: str, version: int) -> Attempt:
        lanes, self.sessions, self.now = await self.lanes(), self.sessions + 1, self.now + 0.001
        id = f"{RUN}/{self.random.randbytes(12).hex()}"
        task = {"lane": lane, "version": version, "candidate": lanes.candidate, "began": self.now}
        row = NewRollout(
            id=f"{id}/0", run=RUN, group=id, index=0, step=SESSION,
            task=task | {"share": lanes.share}, seats={"policy": policy_of(version)},
        )  # fmt: skip
        await self.store.enqueue([row])
        (attempt,) = await self.store.claim(1, runner=f"gateway {id}", lease=60.0, run=RUN)
        return attempt
