"""Requests for rollouts and the sampler of their tasks, without torch, which an evaluation of
upstreams does not need.

The tasks of training rollouts are a pure function of seed, step and checkpoint state: a restart
requests the same rollouts. Prefetched rollouts are never drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import ceil

from msgspec.structs import replace

from agentrl.core.config import RunConfig
from agentrl.core.types import Json, NewRollout, Purpose, Sampling, Task

STEADY = "one_step_off"  # the value of `async_sampling` with which tokens do not depend on timing
URGENT = 1  # priority of rollouts that the loop waits for, above that of prefetched ones


@dataclass(slots=True)
class CandidateInUse:
    """The candidate of newly requested rollouts; None: the agent's own texts."""

    id: str | None = None


def evaluation_rollouts(
    config: RunConfig,
    step: int,
    name: str,
    tasks: Sequence[Task],
    sampling: Sampling,
    seats: Mapping[str, str] = {},
    candidate: str | None = None,
) -> list[NewRollout]:
    """One rollout per task, as the group `<run>/eval/<step>/<name>`. seats: role or policy
    -> policy that plays it."""
    group = f"{config.name}/eval/{step:06d}/{name}"
    return [
        replace(
            new_rollout(config, group, index, task, step, sampling),
            purpose=Purpose.EVAL,
            priority=URGENT,
            seats=dict(seats),
            candidate=candidate,
        )
        for index, task in enumerate(tasks)
    ]


def new_rollout(
    config: RunConfig, group: str, index: int, task: Task, step: int, sampling: Sampling
) -> NewRollout:
    """Build the request for one rollout. Each gets its own seed, or all rollouts of a group would
    be equal."""
    id, seed = f"{group}/{index:04d}", sampling.seed
    # Tokens of vLLM depend on its batches, and generators of requests make it slower.
    if seed is None and (
        config.engine.kind == "embedded" or config.algorithm.async_sampling == STEADY
    ):
        seed = config.seed
    if seed is not None:
        # Independent of the run's name: runs that differ only in their names sample the same.
        place = id.removeprefix(f"{config.name}/")
        drawn = blake2b(f"{seed}/{place}".encode(), digest_size=6).digest()
        sampling = replace(sampling, seed=int.from_bytes(drawn))
    return NewRollout(
        id=id,
        run=config.name,
        group=group,
        index=index,
        task=dict(task),
        sampling=sampling,
        step=step,
        max_attempts=config.agent.max_attempts,
        timeout=config.agent.timeout,
    )


def group_number(id: str) -> int:
    """The number in a group's id; for a replacement the number of its step's last group."""
    return int(id.rpartition("/")[2].removeprefix("g").partition(".")[0])


Order = Callable[
    [Sequence[dict[str, Json]], Sequence[dict[str, Json]], range, str, str | None],
    list[dict[str, Json]],
]
"""(all tasks, usual tasks, their numbers, seed, candidate of the agent's prompts) -> a task in
place of each usual task. The choice depends only on these arguments and on checkpointed state. With
more usual tasks the first choices stay the same."""

Seats = Callable[[str, int], Mapping[str, str]]
"""(group, index of the rollout) -> role -> policy, for roles that another policy plays."""


@dataclass(frozen=True, slots=True)
class TaskSampler:
    """Training tasks in a shuffled order that changes every epoch, or in another `order`.

    greedy: sample the first rollout of each group at temperature 0, as a baseline. seats: of every
    rollout; None: each role is played by its policy."""

    config: RunConfig
    tasks: list[dict[str, Json]]
    greedy: bool = False
    order: Order | None = None
    seats: Seats | None = None
    prompts: CandidateInUse = field(default_factory=CandidateInUse)

    def task(self, index: int) -> dict[str, Json]:
        """The `index`-th task of the run, counted over all epochs."""
        epoch, position = divmod(index, len(self.tasks))
        return self.tasks[shuffled(f"{self.config.seed}/{epoch}", len(self.tasks))[position]]

    def rollouts(self, step: int) -> list[NewRollout]:
        """The `groups` x `group_size` rollouts of a training step."""
        size = self.config.algorithm.groups
        numbers = range(step * size, (step + 1) * size)
        tasks = self._chosen(f"{self.config.seed}/{step}", numbers, map(self.task, numbers))
        return [
            rollout
            for number, task in zip(numbers, tasks, strict=True)
            for rollout in self._group(f"g{number:07d}", task, step)
        ]

    def groups(self, first: int, n: int) -> list[NewRollout]:
        """The rollouts of `n` groups from number `first` on."""
        size, group_size = self.config.algorithm.groups, self.config.algorithm.group_size
        steps = range(first // size, ceil((first + n) / size))
        rollouts = [rollout for step in steps for rollout in self.rollouts(step)]
        return rollouts[first % size * group_size :][: n * group_size]

    def replacements(self, step: int, round: int, n: int) -> list[NewRollout]:
        """The first `n` replacement groups in a round of a step, with a separate task order. By
        name they sort between the groups of this step and the next."""
        last = (step + 1) * self.config.algorithm.groups - 1
        seed = f"{self.config.seed}/{step}/{round}"
        size = len(self.tasks)
        usual = (self.tasks[shuffled(seed, size)[number % size]] for number in range(n))
        tasks = self._chosen(seed, range(n), usual)
        return [
            rollout
            for number, task in enumerate(tasks)
            for rollout in self._group(f"g{last:07d}.{round:02d}.{number:03d}", task, step, URGENT)
        ]

    def _chosen(
        self, seed: str, numbers: range, usual: Iterable[dict[str, Json]]
    ) -> list[dict[str, Json]]:
        """The tasks that `order` chooses; without it the usual ones."""
        if self.order is None:
            return list(usual)
        return self.order(self.tasks, list(usual), numbers, seed, self.prompts.id)

    def _group(
        self, name: str, task: dict[str, Json], step: int, priority: int = 0
    ) -> list[NewRollout]:
        group, sampling = f"{self.config.name}/train/{name}", self.config.sampling
        cold = replace(sampling, temperature=0.0)
        return [
            replace(
                new_rollout(
                    self.config,
                    group,
                    index,
                    task,
                    step,
                    cold if self.greedy and index == 0 else sampling,
                ),
                priority=priority,
                seats=dict(self.seats(group, index)) if self.seats is not None else {},
                candidate=self.prompts.id,
            )
            for index in range(self.config.algorithm.group_size)
        ]


@lru_cache(maxsize=4)
def shuffled(seed: str, size: int) -> list[int]:
    """A permutation of the numbers below `size`, by seed."""
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order
