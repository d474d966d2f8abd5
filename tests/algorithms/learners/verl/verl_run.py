"""A run without chance on verl's workers, which may be struck: see `tests.system.steady`.

verl_run.py FOLDER MODEL [WHOM:POINT:NUMBER]

At the NUMBER-th time it passes POINT this process is killed, or one worker (WHOM: driver,
worker). With node:step:NUMBER no process is killed: in the middle of that optimizer step each
worker writes a file into FOLDER, named by the address of its node, and the last one waits for ever.
Where RAY_ADDRESS is set the two workers are on two nodes of that cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import ray
import steady
import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms.learners.base import LossCoefficients, StepReport
from agentrl.algorithms.learners.verl.learner import VerlLearner
from agentrl.core.config.infrastructure import VerlConfig, VerlLearnerConfig
from agentrl.core.config.learning import CriticConfig, ReferenceConfig
from agentrl.core.config.schema import RunConfig
from agentrl.core.errors import AgentRLError


def config(folder: Path, model: Path) -> RunConfig:
    """The steady run as PPO on two workers: critic, adaptive penalty, a reference that follows."""
    run = steady.config(folder, model)
    nodes = {"nodes": 2} if os.environ.get("RAY_ADDRESS") else {"gpus_per_node": 2}
    placed = VerlConfig(**nodes, attention="sdpa")
    return replace(
        run,
        steps=3,
        learner=VerlLearnerConfig(token_budget=run.learner.token_budget, verl=placed),
        algorithm=replace(run.algorithm, preset="ppo", options={"kl": 0.1}, epochs=1),
        critic=CriticConfig(model="copy", lr=1e-3),
        reference=ReferenceConfig(every=2, target_kl=0.01, kl_horizon=100),
    )


def kill(whom: str) -> None:
    if whom == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    mine = psutil.Process().children(recursive=True)
    worker = next(each for each in mine if "PolicyWorker" in " ".join(each.cmdline()))
    worker.kill()


def hang(number: int, folder: Path) -> None:
    """Let the workers stop in the middle of the `number`-th optimizer step."""
    step, numbers = VerlLearner.step, count(1)

    def stopped(learner: VerlLearner, batch: Any, psi: LossCoefficients, **rest: Any) -> StepReport:
        own = partial(wait, psi, folder) if next(numbers) == number else psi
        return step(learner, batch, own, **rest)

    VerlLearner.step = stopped  # type: ignore[method-assign]


def wait(psi: LossCoefficients, folder: Path, p: Tensor, index: Tensor) -> Tensor:
    (folder / ray.util.get_node_ip_address()).touch()
    if os.environ["RANK"] == "1":
        threading.Event().wait()
    return psi(p, index)


if __name__ == "__main__":
    torch.set_num_threads(1)
    strike: steady.Strike = lambda point: None  # noqa: E731
    for where in sys.argv[3:]:
        whom, point, number = where.split(":")
        if whom == "node":
            hang(int(number), Path(sys.argv[1]))
            continue
        strike = steady.strike_at(point, int(number), partial(kill, whom))
    try:
        asyncio.run(steady.run(config(Path(sys.argv[1]), Path(sys.argv[2])), strike))
    except AgentRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
