"""What branches and counterfactuals add to a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan

from agentrl.algorithms.data.merge import counterfactual
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.replays import counterfactuals
from agentrl.algorithms.replays.branching import request_branches
from agentrl.algorithms.train.hooks import Hooks, LoadedRun, ServedRun
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig
from agentrl.config.learning import INITIAL
from agentrl.config.policies import initial_version, policy_of_role
from agentrl.store.base import Store
from agentrl.types import Group, NewRollout


def join(config: RunConfig) -> Hooks | None:
    if not config.algorithm.joins:
        return None
    return Counterfactuals(config) if config.algorithm.counterfactual.joins else Branches(config)


def replay_metrics(groups: Sequence[Group]) -> Metrics:
    """branches, branches/diverged: rollouts that branch from another, and those whose agent asked
    something else before the fork, so not all earlier calls were replayed. replays,
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


class Branches(Hooks):
    """Rollouts that join the groups of others (`algorithm.branching`)."""

    store: Store

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    async def prepare(self, run: LoadedRun) -> None:
        self.store = run.store

    async def requested(self, rollouts: Sequence[NewRollout]) -> None:
        await request_branches(self.store, self.config, rollouts)

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        return groups, replay_metrics(groups)


class Counterfactuals(Branches):
    """Repetitions of rollouts with substitutes (`algorithm.counterfactual`)."""

    def algorithm(self, config: RunConfig, algo: Algo) -> Algo:
        return counterfactuals.with_optional_reward(config.algorithm.counterfactual, algo)

    def check(self, algos: Mapping[str, Algo], resample: str | None) -> None:
        counterfactuals.check_counterfactuals(self.config, algos, resample)

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        config, name = updater.config, updater.policy
        if not counterfactuals.uses_counterfactuals(config.algorithm.counterfactual, updater.algo):
            return updater
        rewards = counterfactuals.RoleRewards(counterfactuals.coalition_formula(config), name)
        before = updater.preprocessor
        return replace(
            updater, preprocessor=replace(before, completers=(rewards, *before.completers))
        )

    async def start(self, run: ServedRun) -> None:
        """Serve the untrained versions of policies that stand in, if the run trains anything."""
        named = self.config.algorithm.counterfactual.substitutes if self.config.steps else {}
        roles = [role for role, player in named.items() if player == INITIAL]
        policies = (policy_of_role(self.config, role) for role in roles)
        if players := dict(initial_version(self.config, policy) for policy in policies):
            async with run.serving.updating():
                await run.serving.serve_frozen(players)
