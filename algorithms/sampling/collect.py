"""Which groups a step trains: asked for, claimed, and replaced where they teach nothing.

Always true: what is asked for is a function of seed, step and round, so a process that was killed
asks for the same again, and the store ignores what is there already. What is claimed and not
committed comes back. So a step ends with the same groups however often it was begun, unless
`algorithm.max_staleness` lets it take what has ended first of those of later steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from statistics import fmean

from agentrl.algorithms.credit.core import SPREAD
from agentrl.algorithms.data.merge import valid
from agentrl.algorithms.data.rewards import reward_reference
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.sampling import readable
from agentrl.algorithms.sampling.branching import grow
from agentrl.algorithms.sampling.readable import Vocabulary
from agentrl.algorithms.sampling.task_sampler import TaskStream
from agentrl.config import AlgorithmConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.store.base import Store
from agentrl.types import Group

ROUNDS = 10  # of replacements; verl's max_num_gen_batches


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of one step."""

    groups: list[Group]  # to train
    discarded: list[Group]  # taken out of the store by the step without being trained
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Collector:
    """Asks for groups and claims them. `resample`: the reward that must differ within a group for
    it to be trained; none: all are. `vocabulary`: what the policies can read; groups with anything
    else are discarded."""

    config: RunConfig
    store: Store
    epoch: int
    tasks: TaskStream
    resample: str | None = None
    vocabulary: Vocabulary = field(default_factory=dict)

    async def collect(self, step: int) -> Collected:
        """The groups of a step, `algorithm.groups` of them.

        With `resample` each that teaches nothing is discarded and another one asked for, up to
        `algorithm.max_rounds` times; then the step does with what there is."""
        claimed, asked = await self.rounds(step)
        claimed, unreadable = readable.split(claimed, self.vocabulary)
        if self.tasks.difficulty is not None:
            self.tasks.difficulty.learn(claimed)
        played = self.tasks.pool.learn(claimed) if self.tasks.pool is not None else {}
        if unreadable:
            played["groups/unreadable"] = len(unreadable)
        if self.resample is None:
            return Collected(claimed, unreadable, played)
        kept = [group for group in claimed if self.teaches(group)]
        idle = [group for group in claimed if not self.teaches(group)]
        return Collected(kept, idle + unreadable, measured(claimed, idle, asked) | played)

    async def rounds(self, step: int) -> tuple[list[Group], int]:
        """All that was claimed, and how many groups were asked for in the place of others."""
        size, asked = self.config.algorithm.groups, 0
        await self.ask(step)
        claimed = await self.claim(size)
        if self.resample is None:
            return claimed, asked
        for number in range(self.config.algorithm.max_rounds or ROUNDS):
            lacking = size - sum(map(self.teaches, claimed))
            broken = not any(known(group, self.resample) for group in claimed)
            if not lacking or broken:  # what fails every time is not mended by more of it
                break
            asked += lacking
            others = self.tasks.replacements(step, number, lacking)
            await self.store.enqueue(others)
            await grow(self.store, self.config, others)
            claimed = await self.claim(len(claimed) + lacking)
        return claimed, asked

    async def ask(self, step: int) -> None:
        """For this step's groups, and those that may be sampled ahead of the update. What branches
        off their rollouts joins a group before it is claimed."""
        last = min(step + self.config.algorithm.max_staleness, self.config.steps - 1)
        for ahead in range(step, last + 1):
            await self.store.enqueue(self.tasks.rollouts(ahead))
        await grow(self.store, self.config, self.tasks.rollouts(step))

    async def claim(self, n: int) -> list[Group]:
        """Waits for the oldest `n` groups, those claimed for this step before included."""
        return await self.store.claim_groups(self.config.name, self.epoch, n)

    def teaches(self, group: Group) -> bool:
        """Whether enough rollouts of the group have the reward, and not all the same, and it can be
        read."""
        values = known(group, self.resample) if self.resample else []
        if len(values) < max(2, self.config.algorithm.min_group):
            return False
        if readable.unreadable(group, self.vocabulary):
            return False
        return max(values) - min(values) > SPREAD * max(map(abs, values))


def rule(config: AlgorithmConfig, algo: Algo) -> str | None:
    """The reward that dynamic sampling goes by: the preset's or, if the run file asks for it, the
    first that the algorithm reads. arXiv 2503.14476.

    Raises ConfigError for settings of what is off, and where there is no reward to go by."""
    wanted = (
        algo.resample is not None if config.dynamic_sampling is None else config.dynamic_sampling
    )
    if not wanted:
        if config.max_rounds is not None:
            raise ConfigError(
                f"algorithm.max_rounds = {config.max_rounds}: nothing is sampled again; set "
                "algorithm.dynamic_sampling = true or leave it out"
            )
        return None
    if algo.resample is None and not algo.rewards:
        raise ConfigError(
            f"algorithm.dynamic_sampling: {algo.name!r} reads no reward that could differ within a "
            "group; leave it out or choose another preset"
        )
    return algo.resample or algo.rewards[0]


def known(group: Group, reward: str) -> list[float]:
    """The values of a reward within a group, of rollouts that may be trained."""
    rows = (
        row for rollout in group.rollouts if valid(rollout, (reward,)) for row in rollout.rewards
    )
    return [row.value for row in rows if reward_reference(row) == reward and not isnan(row.value)]


def measured(claimed: Sequence[Group], discarded: Sequence[Group], asked: int) -> dict[str, float]:
    """groups/resampled: asked for in the place of others. reward/sampled_mean: of all rollouts that
    were sampled and are no replays, where reward/mean is that of the trained groups."""
    every = (rollout for group in claimed for rollout in group.rollouts)
    played = [rollout for rollout in every if not rollout.counterfactual]
    rewards = [value for row in played if not isnan(value := row.reward())]
    mean = {"reward/sampled_mean": fmean(rewards)} if rewards else {}
    return mean | {"groups/resampled": float(asked), "groups/discarded": float(len(discarded))}
