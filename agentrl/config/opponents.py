"""The tables of self-play: who plays against the policy that learns."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from agentrl.config.base import Count, Positive, Section, kind_of


class SelfplayConfig(Section, frozen=True, tag_field="opponents", tag="self"):
    """Games of several seats, all of which the trained policy plays."""

    seats: list[str] = []  # roles of the game; none: no self-play
    policy: str = ""  # that plays; default: the one policy that is trained

    @property
    def opponents(self) -> str:
        return kind_of(self)

    def __post_init__(self) -> None:
        if len(set(self.seats)) != len(self.seats) or len(self.seats) == 1:
            raise ValueError("seats are two or more roles, each named once")
        if self.policy and not self.seats:
            raise ValueError("policy means nothing without seats: the roles of the game")


class SnapshotOpponents(SelfplayConfig, frozen=True, kw_only=True):
    """The trained policy plays one of the seats, and snapshots of it play the others."""

    seats: Annotated[list[str], msgspec.Meta(min_length=2)]  # roles; the policy plays each as often
    self_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5  # of groups, against itself
    every: Count = 10  # steps from one snapshot to the next
    pool: Count = 8  # snapshots that are kept
    k: Positive = 16.0  # Elo points at stake in a game


class LatestOpponents(SnapshotOpponents, frozen=True, tag="latest"):
    """The newest snapshot plays."""


class UniformOpponents(SnapshotOpponents, frozen=True, tag="uniform"):
    """Every snapshot plays equally often."""


class PfspOpponents(SnapshotOpponents, frozen=True, tag="pfsp"):
    """Snapshots are drawn by the policy's win rate (prioritised fictitious self-play)."""

    pfsp: Literal["hard", "variance"] = "hard"  # most often the hardest, or those of equal strength


Selfplay = SelfplayConfig | LatestOpponents | UniformOpponents | PfspOpponents
