"""What each role adds to its team: rollouts played again with others in some of the roles.

A replay repeats a rollout where the other roles are asked what they were asked then; the roles that
it is without are played by their stand-ins, and everything else anew, by the policies as they are
(see `runners.replay`). What the replays of a rollout come to are the values of coalitions, and the
formulas of `team_rewards` make rewards of roles of them, of which no verifier has to know.

Always true: replays join the group of their rollout before it is claimed, and asking again asks for
the same, as with branches; nobody learns from a replay. The members of a team are the roles that
called: without one that did not, nothing is different. What a rollout comes to without a role does
not depend on what the role sampled in it, so the difference that it makes, as a reward, leaves the
policy gradient of the outcome what it is. Shapley values do not.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean

from msgspec.structs import replace

from agentrl.algorithms.data.merge import valid
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.sampling.task_sampler import replay_of
from agentrl.config import CounterfactualConfig, RunConfig
from agentrl.config import policies as team
from agentrl.errors import ConfigError, TrainingError, nearest
from agentrl.team_rewards import Coalition, Value, difference, shapley
from agentrl.types import Group, NewRollout, Reward, Rollout, RolloutState, Scope

log = logging.getLogger(__name__)
SOURCE = "counterfactual"  # of its rewards
Worth = Mapping[tuple[str, Coalition], Sequence[float]]
"""Outcomes of the replays of a rollout without some roles."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Which formula makes rewards of coalition values. seed: of the orders that are drawn where
    there are too many."""

    settings: CounterfactualConfig
    seed: int

    def members(self, rollout: Rollout) -> Coalition:
        """The roles that a rollout can be played again without."""
        called = {call.role for call in rollout.transitions}
        return frozenset(called & self.settings.stand_ins.keys())

    def of(self, rollout: Rollout, value: Value) -> dict[str, float]:
        """The reward of each member, for values of coalitions of them."""
        members = self.members(rollout)
        if self.settings.value == "difference":
            return difference(value, members)
        seed = f"{self.seed}/{rollout.id}"
        return shapley(value, members, samples=self.settings.orders, seed=seed)

    def absent(self, rollout: Rollout) -> list[Coalition]:
        """Without whom a rollout must be played again: those who are in none of the coalitions that
        the formula values, as it says itself."""
        members, valued = self.members(rollout), []

        def value(coalition: Coalition) -> float:
            valued.append(coalition)
            return 0.0

        self.of(rollout, value)
        return [members - coalition for coalition in valued if coalition != members]


def shares(config: RunConfig) -> Shares:
    return Shares(config.algorithm.counterfactual, config.seed)


def replays(config: RunConfig, rollouts: Sequence[Rollout]) -> list[NewRollout]:
    """What to ask for, of the rollouts of one group that are no replays themselves: of those that
    have an outcome to compare with, and that a policy may learn from."""
    formula, players = shares(config), team.stand_ins(config)
    policies = team.trained_policies(config)
    asked = [
        (rollout, absent)
        for rollout in rollouts
        if not isnan(rollout.reward()) and any(valid(rollout, policy=policy) for policy in policies)
        for absent in formula.absent(rollout)
        for _ in range(config.algorithm.counterfactual.width)
    ]
    return [
        replay_of(config, rollout, {role: players[role] for role in sorted(absent)}, number)
        for number, (rollout, absent) in enumerate(asked)
    ]


@dataclass(frozen=True, slots=True)
class RoleRewards:
    """Gives the roles that a policy played what they added, as the replays of the rollout show it.
    It is missing where the outcome of the rollout, or of all replays of a coalition, is."""

    shares: Shares
    policy: str

    def complete(self, groups: list[Group]) -> list[Group]:
        """`groups` with a reward of roles, named by the formula. The log says where there is none
        at all because no replay has an outcome.

        Raises TrainingError for stand-ins of a role that has another name in the agent, for
        rollouts without an outcome, and where the verifier gives the same reward."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._check(rollouts)
        again = [rollout for rollout in rollouts if rollout.counterfactual]
        if again and all(isnan(rollout.reward()) for rollout in again):
            log.warning(
                "None of the %d replays of step %d has an outcome: nothing is learned from it.",
                len(again), groups[0].step,
            )  # fmt: skip
        return [replace(group, rollouts=list(self._rewarded(group))) for group in groups]

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        name, known = self.shares.settings.value, self.shares.settings.stand_ins.keys()
        if any(row.scope is Scope.ROLE and row.name == name for r in rollouts for row in r.rewards):
            raise TrainingError(
                f"the verifier gives roles a reward {name!r}, and algorithm.counterfactual makes "
                "one of replays; rename the verifier's, or leave algorithm.counterfactual out"
            )
        done = [rollout for rollout in rollouts if rollout.state is RolloutState.SUCCEEDED]
        if done and all(isnan(rollout.reward()) for rollout in done):
            raise TrainingError(
                f"algorithm.counterfactual compares outcomes, and none of {len(done)} rollouts of "
                f"step {done[0].step} has one; let the verifier return a reward 'outcome'"
            )
        calls = [call for rollout in rollouts for call in rollout.transitions]
        silent = known - {call.role for call in calls}
        others = {call.role for call in calls if call.policy == self.policy} - known
        if silent and others:
            role = min(silent)
            raise TrainingError(
                f"algorithm.counterfactual.stand_ins.{role}: no call of {len(rollouts)} rollouts "
                f"was made in this role, and nobody stands in for {', '.join(sorted(others))}; "
                f"{nearest(role, others)}"
            )

    def _rewarded(self, group: Group) -> Iterator[Rollout]:
        worth = played_without(group)
        for rollout in group.rollouts:
            made = [] if rollout.counterfactual else self._rewards(rollout, worth)
            yield replace(rollout, rewards=[*rollout.rewards, *made])

    def _rewards(self, rollout: Rollout, worth: Worth) -> list[Reward]:
        members = self.shares.members(rollout)

        def value(coalition: Coalition) -> float:
            if coalition == members:
                return rollout.reward()
            known = worth.get((rollout.id, members - coalition))
            return fmean(known) if known else nan

        own = {call.role for call in rollout.transitions if call.policy == self.policy}
        name = self.shares.settings.value
        return [
            Reward(value=share, name=name, scope=Scope.ROLE, target=role, source=SOURCE)
            for role, share in self.shares.of(rollout, value).items()
            if role in own and not isnan(share)
        ]


def played_without(group: Group) -> Worth:
    """The known outcomes of the replays in a group."""
    found: dict[tuple[str, Coalition], list[float]] = defaultdict(list)
    for row in group.rollouts:
        if row.branch is not None and row.counterfactual and not isnan(row.reward()):
            found[row.branch.rollout, frozenset(row.branch.without)].append(row.reward())
    return found


def read(config: RunConfig, algo: Algo) -> bool:
    """Whether an algorithm learns from what replays come to."""
    settings = config.algorithm.counterfactual
    return bool(settings.stand_ins) and f"role:{settings.value}" in algo.rewards


def lenient(config: RunConfig, algo: Algo) -> Algo:
    """An algorithm that goes on after a step in which no replay has an outcome."""
    if not read(config, algo):
        return algo
    name = f"role:{config.algorithm.counterfactual.value}"
    return dataclasses.replace(algo, optional=(*algo.optional, name))


def check_read(config: RunConfig, algos: Mapping[str, Algo], resample: str | None) -> None:
    """Raises ConfigError for replays that no policy learns from, for a role that would not learn as
    nobody stands in for it, and where `resample`, the reward by which groups are sampled again, is
    not known until they are complete."""
    settings = config.algorithm.counterfactual
    name = f"role:{settings.value}"
    if not settings.stand_ins:
        return
    if not any(read(config, algo) for algo in algos.values()):
        raise ConfigError(
            f"algorithm.counterfactual is set, and no preset reads its reward {name!r}; choose the "
            f"preset {settings.value!r}, or set algorithm.options.reward = {name!r}"
        )
    for role, policy in team.policy_by_role(config).items():
        if policy in algos and read(config, algos[policy]) and role not in settings.stand_ins:
            raise ConfigError(
                f"algorithm.counterfactual.stand_ins has no {role!r}, and {policy!r}, which plays "
                f"it, learns from {name!r}; say who stands in for it"
            )
    if resample == name:
        raise ConfigError(
            f"algorithm.dynamic_sampling goes by {name!r}, which rollouts do not have when they "
            "end; set it to false, or leave algorithm.counterfactual out"
        )


def measure(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics: how many rollouts were replays, how many of them have no outcome, and how many calls
    they repeated. None without replays."""
    found = [row for group in groups for row in group.rollouts if row.counterfactual]
    if not found:
        return {}
    return {
        "replays": len(found),
        "replays/missing": sum(isnan(row.reward()) for row in found),
        "calls/repeated": sum(c.repeats is not None for row in found for c in row.transitions),
    }
