"""Agent Q-Mix, arXiv 2604.00344: learn which agents communicate; the models stay frozen.

python examples/agent_qmix/train.py --output runs/agent_qmix

The models are a frozen policy behind the gateway, which records each call. A step requests a group
of episodes, learns from the stored episodes of the last steps, and is committed; a killed process
resumes from there. Only the last round has a reward, and it is trained on; the authors' code leaves
the last round out and repeats the reward in every round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from agent import OBSERVATION, ROLES, ROUNDS, STATE, Seen, Team, fixed
from network import Talk
from policy import build
from topology import MODES
from verifier import verify
from world import Task, tasks

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets.multiagent import QMix, TeamEpisode
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import TrainingError
from agentrl.core.files import atomic_directory
from agentrl.core.types import (
    POLICY,
    NewRollout,
    PolicyVersion,
    Purpose,
    Rollout,
    RunState,
    StepCommit,
)
from agentrl.runners.main import RunnerThread
from agentrl.store import open_store
from agentrl.store.base import Store

RUN = "agent_qmix"
EPISODES, KEPT, UPDATES, BATCH = 32, 40, 16, 64  # EPISODES and UPDATES per step; KEPT steps
FROM, TO = 1.0, 0.05  # epsilon, linear over the first half of the steps
TIMEOUT = 300.0  # seconds per episode
Choose = Callable[[Task, Seen], list[int]]


def learner(seed: int) -> QMix:
    return QMix(
        len(ROLES), OBSERVATION, len(MODES), STATE,
        network=lambda: Talk(OBSERVATION, len(ROLES), len(MODES)), lr=2e-3, every=400, seed=seed,
    )  # fmt: skip


def choices(mixed: QMix) -> Choose:
    """A `choose` function: the topology that a task names, else epsilon-greedy with the learned
    utilities and the task's epsilon and seed."""

    def choose(task: Task, seen: Seen) -> list[int]:
        if task["how"] != "learned":
            return fixed(task["how"])(task, seen)
        rng = random.Random(f"{task['seed']}/{len(seen)}")
        return mixed.act(torch.tensor(seen), task["epsilon"], rng)

    return choose


def episode(rollout: Rollout) -> TeamEpisode:
    """A stored rollout as an episode."""
    played = rollout.result
    rewards = torch.zeros(ROUNDS)
    rewards[-1] = rollout.reward("return")
    return TeamEpisode(
        observations=torch.tensor(played["observations"]),
        states=torch.tensor(played["states"]),
        actions=torch.tensor(played["modes"]),
        rewards=rewards,
    )


async def ask(
    store: Store, group: str, some: Sequence[Task], purpose: Purpose, step: int, **how: object
) -> list[Rollout]:
    """Play tasks, and return their rollouts when all have ended."""
    await store.enqueue(
        [
            NewRollout(
                id=f"{group}/{index:04d}", run=RUN, group=group, index=index, purpose=purpose,
                step=step, timeout=TIMEOUT,
                task={"input": task | how | {"seed": f"{group}/{index}"}},
            )
            for index, task in enumerate(some)
        ]
    )  # fmt: skip
    await store.settled(group)
    return await store.rollouts(RUN, group=group)


async def train(store: Store, state: RunState, mixed: QMix, options: argparse.Namespace) -> None:
    """Train from the last committed step to the end."""
    if state.checkpoint:
        mixed.load_state_dict(torch.load(Path(state.checkpoint, "learner.pt")))
    for step in range(state.step, options.steps):
        done = min(1.0, 2 * step / options.steps)
        group = f"{RUN}/train/{step:06d}"
        some = tasks(f"{options.seed}/{step}", EPISODES)
        epsilon = FROM + done * (TO - FROM)
        await ask(store, group, some, Purpose.TRAIN, step, how="learned", epsilon=epsilon)
        await store.claim_groups(RUN, state.epoch, 1)
        kept = [
            episode(rollout)
            for number in range(max(0, step + 1 - KEPT), step + 1)
            for rollout in await store.rollouts(RUN, group=f"{RUN}/train/{number:06d}")
            if rollout.failure is None
        ]
        if not kept:
            raise TrainingError(f"step {step}: no episode ended; see agentrl show {group}/0000")
        rng = random.Random(f"{options.seed}/{step}")
        found = [mixed.learn(rng.sample(kept, min(BATCH, len(kept)))) for _ in range(UPDATES)]
        folder = options.output / "checkpoints" / f"{step + 1:06d}"
        if not folder.is_dir():
            with atomic_directory(folder) as partial:
                torch.save(mixed.state_dict(), partial / "learner.pt")
        metrics = {name: fmean(one[name] for one in found) for name in found[0]}
        await store.commit_step(
            StepCommit(
                run=RUN, epoch=state.epoch, step=step, groups=[group], versions={},
                checkpoint=str(folder), metrics=metrics | {"epsilon": epsilon},
            )
        )  # fmt: skip


async def learn(
    store: Store, state: RunState, mixed: QMix, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Train to the end and compare with fixed topologies."""
    await train(store, state, mixed, options)
    return await compare(store, options)


async def compare(store: Store, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Topology -> accuracy, reward and tokens on the same held-out tasks, for learned modes, random
    modes and every fixed topology."""
    some, result = tasks(f"heldout/{options.seed}", options.tasks, heldout=True), {}
    shown = {"learned": ("learned", 0.0), "random": ("learned", 1.0)}
    for name, (how, epsilon) in (shown | {mode: (mode, 0.0) for mode in MODES}).items():
        group = f"{RUN}/eval/{options.steps:06d}/{name}"
        rows = await ask(store, group, some, Purpose.EVAL, options.steps, how=how, epsilon=epsilon)
        result[name] = {
            "accuracy": fmean(row.reward() for row in rows),
            "reward": fmean(row.reward("return") for row in rows),
            "tokens": fmean(row.result["tokens"] for row in rows),
        }
    return result


def settings(options: argparse.Namespace) -> RunConfig:
    """The runner's settings: one policy plays every role."""
    data = {
        "name": RUN,
        "output": str(options.output),
        "seed": options.seed,
        "roles": dict.fromkeys(ROLES, POLICY),
    }
    return resolve(data, source=__file__)


async def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Serve the frozen model, run the team, learn, and compare."""
    frozen = options.output / "frozen"
    if not frozen.is_dir():
        with atomic_directory(frozen) as partial:
            build(partial, options.seed)
    torch.manual_seed(options.seed)
    server = EmbeddedServer(*load_model(frozen))
    await server.start()
    config, mixed = settings(options), learner(options.seed)
    runner = RunnerThread(config.store, RUN, agent=lambda: Team(choices(mixed)), verifier=verify)
    try:
        async with open_store(config.store) as store:
            state = await store.open_run(RUN, msgspec.to_builtins(config))
            served = {"base_url": server.base_url, "model": server.model}
            await store.publish(PolicyVersion(run=RUN, policy=POLICY, version=0, **served))
            runner.start()
            work = asyncio.create_task(learn(store, state, mixed, options))
            ended = asyncio.wrap_future(runner.done)
            await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():  # the runner ends by itself only with an error
                work.cancel()
                ended.result()
            return await work
    finally:
        await asyncio.to_thread(runner.stop)
        await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs", RUN))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    options.output = options.output.resolve()
    result = asyncio.run(run(options))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'topology':<12}{'accuracy':>10}{'reward':>10}{'tokens':>10}")
    for how, row in result.items():
        print(f"{how:<12}{row['accuracy']:>10.3f}{row['reward']:>10.3f}{row['tokens']:>10.0f}")


if __name__ == "__main__":
    main()
