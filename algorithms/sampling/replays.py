"""Replays: rollouts that repeat calls of another one, as branches or with substitutes in some roles
(see `runners.gateway.features`).

A branch repeats the first calls of a rollout and resamples the rest, to estimate the value of a
call from several continuations; credit over trees of rollouts (`presets`) compares them. A
counterfactual rollout has substitutes in some of the roles, to measure the contribution of each
role to its team. The other roles' calls are replayed while their prompts are the same, and sampled
by the current policy after that. The outcomes are the values of coalitions, from which the formulas
of `rewards.teams` compute role rewards; the verifier needs no change.

Invariant: both join the group of their source before it is claimed; requests including ids are
deterministic, because they depend only on ended rollouts that are not branches, so a run that was
killed between requesting and claiming requests nothing twice; no policy trains on counterfactual
rollouts. The members of a team are the roles that made a call. The outcome without a role does not
depend on the role's samples, so the difference reward has the same policy gradient as the outcome.
Shapley values do not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from agentrl.algorithms.data.merge import counterfactual, trainable, valid_for_any
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.sampling.tasks import URGENT, new_rollout
from agentrl.algorithms.team_rewards import Coalition, Value, difference, shapley
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.algorithms.train.metrics import Metrics
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import (
    initial_name,
    initial_version,
    policy_by_role,
    policy_of_role,
    trained_policies,
)
from agentrl.core.config.learning import INITIAL, BranchingConfig, CounterfactualConfig
from agentrl.core.errors import ConfigError, Conflict, TrainingError, nearest
from agentrl.core.types import (
    POLICY,
    Branch,
    Group,
    NewRollout,
    Reward,
    Rollout,
    RolloutState,
    Scope,
    step_number,
)
from agentrl.store.base import Store

log = logging.getLogger(__name__)


class BranchPoint(NamedTuple):
    """A call to sample again. surprise: mean of -log-prob over its tokens in nats, an estimate of
    the policy's entropy."""

    rollout: str
    calls: int  # number of calls before it
    surprise: float


async def request_branches(store: Store, config: RunConfig, rollouts: Sequence[NewRollout]) -> None:
    """Wait for the rollouts to end, request the branches or counterfactual rollouts of their
    groups, and wait for these."""
    if not config.algorithm.joins:
        return
    async with asyncio.TaskGroup() as tasks:
        for group in dict.fromkeys(rollout.group for rollout in rollouts):
            tasks.create_task(_grow(store, config, group))


async def _grow(store: Store, config: RunConfig, group: str) -> None:
    await store.settled(group)
    rows = await store.rollouts(config.name, group=group)
    calls = await store.calls([row.id for row in rows if row.branch is None])
    rollouts = [replace(row, transitions=calls[row.id]) for row in rows if row.id in calls]
    replayed = config.algorithm.counterfactual.substitutes
    more = counterfactual_rollouts(config, rollouts) if replayed else branches(config, rollouts)
    try:
        await store.enqueue(more)
    except Conflict:  # trained by an earlier step, before the run file had branches
        log.warning("Group %s grows no branches: it was trained before its step.", group)
        return
    await store.settled(group)


def branches(config: RunConfig, rollouts: Sequence[Rollout]) -> list[NewRollout]:
    """The branches to request for one group. rollouts: the group's rollouts that are not
    branches."""
    settings = config.algorithm.branching
    policies = trained_policies(config)
    points = [list(branch_points(rollout, policies)) for rollout in rollouts]
    by_id = {rollout.id: rollout for rollout in rollouts}
    branches: list[NewRollout] = []
    for point in (x for x in choose_branch_points(settings, points) for _ in range(settings.width)):
        source = by_id[point.rollout]
        branch = Branch(rollout=source.id, calls=point.calls)
        branches.append(joining_rollout(config, source, branch, source.seats, len(branches)))
    return branches


def branch_points(rollout: Rollout, policies: Collection[str] = (POLICY,)) -> Iterator[BranchPoint]:
    """The calls of a rollout that can be sampled again: all calls of trained policies at a
    temperature above 0 but the first, from which a branch would be an ordinary rollout."""
    if not valid_for_any(rollout, policies):
        return
    for number, call in enumerate(rollout.transitions):
        trained = call.policy in policies and trainable(call, call.policy)
        if number and trained and call.completion and call.sampling.temperature > 0:
            yield BranchPoint(rollout.id, number, -fmean(call.logprobs))
        if call.finish == "cut":  # the call's end is unknown, so later calls cannot be replayed
            return


def choose_branch_points(
    settings: BranchingConfig, points: Sequence[Sequence[BranchPoint]]
) -> list[BranchPoint]:
    """The calls at which to branch, in order of rollout and call. points: candidates by rollout."""
    together = [point for candidates in points for point in candidates]
    chosen = {
        point
        for candidates in (points if settings.kind == "mc" else [together])
        for point in sorted(candidates, key=lambda point: -point.surprise)[: settings.calls or None]
    }
    return [point for point in together if point in chosen]


# Orders of joining that are drawn for Shapley values of more roles than have all of theirs played:
# as many as four roles have.
SHAPLEY_ORDERS = 24
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
        return shapley(value, members, samples=SHAPLEY_ORDERS, seed=seed)

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
    """The counterfactual rollouts to request for one group: for each trainable rollout with an
    outcome. rollouts: the group's rollouts that are not counterfactual."""
    formula, players = coalition_formula(config), substitutes(config)
    policies, requested = trained_policies(config), list[NewRollout]()
    for rollout in rollouts:
        if isnan(rollout.reward()) or not valid_for_any(rollout, policies):
            continue
        for absent in map(sorted, formula.absent(rollout)):
            seats = {**rollout.seats, **{role: players[role] for role in absent}}
            calls = len(rollout.transitions)
            branch = Branch(rollout=rollout.id, calls=calls, without=absent)
            requested.append(joining_rollout(config, rollout, branch, seats, len(requested)))
    return requested


@dataclass(frozen=True, slots=True)
class RoleRewards:
    """Adds a counterfactual reward for each role that a policy plays. It is missing (NaN) if the
    rollout, or the counterfactual rollout of a coalition, has no outcome."""

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
                len(replays), step_number(groups[0].step),
            )  # fmt: skip
        return [
            replace(group, rollouts=[self._rewarded(rollout, group) for rollout in group.rollouts])
            for group in groups
        ]

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        name, substituted = self.formula.settings.value, self.formula.settings.substitutes.keys()
        if any(row.scope is Scope.ROLE and row.name == name for r in rollouts for row in r.rewards):
            raise TrainingError(
                f"the verifier gives roles a reward {name!r}, and algorithm.counterfactual adds "
                "one of that name; rename the verifier's, or leave algorithm.counterfactual out"
            )
        succeeded = [rollout for rollout in rollouts if rollout.state is RolloutState.SUCCEEDED]
        if succeeded and all(isnan(rollout.reward()) for rollout in succeeded):
            raise TrainingError(
                f"algorithm.counterfactual compares outcomes, and none of {len(succeeded)} "
                f"rollouts of step {step_number(succeeded[0].step)} has one; let the verifier "
                "return a reward 'outcome'"
            )
        calls = [call for rollout in rollouts for call in rollout.transitions]
        silent = substituted - {call.role for call in calls}
        others = {call.role for call in calls if call.policy == self.policy} - substituted
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
        outcomes: dict[Coalition, float] = {  # replaced roles -> outcome
            frozenset(row.branch.without): row.reward()
            for row in group.rollouts
            if counterfactual(row) and row.branch and row.branch.rollout == rollout.id
        }

        def value(coalition: Coalition) -> float:
            if coalition == members:
                return rollout.reward()
            return outcomes.get(members - coalition, nan)

        played = {call.role for call in rollout.transitions if call.policy == self.policy}
        name = self.formula.settings.value
        rewards = [
            Reward(value=reward, name=name, scope=Scope.ROLE, target=role, source=SOURCE)
            for role, reward in self.formula.of(rollout, value).items()
            if role in played and not isnan(reward)
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


class Replays(Feature):
    """Rollouts that join groups (`algorithm.branching` and `algorithm.counterfactual`)."""

    async def start(self, run: ServedRun) -> None:
        """Serve the untrained versions of substituted policies, if the run trains anything."""
        config = run.config
        named = config.algorithm.counterfactual.substitutes if config.steps else {}
        roles = [role for role, player in named.items() if player == INITIAL]
        policies = (policy_of_role(config, role) for role in roles)
        if players := dict(initial_version(config, policy) for policy in policies):
            async with run.serving.updating():
                await run.serving.serve_frozen(players)

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        return groups, replay_metrics(groups)


def replay_metrics(groups: Sequence[Group]) -> Metrics:
    """branches, branches/diverged: rollouts that branch from another one, and those with a
    different request before the fork, so that not all earlier calls were replayed. replays,
    replays/missing: counterfactual rollouts, and those without an outcome. calls/repeated: calls
    answered from the record. Empty without branches and counterfactual rollouts."""
    rows = [row for group in groups for row in group.rollouts if row.branch is not None]
    repeated = [sum(call.repeats is not None for call in row.transitions) for row in rows]
    replays = [row for row in rows if counterfactual(row)]
    metrics: Metrics = {"calls/repeated": sum(repeated)} if rows else {}
    if replays:
        missing = sum(isnan(row.reward()) for row in replays)
        metrics |= {"replays": len(replays), "replays/missing": missing}
    if len(replays) < len(rows):
        diverged = sum(
            not counterfactual(row) and row.branch is not None and count < row.branch.calls
            for row, count in zip(rows, repeated, strict=True)
        )
        metrics |= {"branches": len(rows) - len(replays), "branches/diverged": diverged}
    return metrics
