"""Self-play settings: which policy plays, what does not go together, and who has won a game.

The games of a step are chosen in `agentrl.algorithms.sampling.selfplay`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, isfinite
from statistics import fmean

from agentrl.config import policies as team
from agentrl.config.infrastructure import VllmConfig, VllmEngineConfig
from agentrl.config.opponents import SnapshotOpponents
from agentrl.config.schema import RunConfig
from agentrl.types import POLICY, Rollout, RolloutState, Scope


def learning_policy(config: RunConfig) -> str:
    """The policy that plays against itself and its pool."""
    return config.selfplay.policy or team.trained_policies(config)[0]


def problems(config: RunConfig) -> Iterator[str]:
    """A sentence for each setting that makes no game together with others."""
    settings = config.selfplay
    if not settings.seats:
        return
    trained = team.trained_policies(config)
    if settings.policy and settings.policy not in trained:
        yield (
            f"selfplay.policy = {settings.policy!r} is none of those that learn: "
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
                "[policies]; leave it out there"
            )
    if not isinstance(settings, SnapshotOpponents):
        return
    size, seats = config.algorithm.group_size, len(settings.seats)
    if size % seats:
        yield (
            f"algorithm.group_size = {size} is no multiple of the {seats} selfplay.seats, which "
            "the policy plays equally often in every group"
        )
    if isinstance(config.engine, VllmEngineConfig):
        yield from _vllm_problems(config, settings, config.engine.vllm)


def _vllm_problems(
    config: RunConfig, settings: SnapshotOpponents, vllm: VllmConfig
) -> Iterator[str]:
    """vLLM serves the policy and its snapshots as adapters, up to a number of them."""
    views = {name: team.view(config, name).policy for name in config.policies or [POLICY]}
    own = views[learning_policy(config)]
    if not own.lora.rank:
        yield (
            f"selfplay.opponents = {settings.opponents!r}: engine.kind = 'vllm' serves snapshots "
            "that are adapters; set policy.lora.rank, or engine.kind = 'embedded'"
        )
    shared = sum(
        bool(one.lora.rank or one.lora.adapter) and one.model == own.model for one in views.values()
    )
    retired = ceil(config.algorithm.max_staleness / settings.every)
    needed = shared + settings.pool + retired
    if not vllm.urls and needed > vllm.max_adapters:
        yield (
            f"engine.vllm.max_adapters = {vllm.max_adapters}: selfplay.pool = {settings.pool} asks "
            f"for {needed} at once; raise the one to that, or lower the other"
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
    """1 where a role's return is above the mean of the other roles', 1/2 where it is equal, else
    0, so that it has a meaning in general-sum games too."""
    rest = fmean(got[other] for other in roles if other != role)
    return (1 + (got[role] > rest) - (got[role] < rest)) / 2
