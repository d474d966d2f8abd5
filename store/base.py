"""The store protocol. The store is the only truth; every other process may die at any moment.

Owns: runs, rollouts, attempts, transitions, spans, rewards, groups, steps, policy versions.
Always true:
  * A rollout has at most one live attempt: the one with the highest fence, while its lease holds.
  * A write that carries an old fence or comes after its attempt ended is kept for inspection
    (`late`) and never trained.
  * A group is trained by at most one step: `commit_step` marks groups, policy versions,
    checkpoint and metrics in one transaction, and only `rewind` takes a step back.
  * What was claimed and not committed comes back.
Who may call: each section says whose it is; reading is everybody's. Over HTTP a `runner` key may
call the verbs of runners and gateways (not `enqueue` and `cancel`) and, of reading, what these
need: `run`, `trace`, `policies`, `cursor` and `wait`; the others need an `admin` key.
When it is repeated: every verb is idempotent. Ids come from the caller, and a repeat changes
nothing; where a verb has more to say about repeats, it does. So whoever is not sure that a call
arrived calls again.
When it returns: after its transaction committed. When it raises: nothing of the call was kept.
  * Invalid: what was sent can never be stored or makes no sense. Do not repeat it.
  * NotFound: it names a run, group or attempt that the store does not have.
  * Conflict: the present state forbids it. Fenced is the one that means: somebody else took over,
    stop.
  * Forbidden (HTTP): the key is missing, unknown or of too small a scope.
  * Unavailable: the store cannot be reached, read or written now. Any verb may raise these two.
All times are unix seconds of the store's clock, all timeouts seconds of real time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from agentrl.types import (
    Attempt,
    Counts,
    Credit,
    FailureCount,
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

    async def close(self) -> None:
        """Returns when everything posted is committed. A closed store raises StoreError; closing
        it again does nothing."""
        ...

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
        that were claimed but never committed are ready again, what was published is forgotten,
        and `config` is the run's now. Writes that name a run raise NotFound before this.

        A repeat is a further takeover: call it once per life of the algorithm. Raises Invalid for
        a config that is no JSON."""
        ...

    async def commit_step(self, commit: StepCommit) -> None:
        """Make one training step true: all of it or, when this raises, nothing.

        `groups` are trained by it and `discarded` ones are not, nor will be. A repeat of the same
        commit does nothing, also after a prune. Raises Fenced if `commit.epoch` is old; Conflict if
        the step is not the next one, or a group was not claimed by this epoch or is already
        trained or discarded; NotFound for a run or group unknown here, and for credit of what is
        no call and judgements of what is no rollout of `groups`. The rewards of judgements join
        those of the rollout."""
        ...

    async def rewind(self, run: str, epoch: int, step: int, checkpoint: str | None) -> None:
        """Take back the committed steps from `step` on: the run has `step` steps again, those of
        `checkpoint`, or of the start where it is None.

        All of it or nothing: their groups, discarded ones too, can be claimed again, groups whose
        rollouts are pruned enqueued again; their credit, judgements and metrics go, and so do the
        evaluations of later steps. Rollouts and what runners said of them stay. A repeat does
        nothing. Raises Fenced if `epoch` is old; Conflict if the run has fewer steps; NotFound for
        an unknown run; Invalid for a negative step."""
        ...

    async def claim_groups(
        self, run: str, epoch: int, n: int, *, timeout: float | None = None
    ) -> list[Group]:
        """The oldest `n` settled, untrained training groups of the run, by id, with rollouts,
        rewards and the transitions of each rollout's last attempt. Settled: every rollout is
        terminal, failures included. Waits until `n` are settled; returns fewer only when
        `timeout` seconds have passed.

        A repeat returns what this epoch claimed and did not commit, first. Raises Fenced, also
        while it waits, if `epoch` is old; NotFound for an unknown run; Invalid unless `n` > 0."""
        ...

    async def publish(self, version: PolicyVersion, *, epoch: int | None = None) -> None:
        """Record where a policy version is served; gateways send the calls there.

        The last writer wins. With `epoch`, raises Fenced unless it is the present one; NotFound
        for an unknown run. `open_run` forgets what was published before it."""
        ...

    async def log(
        self, run: str, step: int, metrics: dict[str, float], *, epoch: int | None = None
    ) -> None:
        """Merge metrics into a step, committed or not yet; a name that is there is overwritten.
        `epoch` and errors as in `publish`."""
        ...

    # -- queue: called by runners; enqueue and cancel by the algorithm -----------------------------
    async def enqueue(self, rollouts: Sequence[NewRollout]) -> int:
        """Add rollouts; ids already present are ignored. Returns how many were new.

        A group has one run and one purpose, and is complete when its first rollouts settle.
        Raises NotFound for a run never opened; Conflict for new rollouts of a group that was
        claimed for training, and for a group of another run or purpose; Invalid for a rollout
        that cannot be run. All rollouts of the call are added, or none."""
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
        here: of a rollout that its runner held alone up to `max_attempts`; others that were lost
        together had no try, and a runner is given fewer of them at a time. A repeat with the same
        `claim_id` returns at once those of the same attempts that are still live, and claims no
        more; without one, a
        repeat claims more. Raises Invalid unless `n` and `lease` are positive, for a lease of more
        than an hour, and for an empty `claim_id`."""
        ...

    async def heartbeat(self, attempts: Sequence[str], *, lease: float) -> list[str]:
        """Extend leases; returns the attempts that are still live. The others must be stopped;
        unknown ones are among those. A lease that ran out cannot be extended, and none is ever
        shortened. Changes no cursor: leases are no news. Raises Invalid unless `lease` > 0."""
        ...

    async def finish(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """End attempts, each with its rewards and spans in the same transaction.

        False where the attempt was no longer live; its rows are then kept as late. A repeat of
        an accepted outcome is True. With `retry`, the rollout is queued again while it has
        attempts left; given back by a runner that stops (`lost_runner`), it does not count as
        one. Raises NotFound for an unknown attempt; Invalid for a reward that is not finite, has
        no target where its scope needs one, or is about a transition that the attempt does not
        have, and for a span of another attempt."""
        ...

    async def cancel(self, rollouts: Sequence[str]) -> int:
        """Cancel rollouts that are not terminal; returns how many were. Their runners learn it
        from the next heartbeat. Unknown ids are no error. Called by the algorithm."""
        ...

    # -- traces: called by runner and gateway ----------------------------------------------------
    async def add_transitions(self, transitions: Sequence[Transition]) -> list[bool]:
        """Store model calls as tree nodes; False where the attempt was no longer live.

        A repeat, known by the transition's id, answers as the first time did. Raises NotFound for
        an unknown attempt; Invalid for log-probs that are not finite, for an exact call whose
        log-probs do not number its tokens, and for arrays of another type; Conflict for an id
        that another attempt has. A gateway answers its agent after this returned."""
        ...

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """Store spans of attempts, late ones too. The first span of an id stays. Raises NotFound
        for an unknown attempt."""
        ...

    # -- reading: called by everybody --------------------------------------------------------------
    async def run(self, run: str) -> RunState | None:
        """Where a run stands, without taking it over; None if it was never opened."""
        ...

    async def runs(self) -> list[str]:
        """Names, oldest first."""
        ...

    async def rollouts(
        self,
        run: str,
        *,
        purpose: Purpose | None = None,
        step: int | None = None,
        group: str | None = None,
        state: RolloutState | None = None,
        trained: int | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        """Rollouts with their rewards, without transitions, in order of group and index; [] for an
        unknown run. `step` is the one that asked for them, `trained` the one that trained them.
        At most `limit`; raises Invalid if that is negative."""
        ...

    async def trace(self, rollout: str) -> Trace | None:
        """Last attempt of a rollout with what it left behind: late spans too, late transitions
        and rewards not. None while it has no attempt."""
        ...

    async def credits(self, rollout: str) -> list[Credit]:
        """What the step that trained a rollout made of its calls, in their order; [] if none did,
        it stored none or the rollout is pruned."""
        ...

    async def steps(self, run: str, *, after: int = -1) -> list[StepRow]:
        """Steps later than `after`, in order, committed or only logged so far; [] for an unknown
        run. A metric that is not a number is NaN."""
        ...

    async def counts(self, run: str) -> Counts:
        """What a run ever had, in one row read; zeros for an unknown run. Groups are those of
        training rollouts only; settled: terminal and not yet trained. Late transitions are not
        counted. A prune does not change it."""
        ...

    async def failures(self, run: str) -> list[FailureCount]:
        """What attempts failed of, by kind; those that are tried again included, save where a
        runner was lost or stopped. [] for an unknown run; a prune forgets what it removes."""
        ...

    async def policies(self, run: str) -> dict[str, PolicyVersion]:
        """What is served now, by name of the policy; what the present owner published last."""
        ...

    # -- change feed: followed by everybody --------------------------------------------------------
    async def cursor(self) -> int:
        """Number of the newest write. It only ever grows."""
        ...

    async def wait(self, cursor: int, *, timeout: float | None = None) -> int:
        """Returns the newest cursor as soon as it is larger than `cursor`, or at the timeout.
        Any cursor will do, however old: what it says is that something has changed since."""
        ...

    async def settled(self, group: str, *, timeout: float | None = None) -> bool:
        """Waits until every rollout of the group is terminal; False at the timeout.
        Raises NotFound for an unknown group."""
        ...

    # -- maintenance: called by who administers it -------------------------------------------------
    async def stats(self) -> Stats:
        """Rows of every table and bytes of the database; it counts, which takes a while."""
        ...

    async def prune(
        self,
        *,
        run: str | None = None,
        keep_last: int | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Remove the evidence of what no step will ever read again, of one run or of all.

        Goes: evaluation rollouts of earlier steps, and rollouts of trained groups, that belong
        neither to the last `keep_last` committed steps of their run nor to a group that ended
        less than `older_than` seconds ago, with their attempts, transitions, spans and rewards;
        and events as old. Stays, always: what is queued, running, not yet trained or asked for by
        the present step, and every run, step, metric, counter, policy and trained group.

        Rollouts go whole, a few in a transaction, so that other writers are not held up; cursors
        keep growing. A writer that comes with a pruned attempt meets NotFound. With `dry_run`
        nothing changes, and the answer is what a prune would remove. Raises Invalid if neither
        limit is given or one makes no sense; NotFound for an unknown run."""
        ...

    async def vacuum(self) -> None:
        """Give the space of what was removed back to the file system. Takes seconds per gigabyte
        and as much free disk as the store will have; writers wait, readers do not in SQLite. No
        lease is lost by it: whoever waited long lets all hold for a while."""
        ...
