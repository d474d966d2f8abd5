"""What a page shows of groups, rollouts and attempts: rows without tasks, results and messages; and
what a prune removes."""

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
    """A group with its rollouts, in order of index: their ids, states and outcomes. They are none
    once the group is pruned. An outcome is the rollout's reward of that name, None if missing."""

    id: str
    purpose: Purpose
    step: int  # that asked for it
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
    """A rollout as a list shows it, with the rewards of its last attempt."""

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
    """One page of a search. `cursor` goes on from here, None at the end; `looked` is the number of
    rollouts that were looked at for this page."""

    rows: list[RolloutRow]
    cursor: str | None
    looked: int


class AttemptRow(Record, frozen=True):
    """One try at a rollout with all that is stored of it. What came after it had ended, or under an
    old fence, is late: it is kept for inspection and never trained."""

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
    """The size of a store: `bytes` on disk, of which a vacuum would give back `free`."""

    rows: dict[str, int]  # by table
    bytes: int
    free: int
    cursor: int


class Pruned(Record, frozen=True):
    """Numbers of rows that a prune removed, or would remove."""

    rollouts: int = 0
    attempts: int = 0
    transitions: int = 0
    spans: int = 0
    rewards: int = 0
    events: int = 0
    bytes: int = 0  # of tokens, log-probs, messages and spans
