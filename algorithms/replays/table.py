"""The tables [algorithm.branching] and [algorithm.counterfactual] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from agentrl.algorithms.replays.coalitions import EXACT_ROLES
from agentrl.config.base import Count, Joining, Natural
from agentrl.errors import nearest
from agentrl.types import POLICY

INITIAL = "first"  # in `substitutes`: the role's own policy before training


class BranchingConfig(Joining, frozen=True):
    """Additional rollouts of a group, queued when the group's own have ended. Each replays the
    first calls of an earlier rollout and samples the rest.

    mc: branch before each call of every rollout. tree: branch before the calls of the group in
    which the policy is least certain."""

    trains: ClassVar[bool] = True
    kind: Literal["none", "mc", "tree"] = "none"  # the calls that are sampled again
    width: Count = 1  # branches per call
    # Number of calls, least certain first, per rollout (mc; 0: all) or group (tree).
    calls: Natural = 0

    def __post_init__(self) -> None:
        if self.kind == "none" and (self.width, self.calls) != (1, 0):
            raise ValueError("width and calls have no effect without kind = 'mc' or 'tree'")
        if self.kind == "tree" and not self.calls:
            raise ValueError("kind = 'tree' needs `calls`, the number of calls per group")

    @property
    def joins(self) -> bool:
        return self.kind != "none"

    def problems(self, config: Any) -> Iterator[str]:
        yield from _problems(self, config)


class CounterfactualConfig(Joining, frozen=True):
    """Replays of rollouts with other policies in some roles, queued when the rollouts have ended.
    They measure the contribution of a role."""

    # Replacement of each role: a policy, an upstream, or "first", the role's own policy before
    # training. The contributions of these roles are measured.
    substitutes: dict[str, str] = {}
    # Reward of a role: the value of the team minus that of the team without the role, or the role's
    # mean marginal contribution to coalitions of the others.
    value: Literal["difference", "shapley"] = "difference"
    orders: Natural = 0  # sampled orders of joining, for Shapley values of more than 4 roles
    width: Count = 1  # replays per coalition, whose mean is its value

    def __post_init__(self) -> None:
        if not self.substitutes and (self.value, self.orders, self.width) != ("difference", 0, 1):
            raise ValueError("value, orders and width have no effect without substitutes")
        many = self.value == "shapley" and len(self.substitutes) > EXACT_ROLES
        if many and not self.orders:
            raise ValueError(
                f"{len(self.substitutes)} roles can join in too many orders to take them all; set "
                "`orders`, the number to sample"
            )
        if self.orders and not many:
            raise ValueError(f"orders are for Shapley values of more than {EXACT_ROLES} roles")

    @property
    def joins(self) -> bool:
        return bool(self.substitutes)

    def problems(self, config: Any) -> Iterator[str]:
        """Stand-ins replace trained policies with known policies or upstreams."""
        from agentrl.config import policies as team

        yield from _problems(self, config)
        given, ahead = self.substitutes, config.algorithm.max_staleness
        if given and branching_of(config).joins:
            yield (
                "algorithm.counterfactual cannot replay rollouts of [algorithm.branching]; remove "
                "one of them"
            )
        if given and ahead:
            yield (
                f"algorithm.max_staleness = {ahead:g} lets a step train rollouts that have no "
                "replays yet, from which algorithm.counterfactual learns nothing; remove one of "
                "them"
            )
        trained, others = team.trained_policies(config), {*config.policies, *config.upstreams}
        known = others | {INITIAL} | (set() if config.policies else {POLICY})
        for role, player in given.items():
            where = f"algorithm.counterfactual.substitutes.{role}"
            if team.policy_of_role(config, role) not in trained:
                learning = {r for r, name in team.policy_by_role(config).items() if name in trained}
                yield f"{where}: no trained policy plays this role; {nearest(role, learning)}"
            if player not in known:
                yield f"{where} = {player!r}; {nearest(player, known)}"
            if player == INITIAL and player in others:
                yield (
                    f"{where} = {player!r} means the role's own policy before training, but "
                    "another player has this name; rename that one"
                )


def _problems(table: Joining, config: Any) -> Iterator[str]:
    """Settings by which a group ends before all of its rollouts."""
    settings, usual = config.algorithm, type(config.algorithm)()
    for key in ("group_order", "group_quorum", "group_deadline"):
        if table.joins and getattr(settings, key) != getattr(usual, key):
            yield (
                f"algorithm.{key}: rollouts join a group when all of its own have ended, with "
                "algorithm.branching or counterfactual; remove one of them"
            )


def branching_of(config: Any) -> BranchingConfig:
    settings: BranchingConfig = config.algorithm.branching
    return settings


def counterfactual_of(config: Any) -> CounterfactualConfig:
    settings: CounterfactualConfig = config.algorithm.counterfactual
    return settings
