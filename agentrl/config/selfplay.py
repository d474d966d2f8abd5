"""Self-play as the run file asks for it: whose games they are, what does not go together, and who
has won.

What is played is decided in `agentrl.algorithms.sampling.selfplay`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from statistics import fmean

from agentrl.config import policies as team
from agentrl.config.infrastructure import VllmConfig, VllmEngineConfig
from agentrl.config.schema import RunConfig, SnapshotOpponents
from agentrl.errors import ConfigError
from agentrl.types import POLICY, Rollout, RolloutState, Scope


def learning_policy(config: RunConfig) -> str:
    """The policy that plays against itself and its pool."""
    return config.selfplay.policy or team.trained_policies(config)[0]


def check(config: RunConfig, source: str) -> None:
    """Raises ConfigError for settings that make no game together."""
    settings = config.selfplay
    if not settings.seats:
        return
    trained = team.trained_policies(config)
    if settings.policy and settings.policy not in trained:
        raise ConfigError(
            f"{source}: selfplay.policy = {settings.policy!r} is none of those that learn: "
            f"{', '.join(trained)}"
        )
    if len(trained) > 1 and not settings.policy:
        raise ConfigError(
            f"{source}: selfplay.policy is not set, and {', '.join(trained)} learn; name the one "
            "that plays"
        )
    claims = team.policy_by_role(config)
    for role in settings.seats:
        if claims.get(role, learning_policy(config)) != learning_policy(config):
            raise ConfigError(
                f"{source}: selfplay.seats names {role!r}, which {claims[role]!r} plays by [roles] "
                "or [policies]; leave it out there"
            )
    size, seats = config.algorithm.group_size, len(settings.seats)
    if not isinstance(settings, SnapshotOpponents):
        return
    if size % seats:
        raise ConfigError(
            f"{source}: algorithm.group_size = {size} is no multiple of the {seats} "
            "selfplay.seats, which the policy plays equally often in every group"
        )
    if isinstance(config.engine, VllmEngineConfig):
        _check_room(config, settings, config.engine.vllm, source)


def _check_room(
    config: RunConfig, settings: SnapshotOpponents, vllm: VllmConfig, source: str
) -> None:
    """That vLLM has room for the policy and its snapshots."""
    views = {name: team.view(config, name).policy for name in config.policies or [POLICY]}
    own = views[learning_policy(config)]
    if not own.lora.rank:
        raise ConfigError(
            f"{source}: selfplay.opponents = {settings.opponents!r}: engine.kind = 'vllm' "
            "serves snapshots that are adapters; set policy.lora.rank, or engine.kind = 'embedded'"
        )
    shared = sum(
        bool(one.lora.rank or one.lora.adapter) and one.model == own.model for one in views.values()
    )
    retired = ceil(config.algorithm.max_staleness / settings.every)
    needed, room = shared + settings.pool + retired, vllm.max_adapters
    if not vllm.urls and needed > room:
        raise ConfigError(
            f"{source}: engine.vllm.max_adapters = {room}: selfplay.pool = {settings.pool} "
            f"asks for {needed} at once; raise the one to that, or lower the other"
        )


def returns(rollout: Rollout, roles: Sequence[str]) -> dict[str, float] | None:
    """What each role got out of a game; None: it failed, or the return of one is not known."""
    found = {
        row.target: row.value
        for row in rollout.rewards
        if row.scope is Scope.ROLE and row.name == "outcome" and row.target and isfinite(row.value)
    }
    known = rollout.state is RolloutState.SUCCEEDED and found.keys() >= set(roles)
    return found if known else None


def game_score(got: Mapping[str, float], role: str, roles: Sequence[str]) -> float:
    """1 where a role's return is above the mean of the other roles', 1/2 where it is equal, else
    0, so that it has a meaning in general-sum games too."""
    rest = fmean(got[other] for other in roles if other != role)
    return (1 + (got[role] > rest) - (got[role] < rest)) / 2
