"""Tables of self-play: the opponents of the policy in training."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from agentrl.config.base import Count, Positive, Section, kind_of


class SelfplayConfig(Section, frozen=True, tag_field="opponents", tag="self"):
    """Games with several seats; the trained policy plays all of them."""

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


class SnapshotOpponents(SelfplayConfig, frozen=True, kw_only=True):
    """The trained policy plays one seat, and its snapshots play the others."""

    seats: Annotated[list[str], msgspec.Meta(min_length=2)]  # roles; the policy alternates evenly
    self_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5  # fraction of groups vs. itself
    every: Count = 10  # steps between snapshots
    pool: Count = 8  # snapshots to keep
    k: Positive = 16.0  # K-factor of Elo updates


class LatestOpponents(SnapshotOpponents, frozen=True, tag="latest"):
    """The newest snapshot plays."""


class UniformOpponents(SnapshotOpponents, frozen=True, tag="uniform"):
    """Every snapshot plays equally often."""


class PfspOpponents(SnapshotOpponents, frozen=True, tag="pfsp"):
    """Snapshots are drawn by the policy's win rate (prioritised fictitious self-play)."""

    pfsp: Literal["hard", "variance"] = "hard"  # prefer the hardest, or those of equal strength


Selfplay = SelfplayConfig | LatestOpponents | UniformOpponents | PfspOpponents
