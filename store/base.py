"""The store protocol. The store is the only truth; every other process may die at any moment.

Owns: runs, rollouts, attempts, transitions, spans, rewards, groups, steps, policy versions.
Always true:
  * A rollout has at most one live attempt: the one with the highest fence, while its lease holds.
  * A write that carries an old fence, or comes after its attempt ended, is kept for inspection
    (`late`) and never trained.
  * A group is trained by at most one step: `commit_step` marks groups, policy versions,
    checkpoint and metrics in one transaction, and only `rewind` takes a step back.
  * What was claimed and not committed is given out again.
Who may call: each section says whose verbs it has; everybody may read. Over HTTP a `runner` key may
call the verbs of runners and gateways (not `enqueue` and `cancel`) and others that these
need: `run`, `steps`, `trace`, `policies`, `cursor`, `wait`, `judgement` and `add_judgements`; a
`reader` key may call all verbs that only read. The others need an `admin` key. A store that was
opened with `readonly=True` answers the verbs of a reader.
Repeats: every verb is idempotent. The caller chooses the ids, and a repeat changes nothing; the
exceptions are named below. A caller that is not sure whether a call arrived calls again.
A verb returns after its transaction committed. When it raises, nothing of the call was kept:
  * Invalid: the arguments can never be stored or make no sense. Do not repeat the call.
  * NotFound: the store does not have a run, group or attempt that the call names.
  * Conflict: the present state forbids it. Its subclass Fenced means that another process took
    over: stop.
  * Forbidden: the store was opened for reading only; over HTTP also: the key is missing, unknown
    or of too small a scope.
  * Unavailable: the store cannot be reached, read or written now. Any verb may raise the last two.
All times are unix seconds of the store's clock, all timeouts seconds of real time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from agentrl import types
from agentrl.datasets.records import Dataset, Item, Judgement, Side
from agentrl.prompts import Candidate, Reflection
from agentrl.store import pages


class Store(Protocol):
    url: str

    async def close(self) -> None:
        """Returns when everything posted is committed. A closed store raises StoreError; closing
        it again does nothing."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...

    # -- runs: called by the algorithm -------------------------------------------------------------
    async def open_run(self, run: str, config: dict[str, types.Json]) -> types.RunState:
        """Create a run, or take it over: its epoch grows by one, which fences every earlier owner;
        groups that were claimed but never committed are ready again; published policy versions are
        forgotten; `config` replaces the earlier one. Before this, writes to the run raise NotFound.

        A repeat is another takeover: call it once per life of the algorithm. Raises Invalid for
        a config that is not JSON."""

    async def commit_step(self, commit: types.StepCommit) -> None:
        """Record one training step: all of it or, when this raises, nothing.

        `groups` are trained by it; `discarded` ones are not and never will be. A repeat of the same
        commit does nothing, even after a prune. Raises Fenced if `commit.epoch` is old; Conflict if
        the step is not the next one, or a group was not claimed by this epoch or is already
        trained or discarded; NotFound for an unknown run or group, for credit of a transition and
        for a reward of a rollout outside `groups`. Rewards are added to those of their rollouts."""

    async def rewind(self, run: str, epoch: int, step: int, checkpoint: str | None) -> None:
        """Take back the committed steps from `step` on: the run then has `step` steps and this
        `checkpoint` (None: it starts afresh).

        All of it or nothing. Groups of these steps, discarded ones too, can be claimed again, or
        enqueued again where their rollouts were pruned; credit, rewards and metrics of the steps
        and evaluations of later steps are removed; rollouts and what runners recorded stay. A
        repeat does nothing. Raises Fenced if `epoch` is old; Conflict if the run has fewer steps;
        NotFound for an unknown run; Invalid for a negative step."""

    async def claim_groups(
        self, run: str, epoch: int, n: int, *, ordered: bool = False, timeout: float | None = None
    ) -> list[types.Group]:
        """The first `n` settled, untrained training groups of the run, by id, with rollouts,
        rewards and the transitions of each rollout's last attempt. Settled: every rollout is
        terminal, failures included. Waits until `n` are settled, `ordered`: until the first `n` of
        all untrained groups are; returns fewer only when `timeout` seconds have passed. A repeat
        returns first what this epoch claimed and has not committed. Raises Fenced, also while it
        waits, if `epoch` is old; NotFound for an unknown run; Invalid unless `n` > 0."""

    async def publish(self, version: types.PolicyVersion, *, epoch: int | None = None) -> None:
        """Record where a policy version is served; gateways send the calls there.

        The last writer wins. With `epoch`, raises Fenced unless it is the present one; NotFound
        for an unknown run. `open_run` forgets what was published before it."""

    async def log(
        self, run: str, step: int, metrics: dict[str, float], *, epoch: int | None = None
    ) -> None:
        """Merge metrics into a step, committed or not; a metric of the same name is overwritten.
        `epoch` and errors as in `publish`."""

    # -- queue: called by runners; enqueue and cancel by the algorithm -----------------------------
    async def enqueue(self, rollouts: Sequence[types.NewRollout]) -> int:
        """Add rollouts; ids already present are ignored. Returns how many were new.

        A group has one run, one purpose and one candidate. It settles once all rollouts enqueued
        so far are terminal, so enqueue them in one call. Raises NotFound for an unknown run or
        candidate; Conflict for new rollouts of a claimed group and for a group of another run or
        purpose; Invalid for a rollout that cannot be run. All rollouts are added, or none."""

    async def claim(
        self,
        n: int,
        *,
        runner: str,
        lease: float,
        run: str | None = None,
        claim_id: str | None = None,
        timeout: float = 0.0,
    ) -> list[types.Attempt]:
        """Lease up to `n` rollouts for `lease` seconds, highest priority then oldest first.

        Waits up to `timeout` seconds for the first. Expired leases become new attempts here: up to
        `max_attempts` for a rollout that was the only one of its runner; rollouts that were lost
        together are not charged a try, and a runner gets fewer of them at a time. A repeat with the
        same `claim_id` returns at once those of the same attempts that are still live, and claims
        no more; without a `claim_id`, a repeat claims more. Raises Invalid unless `n` and `lease`
        are positive, for a lease of more than an hour, and for an empty `claim_id`."""

    async def heartbeat(self, attempts: Sequence[str], *, lease: float) -> list[str]:
        """Extend leases; returns the attempts that are still live. Stop the others: their lease
        ran out, they ended, or they are unknown. A lease is never shortened. Adds no event to the
        feed. Raises Invalid unless `lease` > 0."""

    async def finish(self, outcomes: Sequence[types.Outcome]) -> list[bool]:
        """End attempts, each with its rewards and spans in the same transaction. An outcome with
        `ran` ends only the agent's part: the attempt stays live, and whoever gets the rollout next,
        should this runner die or stop, claims an attempt with that `ran` and the trace of this one.

        False where the attempt was no longer live; its rows are then kept as late. A repeat of
        an accepted outcome is True. With `retry`, the rollout is queued again while it has
        attempts left; if a runner gave it back because it stops (`lost_runner`), this does not
        count as an attempt. Raises NotFound for an unknown attempt; Invalid for a reward that is
        not finite, has no target where its scope needs one, or is about a transition that the
        attempt does not have, and for a span of another attempt."""

    async def cancel(self, rollouts: Sequence[str]) -> int:
        """Cancel rollouts that are not terminal; returns how many were. Their runners learn it
        from the next heartbeat. Unknown ids are no error. Called by the algorithm."""

    # -- traces: called by runner and gateway ----------------------------------------------------
    async def add_transitions(self, transitions: Sequence[types.Transition]) -> list[bool]:
        """Store model calls as tree nodes; False where the attempt was no longer live.

        A repeat, recognised by the transition's id, returns the same as the first time. Raises
        NotFound for an unknown attempt; Invalid for log-probs that are not finite, for an exact
        call with fewer or more log-probs than tokens, and for arrays of another type; Conflict for
        an id that another attempt has. A gateway answers its agent after this returned."""

    async def add_spans(self, spans: Sequence[types.Span]) -> None:
        """Store spans of attempts, late ones too. The first span of an id stays. Raises NotFound
        for an unknown attempt."""

    # -- feedback: called by the gateway of a deployed agent, and whoever has some -----------------
    async def add_rewards(self, rewards: Sequence[types.StepReward]) -> None:
        """Add rewards to rollouts that were claimed, also long after they ended. One of the same
        scope, target, name and source as an earlier one takes its place. Raises NotFound for a
        rollout that is unknown or was never claimed; Invalid as in `finish`."""

    # -- reading: called by everybody --------------------------------------------------------------
    async def run(self, run: str) -> types.RunState | None:
        """The state of a run, without taking it over; None if it was never opened."""

    async def runs(self) -> list[str]:
        """Names, oldest first."""

    async def rollouts(
        self,
        run: str,
        *,
        purpose: types.Purpose | None = None,
        step: int | None = None,
        group: str | None = None,
        state: types.RolloutState | None = None,
        trained: int | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[types.Rollout]:
        """Rollouts with their rewards, without transitions, in order of group and index; [] for an
        unknown run. `step` is the one that asked for them, `trained` the one that trained them.
        At most `limit`, from the first one behind the rollout `after`. Raises Invalid for a
        negative limit; NotFound if there is no rollout `after`."""

    async def groups(
        self,
        run: str,
        *,
        purpose: types.Purpose | None = None,
        step: int | None = None,
        trained: int | None = None,
        state: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> list[pages.GroupRow]:
        """Up to `limit` groups, the last id first, with the outcomes of their rollouts; [] for an
        unknown run. `step` is the one that asked for them, `trained` the one that trained or
        discarded them. `before` is the id of the last group of the page before. Raises Invalid
        unless `limit` > 0."""

    async def search(
        self,
        run: str,
        *,
        rewards: Mapping[str, tuple[float | None, float | None]] | None = None,
        state: types.RolloutState | None = None,
        error: types.ErrorKind | None = None,
        purpose: types.Purpose | None = None,
        role: str | None = None,
        policy: str | None = None,
        version: int | None = None,
        steps: tuple[int | None, int | None] | None = None,
        text: str | None = None,
        before: str | None = None,
        limit: int = 50,
        budget: float = 0.3,
    ) -> pages.Found:
        """Up to `limit` rollouts for which all that is given holds, the newest step first.

        `rewards`: by name the lowest and highest value of one of its rewards, of any scope; None:
        no bound. `role`, `policy`, `version`: those of one of its calls. `steps`: the first and the
        last step that asked for them. `text`: part of a message, of an answer or of the failure's
        message, as it is written there. A search that has not filled its page after about `budget`
        seconds ends with what it has; `before` is the `cursor` from which it goes on. Raises
        Invalid unless `limit` > 0 and 0 < `budget` <= 10, and for a `before` that is no cursor."""

    async def trace(self, rollout: str) -> types.Trace | None:
        """The last attempt of a rollout with its transitions, rewards and spans (spans that came
        late too, transitions and rewards not). None while it has no attempt."""

    async def attempts(self, rollout: str) -> list[pages.AttemptRow]:
        """All tries at a rollout, the first first, also with what came late; [] if there is no such
        rollout or nobody claimed it."""

    async def credits(self, rollout: str) -> list[types.Credit]:
        """The credit that the step which trained a rollout gave its calls, in their order; [] if no
        step trained it or stored any, or the rollout is pruned."""

    async def steps(
        self, run: str, *, after: int = -1, limit: int | None = None
    ) -> list[types.StepRow]:
        """Steps later than `after`, in order, committed or only logged so far, at most `limit`; []
        for an unknown run. A metric that is not a number is NaN. Raises Invalid for a negative
        limit."""

    async def metric_names(self, run: str) -> list[str]:
        """Names of all metrics that a step of the run has, in order."""

    async def series(
        self, run: str, names: Sequence[str], after: int = -1, points: int = 400
    ) -> dict[str, list[tuple[int, float]]]:
        """Curves of metrics: of each the steps later than `after` with their values, NaN where it
        is not a number; [] for an unknown name. Where there are more than `points` steps, the first
        that has a value of every so many, and the last. Raises Invalid unless `points` > 1."""

    async def counts(self, run: str) -> types.Counts:
        """What a run ever had, read from one row; zeros for an unknown run. Only groups of training
        rollouts count; settled means terminal and not yet trained. Late transitions do not count. A
        prune does not change it."""

    async def failures(self, run: str) -> list[types.FailureCount]:
        """Failed attempts by kind, those that are tried again included, except where a runner was
        lost or stopped. [] for an unknown run. Pruned attempts are not counted."""

    async def policies(self, run: str) -> dict[str, types.PolicyVersion]:
        """By policy, the version served now: the last that the present owner published."""

    # -- data sets: called by whoever makes or trains on them, judgements by judges ----------------
    async def draft_dataset(self, name: str, spec: dict[str, types.Json]) -> int:
        """The version to add items to: the next, or an unfinished one, emptied for a new `spec`."""

    async def add_items(
        self, name: str, version: int, items: Sequence[Item], sides: Sequence[Side]
    ) -> None:
        """Add items and sides; those that are there stay, but a reference becomes a copy once its
        calls are given. Raises NotFound for an unknown version, Conflict for a complete one."""

    async def commit_dataset(self, name: str, version: int) -> Dataset:
        """Complete a version. Its digest is that of the content and order of its items. Raises
        NotFound for an unknown version, and for an item with a side that was never added."""

    async def datasets(self, name: str | None = None) -> list[Dataset]:
        """Versions of one data set or of all, in order, unfinished ones too."""

    async def items(
        self,
        name: str,
        version: int,
        *,
        split: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> list[Item]:
        """Items behind the position `after`, in order, at most `limit`; NotFound as above."""

    async def sides(self, digests: Sequence[str]) -> dict[str, list[types.Transition]]:
        """The calls of sides by digest; unknown ones, and those of unknown rollouts, are left
        out."""

    async def calls(self, rollouts: Sequence[str]) -> dict[str, list[types.Transition]]:
        """The calls of the last attempt of each rollout that has one."""

    async def add_judgements(self, judgements: Sequence[Judgement]) -> None:
        """Store what judges said; the first judgement of an id stays."""

    async def judgement(self, id: str) -> Judgement | None:
        """The answer to a question that was asked before."""

    async def add_logprobs(self, model: str, logprobs: dict[str, types.Float32]) -> None:
        """Keep log-probs of sides; `model` is a digest of its weights."""

    async def logprobs(self, model: str, sides: Sequence[str]) -> dict[str, types.Float32]:
        """Those that are known, by side."""

    # -- prompt searches: called by the algorithm; everybody may read ----------------------------
    async def put_candidates(self, candidates: Sequence[Candidate]) -> None:
        """Add candidates of prompt searches; of a known one only the state changes. Raises
        NotFound for an unknown run."""

    async def add_reflection(self, reflection: Reflection) -> None:
        """Add a call to a reflector; the first of an id stays. Raises NotFound for an unknown
        run."""

    async def candidates(self, run: str) -> list[Candidate]:
        """Candidates in the order of their first `put_candidates`; [] for an unknown run."""

    async def reflections(self, run: str) -> list[Reflection]:
        """Calls to the reflector, the first first; [] for an unknown run."""

    # -- change feed: followed by everybody --------------------------------------------------------
    async def cursor(self) -> int:
        """Number of the newest write. It only ever grows."""

    async def wait(self, cursor: int, *, timeout: float | None = None) -> int:
        """Returns the newest cursor as soon as it is larger than `cursor`, or at the timeout.
        `cursor` may be as old as you like: the answer means that something has changed since."""

    async def settled(self, group: str, *, timeout: float | None = None) -> bool:
        """Waits until every rollout of the group is terminal; False at the timeout.
        Raises NotFound for an unknown group."""

    # -- maintenance: called by an administrator ---------------------------------------------------
    async def stats(self) -> pages.Stats:
        """Rows of every table and bytes of the database. It counts rows, which takes a while."""

    async def prune(
        self,
        *,
        run: str | None = None,
        keep_last: int | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
    ) -> pages.Pruned:
        """Remove rollouts and events that no step will ever read again, of one run or of all.

        Removed: evaluation rollouts of earlier steps, and rollouts of trained groups, that belong
        neither to the last `keep_last` committed steps of their run nor to a group that ended
        less than `older_than` seconds ago, with their attempts, transitions, spans and rewards;
        and events as old. Always kept: rollouts that are queued, running, not yet trained, in a
        data set or asked for by the present step; runs, steps, metrics, counters, policies, groups.

        Rollouts are removed whole, a few in a transaction, so that other writers are not held up;
        cursors keep growing. A later write of a pruned attempt raises NotFound. With `dry_run`
        nothing changes, and the answer is what a prune would remove. Raises Invalid if neither
        limit is given or one makes no sense; NotFound for an unknown run."""

    async def vacuum(self) -> None:
        """Give the space of removed rows back to the file system. Takes seconds per gigabyte
        and as much free disk as the store will have. Writers wait; readers do not, in SQLite.
        Afterwards every lease holds for a few seconds more, so none is lost by the wait."""
