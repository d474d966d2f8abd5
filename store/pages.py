"""Compact records of groups, rollouts and attempts for lists; results of `stats` and `prune`."""

from __future__ import annotations

from typing import NamedTuple

from agentrl.types import (
    AttemptState,
    ErrorKind,
    Failure,
    Purpose,
    Record,
    Reward,
    RolloutState,
    Span,
    Transition,
)


class GroupRow(Record, frozen=True):
    """A group with ids, states and outcomes of its rollouts, in order of index; empty lists if it
    is pruned. An outcome is the rollout's reward with this name, None if missing."""

    id: str
    purpose: Purpose
    step: int  # the step that requested it
    state: str  # open, settled, claimed, trained or discarded
    trained: int | None  # the step that trained or discarded it
    rollouts: list[str]
    states: list[RolloutState]
    outcomes: list[float | None]

    @property
    def n(self) -> int:
        return len(self.rollouts)

    @property
    def failed(self) -> int:
        return self.states.count(RolloutState.FAILED)


class RolloutRow(Record, frozen=True):
    """A rollout without task, result and calls, with the rewards of its last attempt."""

    id: str
    run: str
    group: str
    index: int
    purpose: Purpose
    step: int
    state: RolloutState
    trained: int | None
    attempts: int
    attempt: str | None
    seconds: float
    error: ErrorKind | None
    rewards: list[Reward]


class Found(NamedTuple):
    """One page of a search. `cursor`: start of the next page, None at the end; `looked`: number of
    rollouts examined for this page."""

    rows: list[RolloutRow]
    cursor: str | None
    looked: int


class AttemptRow(Record, frozen=True):
    """One attempt at a rollout with all its rows. Rows that arrived after its end, or with an old
    fence, are late: stored for inspection and never trained."""

    id: str
    fence: int
    state: AttemptState
    runner: str
    started: float  # unix seconds
    ended: float | None
    failure: Failure | None
    transitions: list[Transition]
    rewards: list[Reward]
    spans: list[Span]
    late_transitions: list[Transition]
    late_rewards: list[Reward]


class Stats(Record, frozen=True):
    """The size of a store: `bytes` on disk, of which a vacuum would release `free`."""

    rows: dict[str, int]  # by table
    bytes: int
    free: int
    cursor: int


class Pruned(Record, frozen=True):
    """Numbers of rows that a prune has removed, or would remove."""

    rollouts: int = 0
    attempts: int = 0
    transitions: int = 0
    spans: int = 0
    rewards: int = 0
    events: int = 0
    bytes: int = 0  # of tokens, log-probs, messages and spans
