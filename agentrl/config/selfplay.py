"""Self-play: the policy that plays, checks of its settings, and the score of a game.

`agentrl.algorithms.sampling.selfplay` chooses the games of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, isfinite
from statistics import fmean

from agentrl.config import policies as team
from agentrl.config.opponents import SnapshotOpponents
from agentrl.config.schema import RunConfig
from agentrl.types import POLICY, Rollout, RolloutState, Scope


def learning_policy(config: RunConfig) -> str:
    """The policy that plays against itself and its snapshots."""
    return config.selfplay.policy or team.trained_policies(config)[0]


def problems(config: RunConfig) -> Iterator[str]:
    """Error messages about [selfplay] in combination with other settings."""
    settings = config.selfplay
    if not settings.seats:
        return
    trained = team.trained_policies(config)
    if settings.policy and settings.policy not in trained:
        yield (
            f"selfplay.policy = {settings.policy!r} is not one of the policies that learn: "
            f"{', '.join(trained)}"
        )
    if len(trained) > 1 and not settings.policy:
        yield (
            f"selfplay.policy is not set, and {', '.join(trained)} learn; name the one that plays"
        )
    own, player = learning_policy(config), team.policy_by_role(config)
    for role in settings.seats:
        if player.get(role, own) != own:
            yield (
                f"selfplay.seats names {role!r}, which {player[role]!r} plays by [roles] or "
                "[policies]; remove it there"
            )
    if not isinstance(settings, SnapshotOpponents):
        return
    size, seats = config.algorithm.group_size, len(settings.seats)
    if size % seats:
        yield (
            f"algorithm.group_size = {size} is no multiple of the {seats} selfplay.seats, which "
            "the policy plays equally often in every group"
        )
    if config.engine.serves_only_adapters:
        yield from _adapter_problems(config, settings)


def _adapter_problems(config: RunConfig, settings: SnapshotOpponents) -> Iterator[str]:
    """Error messages if the engine cannot serve the policy and its snapshots as adapters."""
    views = {name: team.view(config, name).policy for name in config.policies or [POLICY]}
    own = views[learning_policy(config)]
    if not own.lora.rank:
        yield (
            f"selfplay.opponents = {settings.opponents!r}: engine.kind = {config.engine.kind!r} "
            "serves snapshots only as adapters; set policy.lora.rank, or engine.kind = 'embedded'"
        )
    shared = sum(
        bool(one.lora.rank or one.lora.adapter) and one.model == own.model for one in views.values()
    )
    retired = ceil(config.algorithm.max_staleness / settings.every)
    needed = shared + settings.pool + retired
    key, most = config.engine.most_adapters or ("", needed)
    if needed > most:
        yield (
            f"{key} = {most}: selfplay.pool = {settings.pool} asks for {needed} at once; raise it "
            "to that, or lower the pool"
        )


def returns(rollout: Rollout, roles: Sequence[str]) -> dict[str, float] | None:
    """The return of each role; None if the game failed or a return is missing."""
    found = {
        row.target: row.value
        for row in rollout.rewards
        if row.scope is Scope.ROLE and row.name == "outcome" and row.target and isfinite(row.value)
    }
    complete = rollout.state is RolloutState.SUCCEEDED and found.keys() >= set(roles)
    return found if complete else None


def game_score(got: Mapping[str, float], role: str, roles: Sequence[str]) -> float:
    """1 if a role's return is above the mean of the other roles' returns, 1/2 if equal, else 0.
    Also meaningful in general-sum games."""
    rest = fmean(got[other] for other in roles if other != role)
    return (1 + (got[role] > rest) - (got[role] < rest)) / 2
