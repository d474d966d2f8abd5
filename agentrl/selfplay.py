"""Self-play as the run file asks for it: whose games they are, and what does not go together.

What is played is decided in `agentrl.algorithms.selfplay`.
"""

from __future__ import annotations

from agentrl import team
from agentrl.errors import ConfigError
from agentrl.sections import RunConfig


def player(config: RunConfig) -> str:
    """The policy that plays against itself and its pool."""
    return config.selfplay.policy or team.trained(config)[0]


def check(config: RunConfig, source: str) -> None:
    """Raises ConfigError for settings that make no game together."""
    settings = config.selfplay
    if not settings.seats:
        return
    trained = team.trained(config)
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
    claims = team.claims(config)
    for role in settings.seats:
        if claims.get(role, player(config)) != player(config):
            raise ConfigError(
                f"{source}: selfplay.seats names {role!r}, which {claims[role]!r} plays by [roles] "
                "or [policies]; leave it out there"
            )
    size, seats = config.algorithm.group_size, len(settings.seats)
    if settings.opponents != "self" and size % seats:
        raise ConfigError(
            f"{source}: algorithm.group_size = {size} is no multiple of the {seats} "
            "selfplay.seats, which the policy plays equally often in every group"
        )
