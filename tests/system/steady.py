"""A run without chance: the same tokens come back for the same rollout. It may be struck anywhere.

python -m tests.system.steady KIND FOLDER MODEL [POINT:NUMBER]

Only the agents' side and the policy server are replaced; store, loop, learner and checkpoints are
those of every run. At the NUMBER-th time it passes POINT the process kills itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.train import main, saving, serving
from agentrl.core.config import RunConfig, derived, resolve
from agentrl.core.errors import PolicyError
from agentrl.core.types import (
    Attempt,
    ErrorKind,
    Failure,
    Outcome,
    Reward,
    Transition,
    float32,
    int32,
)
from agentrl.store import open_store

STEPS = 6
# Before the update, in the middle of it, with the checkpoint on disk, after the commit.
POINTS = ("update", "optimizer", "checkpoint", "commit")
Strike = Callable[[str], None]  # called with the point that is passed


def config(folder: Path, model: Path, dtype: str = "float32") -> RunConfig:
    """Two groups of four; each batch is four optimizer steps, under a falling learning rate."""
    (folder / "tasks.jsonl").write_text('{"input": 1}\n{"input": 2}\n{"input": 3}\n')
    algorithm = {
        "groups": 2, "group_size": 4, "minibatches": 2, "epochs": 2, "lr": 1e-2,
        "schedule": "cosine", "min_lr": 1e-3, "warmup": 1, "weight_decay": 0.1,
    }  # fmt: skip
    settings = {
        "name": "steady", "root": str(folder), "output": str(folder / "out"), "steps": STEPS,
        "agent": {"path": "agent.py:agent"}, "tasks": {"train": "tasks.jsonl"},
        "policy": {"model": str(model), "dtype": dtype, "device": "cpu"},
        "algorithm": algorithm, "learner": {"threads": 1, "token_budget": 60},
    }  # fmt: skip
    return resolve(settings, source="test")


def team_config(folder: Path, model: Path, dtype: str = "float32") -> RunConfig:
    """The same for two adapters of one model that take turns, one of them by another algorithm."""
    alone = msgspec.to_builtins(config(folder, model, dtype))
    roles = {
        "planner": {"roles": ["planner"], "lora": {"rank": 4}},
        "solver": {
            "roles": ["solver"],
            "lora": {"rank": 2},
            "algorithm": {"preset": "reinforce++", "lr": 3e-3, "minibatches": 1},
        },
    }
    turns = {"policies": roles, "team": {"schedule": "alternating", "every": 2}}
    return resolve(alone | turns, source="test")


def failing_config(folder: Path, model: Path, dtype: str = "float32") -> RunConfig:
    """The same, of whose task nothing comes."""
    made = config(folder, model, dtype)
    (folder / "tasks.jsonl").write_text('{"input": "fail"}\n')
    return made


KINDS = {"alone": config, "team": team_config, "failing": failing_config}


async def run(settings: RunConfig, strike: Strike) -> None:
    """Until the run is complete, or `strike` raises."""
    with replaced(strike):
        training = asyncio.create_task(main.run(settings))
        agents = asyncio.create_task(answer(settings))
        try:
            await asyncio.wait([training, agents], return_when=asyncio.FIRST_COMPLETED)
        finally:
            agents.cancel()
        await training


async def answer(settings: RunConfig) -> None:
    async with open_store(settings.store) as store:
        while True:
            for attempt in await store.claim(8, runner="r", lease=1.0, timeout=5.0):
                calls, outcome = played(attempt, derived.trained_policies(settings))
                await store.add_transitions(calls)
                await store.finish([outcome])


def played(attempt: Attempt, policies: list[str]) -> tuple[list[Transition], Outcome]:
    """Two calls, the second extending the first; tokens and reward drawn from the rollout's id."""
    if attempt.rollout.task["input"] == "fail":
        # Of several causes, so that the run ends by MAX_EMPTY_STEPS.
        cause = ("bad", "hard", "no", "ill")[attempt.rollout.index % 4]
        failure = Failure(kind=ErrorKind.AGENT, message=f"{cause} luck")
        return [], Outcome(attempt=attempt.id, fence=attempt.fence, failure=failure)
    dice = random.Random(attempt.rollout.id)
    calls: list[Transition] = []
    tokens = [dice.randrange(512) for _ in range(6)]
    for index in range(2):
        action = [dice.randrange(512) for _ in range(dice.randint(1, 6))]
        calls.append(
            Transition(
                id=f"{attempt.id}/{index}", attempt=attempt.id, index=index, prompt=int32(tokens),
                completion=int32(action), logprobs=float32([-6.0] * len(action)),
                policy=policies[index % len(policies)],
            )
        )  # fmt: skip
        tokens = [*tokens, *action, dice.randrange(512)]
    reward = Reward(value=dice.random())
    return calls, Outcome(attempt=attempt.id, fence=attempt.fence, rewards=[reward])


class Silent:
    """A policy server that nobody calls. `gone`: it died, and cannot be started again."""

    base_url, model = "http://127.0.0.1:1/v1", "policy"
    strike: Strike
    gone: asyncio.Event

    def __init__(self, *_: object, **__: object) -> None: ...
    async def start(self) -> None: ...
    async def publish(self, version: int, policy: str | None = None) -> None:
        Silent.strike("publish")

    async def wait_for_failure(self) -> PolicyError:
        await Silent.gone.wait()
        return PolicyError("the engine is gone")

    async def close(self) -> None: ...

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        Silent.strike("update")
        yield
        Silent.strike("commit")


def learners() -> list[Any]:
    """The library's own, of torch."""
    with suppress(ModuleNotFoundError):
        from agentrl.algorithms.learners.verl.learner import VerlLearner

        return [TorchLearner, VerlLearner]
    return [TorchLearner]


@contextmanager
def replaced(strike: Strike) -> Iterator[None]:
    """The policy server, and functions that strike once they are done."""

    def striking(function: Any, point: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            strike(point)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Silent, "strike", staticmethod(strike), raising=False)
        patch.setattr(Silent, "gone", asyncio.Event(), raising=False)
        patch.setattr(serving, "policy_server", Silent)
        for learner in learners():
            patch.setattr(learner, "step", striking(learner.step, "optimizer"))
        patch.setattr(saving, "save_checkpoint", striking(saving.save_checkpoint, "checkpoint"))
        yield


def strike_at(point: str, number: int, act: Callable[[], None]) -> Strike:
    """Acts when `point` is passed for the `number`-th time."""
    passed: list[str] = []

    def strike(here: str) -> None:
        passed.append(here)
        if here == point and passed.count(point) == number:
            act()

    return strike


class Interrupted(Exception):
    """Stands for anything that ends the process."""


def interrupt() -> None:
    raise Interrupted


def break_off(settings: RunConfig, *points: str, number: int = 2) -> None:
    """A start for each point, which is interrupted as it passes it for the `number`-th time; in the
    middle of the update of that step, if it is `optimizer`."""
    for point in points:
        times = 3 * number if point == "optimizer" else number
        with pytest.raises(Interrupted):
            asyncio.run(run(settings, strike_at(point, times, interrupt)))


def finish(settings: RunConfig) -> None:
    asyncio.run(run(settings, lambda point: None))


if __name__ == "__main__":
    torch.set_num_threads(1)
    strike: Strike = lambda point: None  # noqa: E731
    kind, folder, model, *points = sys.argv[1:]
    for where in points:
        point, _, number = where.partition(":")
        strike = strike_at(point, int(number), lambda: os.kill(os.getpid(), signal.SIGKILL))
    asyncio.run(run(KINDS[kind](Path(folder), Path(model)), strike))
