"""Counterfactual rollouts, which measure the contribution of each role to its team.

A counterfactual rollout repeats a rollout with substitutes in some of the roles. The other roles'
calls are replayed while their prompts are the same, and sampled by the current policy after that
(see `runners.gateway.replays`). The outcomes are the values of coalitions, from which the formulas
of `coalitions` compute role rewards; the verifier needs no change.

Always true: they join the group of their rollout before it is claimed, requests are deterministic,
as for branches, and no policy trains on them. The members of a team are the roles that made a call.
The outcome without a role does not depend on the role's samples, so the difference reward has the
same policy gradient as the outcome. Shapley values do not."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean

from msgspec.structs import replace

from agentrl.algorithms.data.merge import counterfactual, valid_for_any
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.replays.coalitions import Coalition, Value, difference, shapley
from agentrl.algorithms.sampling.rollouts import URGENT, new_rollout
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig
from agentrl.config.learning import INITIAL, CounterfactualConfig
from agentrl.config.policies import (
    initial_name,
    policy_by_role,
    policy_of_role,
    trained_policies,
)
from agentrl.errors import ConfigError, TrainingError, nearest
from agentrl.types import Branch, Group, NewRollout, Reward, Rollout, RolloutState, Scope

log = logging.getLogger(__name__)
SOURCE = "counterfactual"  # `Reward.source`


@dataclass(frozen=True, slots=True)
class CoalitionFormula:
    """The formula that turns coalition values into rewards. seed: for sampling the orders of the
    Shapley value if there are too many."""

    settings: CounterfactualConfig
    seed: int

    def members(self, rollout: Rollout) -> Coalition:
        """The roles of a rollout that have a substitute."""
        called = {call.role for call in rollout.transitions}
        return frozenset(called & self.settings.substitutes.keys())

    def of(self, rollout: Rollout, value: Value) -> dict[str, float]:
        """The reward of each member. value: returns the value of a coalition."""
        members = self.members(rollout)
        if self.settings.value == "difference":
            return difference(value, members)
        seed = f"{self.seed}/{rollout.id}"
        return shapley(value, members, samples=self.settings.orders, seed=seed)

    def absent(self, rollout: Rollout) -> list[Coalition]:
        """The sets of roles to replace, one per coalition whose value the formula reads. Finds them
        by evaluating the formula with values of 0."""
        members, read = self.members(rollout), []

        def value(coalition: Coalition) -> float:
            read.append(coalition)
            return 0.0

        self.of(rollout, value)
        return [members - coalition for coalition in read if coalition != members]


def substitutes(config: RunConfig) -> dict[str, str]:
    """Role -> served name of the policy or upstream that plays it in counterfactual rollouts."""
    return {
        role: initial_name(policy_of_role(config, role)) if player == INITIAL else player
        for role, player in config.algorithm.counterfactual.substitutes.items()
    }


def coalition_formula(config: RunConfig) -> CoalitionFormula:
    return CoalitionFormula(config.algorithm.counterfactual, config.seed)


def joining_rollout(
    config: RunConfig, source: Rollout, branch: Branch, seats: Mapping[str, str], number: int
) -> NewRollout:
    """The request for rollout `number` (from 0) that joins the group of `source`."""
    index = config.algorithm.group_size + number
    return replace(
        new_rollout(config, source.group, index, source.task, source.step, config.sampling),
        purpose=source.purpose,
        priority=URGENT,
        seats=dict(seats),
        branch=branch,
        candidate=source.candidate,
    )


def counterfactual_rollouts(config: RunConfig, rollouts: Sequence[Rollout]) -> list[NewRollout]:
    """The counterfactual rollouts to request for one group: of each rollout that has an outcome and
    can be trained. rollouts: those of the group that are not counterfactual."""
    formula, players = coalition_formula(config), substitutes(config)
    policies, requested = trained_policies(config), list[NewRollout]()
    for rollout in rollouts:
        if isnan(rollout.reward()) or not valid_for_any(rollout, policies):
            continue
        for absent in map(sorted, formula.absent(rollout)):
            seats = {**rollout.seats, **{role: players[role] for role in absent}}
            calls = len(rollout.transitions)
            branch = Branch(rollout=rollout.id, calls=calls, without=absent)
            for _ in range(config.algorithm.counterfactual.width):
                requested.append(joining_rollout(config, rollout, branch, seats, len(requested)))
    return requested


@dataclass(frozen=True, slots=True)
class RoleRewards:
    """Adds a counterfactual reward for each role that a policy plays. It is missing (NaN) if the
    rollout, or every counterfactual rollout of a coalition, has no outcome."""

    formula: CoalitionFormula
    policy: str

    def complete(self, groups: list[Group]) -> list[Group]:
        """Add role rewards, named after the formula, to the rollouts of the groups. Logs a warning
        if no counterfactual rollout has an outcome.

        Raises TrainingError for substitutes of a role that made no call, if no rollout has an
        outcome, and if the verifier returns the same reward."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._check(rollouts)
        replays = [rollout for rollout in rollouts if counterfactual(rollout)]
        if replays and all(isnan(rollout.reward()) for rollout in replays):
            log.warning(
                "None of the %d replays of step %d has an outcome: nothing is learned from it.",
                len(replays), groups[0].step,
            )  # fmt: skip
        return [
            replace(group, rollouts=[self._rewarded(rollout, group) for rollout in group.rollouts])
            for group in groups
        ]

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        name, known = self.formula.settings.value, self.formula.settings.substitutes.keys()
        if any(row.scope is Scope.ROLE and row.name == name for r in rollouts for row in r.rewards):
            raise TrainingError(
                f"the verifier gives roles a reward {name!r}, and algorithm.counterfactual adds "
                "one of that name; rename the verifier's, or leave algorithm.counterfactual out"
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
                f"algorithm.counterfactual.substitutes.{role}: no call of {len(rollouts)} rollouts "
                f"was made in this role, and there is no substitute for "
                f"{', '.join(sorted(others))}; {nearest(role, others)}"
            )

    def _rewarded(self, rollout: Rollout, group: Group) -> Rollout:
        """Add role rewards to a rollout, computed from its counterfactual rollouts in the group."""
        if counterfactual(rollout):
            return rollout
        members = self.formula.members(rollout)
        outcomes: dict[Coalition, list[float]] = defaultdict(list)  # by replaced roles
        for row in group.rollouts:
            if counterfactual(row) and row.branch and row.branch.rollout == rollout.id:
                outcomes[frozenset(row.branch.without)].append(row.reward())

        def value(coalition: Coalition) -> float:
            if coalition == members:
                return rollout.reward()
            known = [x for x in outcomes[members - coalition] if not isnan(x)]
            return fmean(known) if known else nan

        own = {call.role for call in rollout.transitions if call.policy == self.policy}
        name = self.formula.settings.value
        rewards = [
            Reward(value=reward, name=name, scope=Scope.ROLE, target=role, source=SOURCE)
            for role, reward in self.formula.of(rollout, value).items()
            if role in own and not isnan(reward)
        ]
        return replace(rollout, rewards=[*rollout.rewards, *rewards])


def uses_counterfactuals(settings: CounterfactualConfig, algo: Algo) -> bool:
    """Whether an algorithm reads counterfactual rewards."""
    return bool(settings.substitutes) and f"role:{settings.value}" in algo.rewards


def with_optional_reward(settings: CounterfactualConfig, algo: Algo) -> Algo:
    """Make counterfactual rewards optional: a step without any must not end the run."""
    if not uses_counterfactuals(settings, algo):
        return algo
    name = f"role:{settings.value}"
    return dataclasses.replace(algo, optional=(*algo.optional, name))


def with_role_rewards(updater: Updater) -> Updater:
    """The updater of a policy, which adds counterfactual rewards if its algorithm reads them."""
    settings = updater.config.algorithm.counterfactual
    if not uses_counterfactuals(settings, updater.algo):
        return updater
    rewards = RoleRewards(coalition_formula(updater.config), updater.policy)
    before = updater.preprocessor
    completers = (rewards, *before.completers)
    return dataclasses.replace(
        updater, preprocessor=dataclasses.replace(before, completers=completers)
    )


def check_counterfactuals(
    config: RunConfig, algos: Mapping[str, Algo], resample: str | None
) -> None:
    """Raise ConfigError if no policy reads counterfactual rewards, if a role that learns from them
    has no substitute, and if `resample`, the reward of dynamic sampling, is counterfactual: it is
    unknown when groups are sampled."""
    settings = config.algorithm.counterfactual
    name = f"role:{settings.value}"
    if not settings.substitutes:
        return
    readers = [policy for policy, algo in algos.items() if uses_counterfactuals(settings, algo)]
    if not readers:
        raise ConfigError(
            f"algorithm.counterfactual is set, and no preset reads its reward {name!r}; choose the "
            f"preset {settings.value!r}, or set algorithm.options.reward = {name!r}"
        )
    for role, policy in policy_by_role(config).items():
        if policy in readers and role not in settings.substitutes:
            raise ConfigError(
                f"algorithm.counterfactual.substitutes has no {role!r}, and {policy!r}, which "
                f"plays it, learns from {name!r}; name its substitute"
            )
    if resample == name:
        raise ConfigError(
            f"algorithm.dynamic_sampling compares {name!r}, which rollouts do not have when they "
            "end; set it to false, or leave algorithm.counterfactual out"
        )
