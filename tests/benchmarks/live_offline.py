"""The way to a better agent without `agentrl live`: collect, label, train, deploy, again.

The base model, the customers and what is known of each turn are those of the live run.
`agentrl gateway serve` records a batch of sessions of the model that `agentrl serve` answers with;
what is known of a turn is the label of its first call: votes and corrections, which
are what it records of users (`VOTED`), or also what the judge of the live run says (`JUDGED`). Of
all calls so far `agentrl data mine` and `agentrl train` make a policy with KTO, which is served
next. Until a hundred sessions reach the goal, or `MAX_SESSIONS` were played.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from agentrl.algorithms.preferences.turns import SIGNAL, turn_values, turns
from agentrl.core.config import load
from agentrl.core.types import Reward, Scope, StepReward, Trace
from agentrl.live.labels import Asker
from agentrl.live.signals import replies
from agentrl.store import open_store
from tests.agentrl.live.shop import free_port
from tests.benchmarks.live_example import (
    EXAMPLE,
    answering,
    command,
    copied,
    customers,
    sessions_to,
)

MAX_SESSIONS = 3000  # sessions
PER_SECOND = 12.0  # sessions: nothing is trained meanwhile
STORE = "runs/shop/store.db"
BASE = f"""
store = "sqlite:///{STORE}"
steps = 1
[policy]
build = "policy.py:build"
[data]
name = "greeting"
[algorithm]
preset = "sft"
groups = 1
lr = 1e-12   # the model as it is built, as a run that can be served
"""
KTO = f"""
store = "sqlite:///{STORE}"
steps = {{steps}}
[policy]
model = "{{before}}"
[data]
name = "worth"
[algorithm]
preset = "kto"
groups = 32
lr = {{lr}}
options.beta = {{beta}}
options.desirable = {{desirable}}
"""
GREETING = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}]
SHOP = f"""
name = "shop"
store = "sqlite:///{STORE}"
[upstreams.model]
base_url = "http://127.0.0.1:{{port}}/v1"
[runner]
port = {{own}}
"""


@dataclass
class Recipe:
    """What was tuned, on seed 10 alone."""

    batch: int  # sessions until the next policy is served
    judge: bool  # whether the live run's judge is asked about turns
    epochs: float  # over all sessions so far
    lr: float = 3e-4
    beta: float = 1.0
    desirable: float = 2.5  # weight of good calls, of which there are fewer


VOTED = Recipe(500, judge=False, epochs=16.0)
JUDGED = Recipe(500, judge=True, epochs=8.0)


async def offline(seed: int, attack: float, recipe: Recipe) -> list[bool]:
    """Whether each session's first answer was right, in the order of their ends."""
    with copied() as folder:
        way = Offline(folder, seed, attack, recipe)
        await way.begin()
        right: list[bool] = []
        while len(right) < MAX_SESSIONS and sessions_to(right) is None:
            if right:
                await way.learn()
            right += await way.collect(len(right))
        return right


@dataclass
class Offline:
    """Who goes this way in a folder. run: whose policy is served."""

    folder: Path
    seed: int
    attack: float
    recipe: Recipe
    run: str = "base"
    judged: set[str] = field(default_factory=set)

    async def begin(self) -> None:
        (self.folder / "greeting.jsonl").write_text(json.dumps({"messages": GREETING}))
        (self.folder / "runs/shop").mkdir(parents=True)
        await command(
            self.folder, "data", "import", "greeting", "greeting.jsonl",
            "--store", STORE, "--test", "0",
        )  # fmt: skip
        await self.train("base", BASE)

    async def train(self, name: str, settings: str) -> None:
        (self.folder / f"{name}.toml").write_text(settings)
        await command(self.folder, "train", f"{name}.toml", f"name={name}", f"seed={self.seed}")
        self.run = name

    def weights(self) -> Path:
        """The newest checkpoint of the run."""
        return max((self.folder / "runs" / self.run / "checkpoints").glob("0*"))

    async def collect(self, first: int) -> list[bool]:
        """The sessions of a batch, recorded and judged."""
        own, port = free_port(), free_port()
        (self.folder / "shop.toml").write_text(SHOP.format(port=port, own=own))
        serve = ["serve", self.run, "--store", STORE, "--port", str(port), *SAMPLING]
        gateway = ["gateway", "serve", "shop.toml"]
        async with (
            answering(self.folder, port, *serve),
            answering(self.folder, own, *gateway) as url,
        ):
            played = await customers(
                self.folder, url, first=first, sessions=self.recipe.batch, seed=self.seed,
                attack=self.attack, per_second=PER_SECOND, leave_open=True,
            )  # fmt: skip
        await self.judge()
        return [one["right"] for one in played]

    async def judge(self) -> None:
        """Value the calls of new sessions."""
        config = load(self.folder / "run.toml", ["live.running=true"])
        async with (
            open_store(f"sqlite:///{self.folder / STORE}") as store,
            Asker(store, config) as asker,
        ):
            for row in await store.rollouts("shop"):
                trace = None if row.id in self.judged else await store.trace(row.id)
                if trace is not None:
                    after = replies(trace.transitions) if self.recipe.judge else []
                    said = await asker.judge(after, row.id)
                    await store.add_rewards(worth(trace, said))
                    self.judged.add(row.id)

    async def learn(self) -> None:
        """A policy of what was recorded, by KTO."""
        recipe, folder = self.recipe, self.folder
        await command(
            folder, "data", "mine", "worth", "--store", STORE, "--run", "shop", "--how", "label",
            "--policy", "model", "--reward", "worth", "--test", "0", "--inexact",
        )  # fmt: skip
        async with open_store(f"sqlite:///{folder / STORE}") as store:
            items = (await store.datasets("worth"))[-1].items
        settings = KTO.format(
            steps=ceil(recipe.epochs * items / 32), before=self.weights(), lr=recipe.lr,
            beta=recipe.beta, desirable=recipe.desirable,
        )  # fmt: skip
        number = int(self.run.removeprefix("kto")) if self.run != "base" else 0
        await self.train(f"kto{number + 1}", settings)


SAMPLING = tuple(
    f"sampling.{key}={value}"
    for key, value in msgspec.toml.decode((EXAMPLE / "run.toml").read_bytes())["sampling"].items()
)


def worth(trace: Trace, said: dict[str, float]) -> list[StepReward]:
    """What is known of each turn, as a value of its first call. Not of its other calls: what they
    answer to a tool's result is right even if that was the wrong tool, and KTO would unlearn it."""
    calls = trace.transitions
    about: dict[str, Any] = {"scope": Scope.TRANSITION, "source": "judge"}
    signals = [Reward(name=SIGNAL, target=id, value=v, **about) for id, v in said.items()]
    values = turn_values(calls, [*trace.rollout.rewards, *signals])
    return [
        StepReward(
            rollout=trace.rollout.id,
            reward=Reward(name="worth", target=calls[first].id, value=value, **about),
        )
        for (first, *_), value in zip(turns(calls), values, strict=True)
        if value is not None
    ]
