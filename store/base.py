"""The store protocol. The store is the only truth; every other process may die at any moment.

Owns: runs, rollouts, attempts, transitions, spans, rewards, groups, steps, policy versions.
Always true:
  * A rollout has at most one live attempt: the one with the highest fence, while its lease holds.
  * A write that carries an old fence or comes after its attempt ended is kept for inspection
    (`late`) and never trained.
  * A group is trained by at most one step: `commit_step` marks groups, policy versions,
    checkpoint and metrics in one transaction.
  * What was claimed and not committed comes back.
Who may write: runners `claim`, `heartbeat`, `add_transitions`, `add_spans`, `finish`; the
algorithm everything else. Every verb is idempotent: ids come from the caller and a repeat changes
nothing. A verb returns after its transaction committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from agentrl.types import (
    Attempt,
    Counts,
    Group,
    Json,
    NewRollout,
    Outcome,
    PolicyVersion,
    Pruned,
    Purpose,
    Rollout,
    RolloutState,
    RunState,
    Span,
    Stats,
    StepCommit,
    StepRow,
    Trace,
    Transition,
)


class Store(Protocol):
    url: str

    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...

    # -- runs: called by the algorithm -------------------------------------------------------------
    async def open_run(self, run: str, config: dict[str, Json]) -> RunState:
        """Create a run, or take it over: the epoch grows, which fences every earlier owner, groups
        that were claimed but never committed are ready again, and `config` is the run's now.
        Other writes that name a run raise StoreError until it has been opened once."""
        ...

    async def commit_step(self, commit: StepCommit) -> None:
        """Make one training step true. Repeating the same commit is a no-op.

        Raises Fenced if `commit.epoch` is old; StoreError if the step is not the next one, or a
        group was not claimed by this epoch or is already trained."""
        ...

    async def claim_groups(
        self, run: str, epoch: int, n: int, *, timeout: float | None = None
    ) -> list[Group]:
        """The oldest `n` settled, untrained training groups of the run, by id, with rollouts,
        rewards and the transitions of each rollout's last attempt. Settled: every rollout is
        terminal, failures included. Waits until `n` are settled; returns fewer only when
        `timeout` seconds have passed. Claims again what this epoch claimed and did not commit."""
        ...

    async def publish(self, version: PolicyVersion, *, epoch: int | None = None) -> None:
        """Record where a policy version is served. Last writer wins; with `epoch`, Fenced is
        raised unless it is the present one. `open_run` forgets what was published before it."""
        ...

    async def log(
        self, run: str, step: int, metrics: dict[str, float], *, epoch: int | None = None
    ) -> None:
        """Merge metrics into a step without committing it (evaluations); `epoch` as in publish."""
        ...

    # -- queue -------------------------------------------------------------------------------------
    async def enqueue(self, rollouts: Sequence[NewRollout]) -> int:
        """Add rollouts; ids already present are ignored. Returns how many were new.

        A group has one run and one purpose, and is complete when its first rollouts settle:
        StoreError for new rollouts of a group that was claimed for training."""
        ...

    async def claim(
        self,
        n: int,
        *,
        runner: str,
        lease: float,
        run: str | None = None,
        claim_id: str | None = None,
        timeout: float = 0.0,
    ) -> list[Attempt]:
        """Lease up to `n` rollouts for `lease` seconds, highest priority then oldest first.

        Waits up to `timeout` seconds for the first. Expired leases are turned into new attempts
        here. A repeat with the same `claim_id` returns the same attempts."""
        ...

    async def heartbeat(self, attempts: Sequence[str], *, lease: float) -> list[str]:
        """Extend leases; returns the attempts that are still live. The others must be stopped.
        A lease that ran out cannot be extended. Changes no cursor: leases are no news."""
        ...

    async def finish(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """End attempts, each with its rewards and spans in the same transaction.

        False where the attempt was no longer live; its rows are then kept as late. A repeat of
        an accepted outcome is True. Raises NotFound for an unknown attempt and for a reward
        that is not finite."""
        ...

    async def cancel(self, rollouts: Sequence[str]) -> int:
        """Cancel rollouts that are not terminal; returns how many were."""
        ...

    # -- evidence: called by runner and gateway ----------------------------------------------------
    async def add_transitions(self, transitions: Sequence[Transition]) -> list[bool]:
        """Store model calls as tree nodes; False where the attempt was no longer live.

        Raises NotFound for an unknown attempt, for log-probs that are not finite, and for an
        exact call whose log-probs do not number its tokens."""
        ...

    async def add_spans(self, spans: Sequence[Span]) -> None: ...

    # -- reading -----------------------------------------------------------------------------------
    async def run(self, run: str) -> RunState | None: ...
    async def runs(self) -> list[str]: ...
    async def rollouts(
        self,
        run: str,
        *,
        purpose: Purpose | None = None,
        step: int | None = None,
        group: str | None = None,
        state: RolloutState | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        """Rollouts with their rewards, without transitions, in order of group and index."""
        ...

    async def trace(self, rollout: str) -> Trace | None:
        """Last attempt of a rollout with what it left behind: late spans too, late transitions
        and rewards not. None while it has no attempt."""
        ...

    async def steps(self, run: str, *, after: int = -1) -> list[StepRow]: ...
    async def counts(self, run: str) -> Counts:
        """Groups of training rollouts only; settled: terminal and not yet trained. Late
        transitions are not counted."""
        ...

    async def policies(self, run: str) -> dict[str, PolicyVersion]: ...

    # -- change feed -------------------------------------------------------------------------------
    async def cursor(self) -> int:
        """Number of the newest write."""
        ...

    async def wait(self, cursor: int, *, timeout: float | None = None) -> int:
        """Returns the newest cursor as soon as it is larger than `cursor`, or at the timeout."""
        ...

    async def settled(self, group: str, *, timeout: float | None = None) -> bool:
        """Waits until every rollout of the group is terminal; False at the timeout.
        Raises StoreError for an unknown group."""
        ...

    # -- upkeep: called by whoever keeps the store -------------------------------------------------
    async def stats(self) -> Stats: ...

    async def prune(
        self,
        *,
        run: str | None = None,
        keep_last: int | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Remove the evidence of what no step will ever read again, of one run or of all.

        Goes: evaluation rollouts, and rollouts of trained groups, that belong neither to the last
        `keep_last` committed steps of their run nor ended less than `older_than` seconds ago, with
        their attempts, transitions, spans and rewards; and events as old. At least one of the two
        limits is needed. Stays, always: what is queued, running or not yet trained, and every run,
        step, metric and policy. Cursors keep growing. With `dry_run` nothing changes."""
        ...

    async def vacuum(self) -> None:
        """Give the space of what was removed back to the file system."""
        ...
