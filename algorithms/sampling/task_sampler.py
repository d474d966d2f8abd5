"""Which tasks are rolled out: a pure function of the seed, the step and the state in the
checkpoint, so a restart requests the same rollouts. Prefetched rollouts are never drawn again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from agentrl.algorithms.sampling.curriculum import TaskDifficulty
from agentrl.algorithms.sampling.selfplay import OpponentPool
from agentrl.config import RunConfig
from agentrl.types import Branch, Json, NewRollout, Purpose, Rollout, Sampling

URGENT = 1  # rollouts that the loop waits for run before prefetched ones


@dataclass(frozen=True, slots=True)
class TaskSampler:
    """Training tasks in a shuffled order that changes every epoch or, with `difficulty`, drawn by
    how often they were solved so far.

    greedy: whether the first rollout of each group is asked for at temperature 0, as a baseline.
    pool: who plays whom, in games."""

    config: RunConfig
    tasks: list[dict[str, Json]]
    greedy: bool = False
    difficulty: TaskDifficulty | None = None
    pool: OpponentPool | None = None

    def task(self, index: int) -> dict[str, Json]:
        """The `index`-th task of the run, counted over all epochs."""
        epoch, position = divmod(index, len(self.tasks))
        return self.tasks[_order(f"{self.config.seed}/{epoch}", len(self.tasks))[position]]

    def rollouts(self, step: int) -> list[NewRollout]:
        """`groups` x `group_size` rollouts that training step `step` compares."""
        size = self.config.algorithm.groups
        numbers = range(step * size, (step + 1) * size)
        tasks = [self.task(number) for number in numbers]
        if self.difficulty is not None:
            tasks = self.difficulty.draw(self.tasks, f"{self.config.seed}/{step}", size)
        return [
            rollout
            for number, task in zip(numbers, tasks, strict=True)
            for rollout in self._group(f"{number:07d}", task, step)
        ]

    def replacements(self, step: int, round: int, n: int) -> list[NewRollout]:
        """The first `n` groups that a step may ask for in a round of replacements, of tasks in an
        order of its own. By name they come after the groups of the step and before the next's."""
        last = (step + 1) * self.config.algorithm.groups - 1
        seed = f"{self.config.seed}/{step}/{round}"
        if self.difficulty is not None:
            tasks = self.difficulty.draw(self.tasks, seed, n)
        else:
            order = _order(seed, len(self.tasks))
            tasks = [self.tasks[order[number % len(order)]] for number in range(n)]
        return [
            rollout
            for number, task in enumerate(tasks)
            for rollout in self._group(f"{last:07d}.{round:02d}.{number:03d}", task, step, URGENT)
        ]

    def _group(
        self, name: str, task: dict[str, Json], step: int, priority: int = 0
    ) -> list[NewRollout]:
        sampling = self.config.sampling
        cold = replace(sampling, temperature=0.0)
        group = f"{self.config.name}/train/{name}"
        return [
            _rollout(
                self.config,
                group=group,
                index=index,
                task=task,
                purpose=Purpose.TRAIN,
                sampling=cold if self.greedy and index == 0 else sampling,
                step=step,
                priority=priority,
                seats=self.pool.seats(group, index) if self.pool is not None else {},
            )
            for index in range(self.config.algorithm.group_size)
        ]


@lru_cache(maxsize=4)
def _order(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order


def evaluation_rollouts(
    config: RunConfig,
    step: int,
    name: str,
    tasks: Sequence[dict[str, Json]],
    sampling: Sampling,
    seats: Mapping[str, str] = {},
) -> list[NewRollout]:
    """One rollout per task, as the group `<run>/eval/<step>/<name>`. seats: role -> policy."""
    return [
        _rollout(
            config,
            group=f"{config.name}/eval/{step:06d}/{name}",
            index=index,
            task=task,
            purpose=Purpose.EVAL,
            sampling=sampling,
            step=step,
            priority=URGENT,
            seats=seats,
        )
        for index, task in enumerate(tasks)
    ]


def branch_rollout(config: RunConfig, source: Rollout, calls: int, number: int) -> NewRollout:
    """The `number`-th branch of the group of `source`, with so many of its calls repeated and the
    same players."""
    return _joining(config, source, Branch(rollout=source.id, calls=calls), source.seats, number)


def counterfactual_rollout(
    config: RunConfig, source: Rollout, without: Mapping[str, str], number: int
) -> NewRollout:
    """The `number`-th replay in the group of `source`. without: role -> who plays it there."""
    roles, calls = list(without), len(source.transitions)
    branch = Branch(rollout=source.id, calls=calls, without=roles)
    return _joining(config, source, branch, {**source.seats, **without}, number)


def _joining(
    config: RunConfig, source: Rollout, branch: Branch, seats: Mapping[str, str], number: int
) -> NewRollout:
    """One more rollout of the group of `source`, after the `number` that joined before it."""
    rollout = _rollout(
        config,
        group=source.group,
        index=config.algorithm.group_size + number,
        task=source.task,
        purpose=source.purpose,
        sampling=config.sampling,
        step=source.step,
        priority=URGENT,
        seats=seats,
    )
    return replace(rollout, branch=branch)


def _rollout(
    config: RunConfig,
    *,
    group: str,
    index: int,
    task: dict[str, Json],
    purpose: Purpose,
    sampling: Sampling,
    step: int,
    priority: int = 0,
    seats: Mapping[str, str] = {},
) -> NewRollout:
    return NewRollout(
        id=f"{group}/{index:04d}",
        run=config.name,
        group=group,
        index=index,
        task=task,
        purpose=purpose,
        sampling=sampling,
        step=step,
        max_attempts=config.agent.max_attempts,
        timeout=config.agent.timeout,
        priority=priority,
        seats=dict(seats),
    )
