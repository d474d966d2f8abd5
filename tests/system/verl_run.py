"""A run without chance on verl's workers, which may be struck: see `tests.system.steady`.

verl_run.py FOLDER MODEL [WHOM:POINT:NUMBER]

At the NUMBER-th time it passes POINT this process is killed, or one worker (WHOM: driver,
worker)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import psutil
import steady
import torch
from msgspec.structs import replace

from agentrl.config.infrastructure import VerlConfig, VerlLearnerConfig
from agentrl.config.schema import CriticConfig, ReferenceConfig, RunConfig
from agentrl.errors import AgentRLError


def config(folder: Path, model: Path) -> RunConfig:
    """The steady run as PPO on two workers: critic, adaptive penalty, a reference that follows."""
    run = steady.config(folder, model)
    placed = VerlConfig(gpus_per_node=2, attention="sdpa", timeout=180.0)
    return replace(
        run,
        steps=3,
        learner=VerlLearnerConfig(token_budget=run.learner.token_budget, verl=placed),
        algorithm=replace(run.algorithm, preset="ppo", options={"kl": 0.1}, epochs=1),
        critic=CriticConfig(model="copy", lr=1e-3),
        reference=ReferenceConfig(every=2, target=0.01, horizon=100),
    )


def kill(whom: str) -> None:
    if whom == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    mine = psutil.Process().children(recursive=True)
    worker = next(each for each in mine if "PolicyWorker" in " ".join(each.cmdline()))
    worker.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    strike: steady.Strike = lambda point: None  # noqa: E731
    for where in sys.argv[3:]:
        whom, point, number = where.split(":")
        strike = steady.strike_at(point, int(number), partial(kill, whom))
    try:
        asyncio.run(steady.run(config(Path(sys.argv[1]), Path(sys.argv[2])), strike))
    except AgentRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
