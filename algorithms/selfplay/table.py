"""The table [selfplay] of the run file: the opponents of the policy in training."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from agentrl.config.base import Count, Positive, Section, kind_of, optional
from agentrl.types import POLICY


class SelfplayConfig(Section, frozen=True, tag_field="opponents", tag="self"):
    """Games with several seats; the trained policy plays all of them."""

    plays: ClassVar[bool] = True
    seats: list[str] = []  # roles of the game; none: no self-play
    policy: str = ""  # the policy that plays; default: the run's only trained policy

    @property
    def opponents(self) -> str:
        return kind_of(self)

    def __post_init__(self) -> None:
        if len(set(self.seats)) != len(self.seats) or len(self.seats) == 1:
            raise ValueError("seats must be two or more roles, each named once")
        if self.policy and not self.seats:
            raise ValueError("policy has no effect without seats, the roles of the game")

    def evaluated(self, config: Any) -> SelfplayConfig:
        return SelfplayConfig()  # no opponents from a pool

    def problems(self, config: Any) -> Iterator[str]:
        from agentrl.config import policies as team

        if not self.seats:
            return
        trained = team.trained_policies(config)
        if self.policy and self.policy not in trained:
            yield (
                f"selfplay.policy = {self.policy!r} is not one of the policies that learn: "
                f"{', '.join(trained)}"
            )
        if len(trained) > 1 and not self.policy:
            yield (
                f"selfplay.policy is not set, and {', '.join(trained)} learn; name the one that "
                "plays"
            )
        own, player = learning_policy(config), team.policy_by_role(config)
        for role in self.seats:
            if player.get(role, own) != own:
                yield (
                    f"selfplay.seats names {role!r}, which {player[role]!r} plays by [roles] or "
                    "[policies]; remove it there"
                )
        if optional(config, "algorithm.counterfactual.substitutes"):
            yield (
                "algorithm.counterfactual cannot replay rollouts of [selfplay]; remove one of them"
            )


class SnapshotOpponents(SelfplayConfig, frozen=True, kw_only=True):
    """The trained policy plays one seat, and its snapshots play the others."""

    seats: Annotated[list[str], msgspec.Meta(min_length=2)]  # roles; the policy alternates evenly
    # Fraction of groups in which the policy plays itself.
    self_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    every: Count = 10  # steps between snapshots
    pool: Count = 8  # snapshots to keep
    elo_k: Positive = 16.0  # K-factor of Elo updates

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        size, seats = config.algorithm.group_size, len(self.seats)
        if size % seats:
            yield (
                f"algorithm.group_size = {size} is no multiple of the {seats} selfplay.seats, "
                "which the policy plays equally often in every group"
            )
        if config.engine.serves_only_adapters:
            yield from self._adapter_problems(config)

    def _adapter_problems(self, config: Any) -> Iterator[str]:
        """Error messages if the engine cannot serve the policy and its snapshots as adapters."""
        from agentrl.config import policies as team

        views = {name: team.view(config, name).policy for name in config.policies or [POLICY]}
        own = views[learning_policy(config)]
        if not own.lora.rank:
            yield (
                f"selfplay.opponents = {self.opponents!r}: engine.kind = {config.engine.kind!r} "
                "serves snapshots only as adapters; set policy.lora.rank, or engine.kind = "
                "'embedded'"
            )
        shared = sum(
            bool(one.lora.rank or one.lora.adapter) and one.model == own.model
            for one in views.values()
        )
        retired = ceil(config.algorithm.max_staleness / self.every)
        needed = shared + self.pool + retired
        key, most = config.engine.most_adapters or ("", needed)
        if needed > most:
            yield (
                f"{key} = {most}: selfplay.pool = {self.pool} asks for {needed} at once; raise it "
                "to that, or lower the pool"
            )


class LatestOpponents(SnapshotOpponents, frozen=True, tag="latest"):
    """The newest snapshot plays."""


class UniformOpponents(SnapshotOpponents, frozen=True, tag="uniform"):
    """Every snapshot plays equally often."""


class PfspOpponents(SnapshotOpponents, frozen=True, tag="pfsp"):
    """Snapshots are drawn by the policy's win rate (prioritised fictitious self-play)."""

    # Opponents that are preferred: the hardest, or those of equal strength.
    pfsp: Literal["hard", "variance"] = "hard"


Selfplay = SelfplayConfig | LatestOpponents | UniformOpponents | PfspOpponents


def selfplay_of(config: Any) -> SelfplayConfig:
    settings: SelfplayConfig = config.selfplay
    return settings


def learning_policy(config: Any) -> str:
    """The policy that plays against itself and its snapshots."""
    from agentrl.config import policies as team

    return selfplay_of(config).policy or team.trained_policies(config)[0]
