"""What branches and counterfactuals add to a training run."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from agentrl.algorithms.data.merge import counterfactual
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.config.learning import INITIAL
from agentrl.config.policies import initial_version, policy_of_role
from agentrl.types import Group


class Replays(Feature):
    """Rollouts that join groups (`algorithm.branching` and `algorithm.counterfactual`)."""

    async def start(self, run: ServedRun) -> None:
        """Serve the untrained versions of policies that stand in, if the run trains anything."""
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
