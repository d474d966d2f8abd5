"""The store protocol. The store holds all state; every other process may die at any moment.

Owns: runs, rollouts, attempts, calls, spans, rewards, groups, steps, policy versions.
Invariants:
  * A rollout has at most one live attempt: the one with the highest fence, while its lease holds.
  * A write with an old fence, or after its attempt has ended, is stored as `late` for inspection
    and never trained.
  * A group is trained by at most one step: `commit_step` marks groups, policy versions,
    checkpoint and metrics in one transaction, and only `rewind` undoes a step.
  * Claims that were never committed are handed out again.
Permissions: each section names its callers; everybody may read. Over HTTP a `runner` key may call
the verbs of runners and gateways (except `enqueue` and `cancel`) and others that they need: `run`,
`steps`, `trace`, `policies`, `cursor`, `wait`, `judgement`, `add_judgements`, `put_images`; a
`reader` key all verbs that only read; the rest needs an `admin` key. With `readonly=True` a store
has a reader's permissions. Idempotence: the caller chooses the ids, and a repeated call has no
effect; exceptions are named below. After Unavailable or a cancellation it is unknown whether a verb
was executed: repeat it. A verb returns after its transaction has been committed. If it raises any
other error than Unavailable, nothing was stored:
  * Invalid: the arguments are invalid or cannot be stored. Do not repeat the call.
  * NotFound: the call names an unknown run, group, attempt or image.
  * Conflict: the current state does not allow it. The subclass Fenced means that another process
    has taken over: stop.
  * Forbidden: the store was opened read-only; over HTTP also: the key is missing, unknown or of
    insufficient scope.
  * Unavailable: the store cannot be reached, read or written now. Usually nothing was stored; but a
    connection may break after the commit. Any verb may raise the last two.
All times are unix seconds of the store's clock, all timeouts seconds of real time.

`keep_reading` repeats a read whenever the store changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn, Protocol, Self

from agentrl.core import types
from agentrl.core.errors import StoreError
from agentrl.store import records


class Store(Protocol):
    url: str

    async def close(self) -> None:
        """Commit all posted writes and close. A closed store raises StoreError; closing it again
        has no effect."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...

    # -- runs: called by the algorithm -------------------------------------------------------------
    async def open_run(
        self,
        run: str,
        config: dict[str, types.Json],
        *,
        owner: str = "",
        lease: float = 0.0,
        gone: str = "",
    ) -> types.RunState:
        """Create a run, or take it over: increments its epoch, which fences every earlier owner;
        releases groups that were claimed but not committed; deletes published policy versions;
        replaces `config`. Before this, writes to the run raise NotFound.

        owner: text by which its processes hold the run for `lease` seconds; others then get
        Conflict, unless they name that owner as `gone` or have no owner themselves. Not idempotent:
        a repeat is another takeover. Raises Invalid if `config` is not JSON."""

    async def hold_run(self, run: str, owner: str, *, lease: float) -> bool:
        """Extend an owner's lease on its run; 0 ends it. False if the run has another owner. Adds
        no event to the feed."""

    async def commit_step(self, commit: types.StepCommit) -> None:
        """Record one training step atomically.

        It trains `groups`; `discarded` groups will never be trained. Rewards are added to those of
        their rollouts. A repeat of the same commit has no effect, even after a prune. Raises Fenced
        if `commit.epoch` is old; Conflict if the step is not the next one, or a group was not
        claimed by this epoch or is already trained or discarded; NotFound for an unknown run or
        group, and for credit of a call or a reward of a rollout outside `groups`."""

    async def rewind(self, run: str, epoch: int, step: int, checkpoint: str | None) -> None:
        """Undo the committed steps from `step` on: the run then has `step` steps and this
        `checkpoint` (None: it starts from scratch).

        Atomic. Groups of these steps, discarded ones too, can be claimed again, or enqueued again
        if their rollouts were pruned. Credit, rewards and metrics of the steps and evaluations of
        later steps are removed; rollouts and runners' records stay. A repeat has no effect. Raises
        Fenced if `epoch` is old; Conflict if the run has fewer steps; NotFound for an unknown run;
        Invalid for a negative step."""

    async def claim_groups(
        self, run: str, epoch: int, n: int, *, ordered: bool = False,
        groups: Sequence[str] | None = None, timeout: float | None = None,
    ) -> list[types.Group]:  # fmt: skip
        """Claim the first `n` settled, untrained training groups of the run, by id, with rollouts,
        rewards and the calls of each rollout's last attempt. Settled: every rollout has
        succeeded, failed or been cancelled. Waits until `n` groups are settled, with `ordered`
        until the first `n` untrained ones are; returns fewer only after `timeout` seconds. A repeat
        first returns groups that this epoch has claimed and not committed. `groups`: only these.
        Raises Fenced, also while waiting, if `epoch` is old; NotFound for an unknown run; Invalid
        unless `n` > 0, and for `ordered` with `groups`."""

    async def publish(self, version: types.PolicyVersion, *, epoch: int | None = None) -> None:
        """Record the server of a policy version, to which gateways then send calls.

        The last writer wins; `open_run` deletes earlier publications. With `epoch`, raises Fenced
        unless it is the current one; NotFound for an unknown run."""

    async def log(
        self, run: str, step: int, metrics: dict[str, float], *, epoch: int | None = None
    ) -> None:
        """Merge metrics into a step, committed or not; overwrites metrics with the same name.
        `epoch` and errors as in `publish`."""

    # -- queue: called by runners; enqueue and cancel by the algorithm -----------------------------
    async def enqueue(
        self, rollouts: Sequence[types.NewRollout], *, epoch: int | None = None
    ) -> int:
        """Add rollouts and return the number of new ones; existing ids are ignored. Atomic. With
        `epoch`, raises Fenced unless it is the current one of their runs.

        A group has one run, one purpose and one candidate. It settles once all rollouts enqueued
        so far are terminal, so enqueue them in one call. Raises NotFound for an unknown run or
        candidate; Conflict for new rollouts of a claimed group and for a group of another run or
        purpose; Invalid for a rollout that cannot be run."""

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

        Waits up to `timeout` seconds for the first. Rollouts with an expired lease are handed out
        as new attempts, up to `max_attempts` if the rollout was alone in its runner; rollouts that
        were lost together are not charged an attempt, and a runner gets fewer of them at a time. A
        repeat with the same `claim_id` returns at once the attempts of that claim that are still
        live; without a `claim_id`, a repeat claims more. Raises Invalid unless `n` and `lease` are
        positive, for a lease of more than an hour, and for an empty `claim_id`."""

    async def heartbeat(self, attempts: Sequence[str], *, lease: float) -> list[str]:
        """Extend leases and return the attempts that are still live. Stop the others: their lease
        has expired, they have ended, or they are unknown. A lease is never shortened. Adds no event
        to the feed. Raises Invalid unless `lease` > 0."""

    async def finish(self, outcomes: Sequence[types.Outcome]) -> list[bool]:
        """End attempts, each with its rewards and spans in the same transaction. An outcome with
        `ran` ends only the agent's part: the attempt stays live, and if this runner dies or stops,
        or if it then ends with a failure of the verifier and is retried,
        the rollout's next attempt has this `ran` and the trace of this attempt.

        Returns False for an attempt that was no longer live; its rows are then stored as late. A
        repeat of an accepted outcome returns True. With `retry`, the rollout is queued again while
        it has attempts left; if a stopping runner returns it (`lost_runner`), this does not count
        as an attempt. Raises NotFound for an unknown attempt; Invalid for a reward that is not
        finite, lacks the target that its scope needs, or targets a call that the attempt does
        not have, and for a span of another attempt."""

    async def cancel(self, rollouts: Sequence[str]) -> int:
        """Cancel rollouts that are not terminal and return their number. Their runners find out at
        the next heartbeat. Unknown ids are ignored. Called by the algorithm."""

    # -- traces: called by runner and gateway ----------------------------------------------------
    async def add_transitions(self, transitions: Sequence[types.Transition]) -> list[bool]:
        """Store model calls as tree nodes; returns False for an attempt that was no longer live.

        A repeat, identified by the call's id, returns the first result. Raises NotFound for
        an unknown attempt, and for an image that was not put or has been pruned since; Invalid for
        log-probs that are not finite, for an exact call with fewer or more log-probs than tokens,
        and for arrays of another type; Conflict for the id of another attempt's call. A gateway
        answers its agent after this has returned."""

    async def add_spans(self, spans: Sequence[types.Span]) -> None:
        """Store spans of attempts, late ones, too; if an id exists, the first span is kept. Raises
        NotFound for an unknown attempt."""

    # -- images: put by the gateway, read by the algorithm ----------------------------------------
    async def put_images(self, run: str, images: Sequence[types.Image]) -> None:
        """Store images, each once, before the calls that refer to them; for a data set without run.

        An image is kept as long as a call or a data set refers to it. A prune removes unreferenced
        images an hour after they were last stored. Raises NotFound for an unknown run; Invalid for
        a digest that is not the body's."""

    async def images(self, run: str, digests: Sequence[str]) -> dict[str, types.Image]:
        """Map digests to images of any run; omits images that are not stored."""

    # -- feedback: called by the gateway of a deployed agent and by other sources of feedback ------
    async def add_rewards(self, rewards: Sequence[types.StepReward]) -> None:
        """Add rewards to claimed rollouts, also long after their end. A reward replaces an earlier
        one with the same scope, target, name and source. Raises NotFound for a rollout that is
        unknown or was never claimed; Invalid as in `finish`."""

    # -- reading: called by everybody --------------------------------------------------------------
    async def run(self, run: str) -> types.RunState | None:
        """Return the state of a run, without taking it over; None if it was never opened."""

    async def runs(self) -> list[str]:
        """List the names of all runs, oldest first."""

    async def rollouts(
        self, run: str, *, purpose: types.Purpose | None = None, step: int | None = None,
        group: str | None = None, state: types.RolloutState | None = None,
        trained: int | None = None, group_state: str | None = None, after: str | None = None,
        limit: int | None = None,
    ) -> list[types.Rollout]:  # fmt: skip
        """List rollouts with their rewards, without calls, in order of group and index; [] for an
        unknown run. `step`: that requested them; `trained`: that trained them; `group_state`: as in
        `groups`. At most `limit`, starting after the rollout `after`. Raises Invalid for a negative
        limit; NotFound if the rollout `after` does not exist."""

    async def groups(
        self, run: str, *, purpose: types.Purpose | None = None, step: int | None = None,
        trained: int | None = None, state: str | None = None, before: str | None = None,
        limit: int = 50,
    ) -> list[records.GroupRow]:  # fmt: skip
        """List up to `limit` groups with the outcomes of their rollouts, in descending order of id;
        [] for an unknown run. `step`: the step that requested them; `trained`: the step that
        trained or discarded them; `before`: id of the previous page's last group. Raises Invalid
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
        images: bool = False,
        before: str | None = None,
        limit: int = 50,
        budget: float = 0.3,
    ) -> records.Found:
        """Find up to `limit` rollouts that meet all conditions, newest step first.

        `rewards`: name -> (minimum, maximum) of one of the rollout's rewards, of any scope; None:
        no bound. `role`, `policy`, `version`, `images` (that it has some): of one of its calls.
        `steps`: first and last step that requested it. `text`: substring of a message, an answer or
        the failure's message, case sensitive. A search that has not filled its page after about
        `budget` seconds returns a partial page; pass its `cursor` as `before` to continue. Raises
        Invalid unless `limit` > 0 and 0 < `budget` <= 10, and for an invalid `before`."""

    async def trace(
        self, rollout: str, *, first: int = 0, limit: int | None = None
    ) -> types.Trace | None:
        """Return the last attempt of a rollout with its calls, rewards and spans (late spans
        too, but no late calls or rewards). None if it has no attempt. Every call has its whole
        conversation, so readers of long rollouts ask for at most `limit` calls, from the one at
        position `first`. Raises Invalid for a negative number."""

    async def outline(self, rollout: str) -> list[records.CallRow]:
        """List the calls of `trace` without texts and tokens, in order; [] if the rollout has no
        attempt."""

    async def attempts(self, rollout: str, *, limit: int | None = None) -> list[records.AttemptRow]:
        """List all attempts of a rollout in order, with late rows; [] if the rollout is unknown or
        was never claimed. Each has at most `limit` of its calls and of its late calls. Raises
        Invalid for a negative limit."""

    async def credits(self, rollout: str) -> list[types.Credit]:
        """List the credit of a rollout's calls from the step that trained it, in order of calls; []
        if no step trained it or stored credit, or the rollout is pruned."""

    async def steps(
        self, run: str, *, after: int = -1, limit: int | None = None
    ) -> list[types.StepRow]:
        """List at most `limit` steps later than `after`, in order, committed or only logged; [] for
        an unknown run. Metrics may be NaN. Raises Invalid for a negative limit."""

    async def metric_names(self, run: str) -> list[str]:
        """List the names of all metrics of the run, sorted."""

    async def series(
        self, run: str, names: Sequence[str], after: int = -1, points: int = 400
    ) -> dict[str, list[tuple[int, float]]]:
        """Return curves of metrics: name -> (step, value) of steps later than `after`; values may
        be NaN; [] for an unknown name. More than `points` steps are sampled at a regular stride,
        always with the last one. Raises Invalid unless `points` > 1."""

    async def counts(self, run: str) -> types.Counts:
        """Return a run's counters, read from one row; zeros for an unknown run. Groups of training
        rollouts only; settled means terminal and not yet trained. Late calls are not counted;
        pruned rows are."""

    async def failures(self, run: str) -> list[types.FailureCount]:
        """Count failed attempts by kind, including retried ones, except those of lost or stopped
        runners; [] for an unknown run. Pruned attempts are not counted."""

    async def policies(self, run: str) -> dict[str, types.PolicyVersion]:
        """Map each policy to the version served now: the current owner's last publication."""

    # -- data sets: called by their creators and by training, judgements by judges -----------------
    async def draft_dataset(self, name: str, spec: dict[str, types.Json]) -> int:
        """Return the version to add items to: an unfinished one, emptied if `spec` differs, or a
        new one."""

    async def add_items(
        self, name: str, version: int, items: Sequence[records.Item], sides: Sequence[records.Side]
    ) -> None:
        """Add items and sides; existing ones are kept, except that a reference becomes a copy if
        its calls are given. Raises NotFound for an unknown version, Conflict for a complete one."""

    async def commit_dataset(self, name: str, version: int) -> records.Dataset:
        """Complete a version; its digest covers the content and order of its items. Raises NotFound
        for an unknown version, and for an item with a side that was never added."""

    async def datasets(self, name: str | None = None) -> list[records.Dataset]:
        """List the versions of one data set or of all, in order, unfinished ones too."""

    async def items(
        self,
        name: str,
        version: int,
        *,
        split: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> list[records.Item]:
        """List at most `limit` items after the position `after`, in order; NotFound as above."""

    async def sides(self, digests: Sequence[str]) -> dict[str, list[types.Transition]]:
        """Map digests of sides to their calls; omits unknown sides and those of unknown
        rollouts."""

    async def calls(self, rollouts: Sequence[str]) -> dict[str, list[types.Transition]]:
        """Map rollouts to the calls of their last attempt; omits rollouts without attempt."""

    async def add_judgements(self, judgements: Sequence[records.Judgement]) -> None:
        """Store judgements; if an id exists, the first judgement is kept."""

    async def judgement(self, id: str) -> records.Judgement | None:
        """Return a stored judgement, None if there is none."""

    async def add_logprobs(self, model: str, logprobs: dict[str, types.Float32]) -> None:
        """Cache log-probs of sides; `model`: digest of its weights."""

    async def logprobs(self, model: str, sides: Sequence[str]) -> dict[str, types.Float32]:
        """Return cached log-probs by side."""

    # -- documents: called by the algorithm ------------------------------------------------------
    async def put_documents(
        self, run: str, kind: str, documents: dict[str, types.Json], *, replace: bool = False
    ) -> None:
        """Add JSON documents to a run, by key; existing ones stay as they are,
        unless `replace`. Raises NotFound for an unknown run, Invalid for values that are not
        JSON."""

    async def documents(self, run: str, kind: str, *, after: str = "") -> dict[str, types.Json]:
        """Map keys to the documents of this kind, in the order of their addition; {} for an unknown
        run. after: only those with larger keys."""

    # -- change feed: followed by everybody --------------------------------------------------------
    async def cursor(self) -> int:
        """Return the number of the newest write, which only grows."""

    async def wait(self, cursor: int, *, timeout: float | None = None) -> int:
        """Return the newest cursor as soon as it is larger than `cursor`, or at the timeout. A
        larger cursor means that something has changed; `cursor` may be arbitrarily old."""

    async def settled(self, group: str, *, timeout: float | None = None) -> bool:
        """Wait until every rollout of the group is terminal; returns False at the timeout. Raises
        NotFound for an unknown group."""

    # -- maintenance: called by an administrator ---------------------------------------------------
    async def stats(self) -> records.Stats:
        """Count the rows of every table and the bytes of the database. Slow on large stores."""

    async def prune(
        self,
        *,
        run: str | None = None,
        keep_last: int | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
        after: int | None = None,
        seconds: float | None = None,
    ) -> records.Pruned:
        """Remove rollouts and events that no step will read again, of one run or of all.

        Removes evaluation rollouts of earlier steps and rollouts of trained groups, with attempts,
        calls, spans, rewards and images, unless they belong to the last `keep_last` committed steps
        of their run or to a group that ended less than `older_than` seconds ago; and events of the
        same age. Always keeps rollouts that are queued, running, not yet trained, in a data set or
        requested by the current step; runs, steps, metrics, counters, policies and groups.

        Removes a few complete rollouts per transaction, so other writers do not wait long; cursors
        keep growing. Later writes to a pruned attempt raise NotFound. `dry_run` changes nothing and
        returns what would be removed. With `seconds` it stops after about this time; pass `after`
        of the result to the next call to continue. Raises Invalid if neither limit is given or one
        is invalid; NotFound for an unknown run."""

    async def forget(self, rollouts: Sequence[str], *, dry_run: bool = False) -> records.Forgotten:
        """Delete rollouts and their branches, trained or not, with calls, rewards, judgements and
        items of data sets, which get a new digest; unknown ids are ignored. Atomic. `left`:
        rollouts that are queued, running or claimed by a step, which are not deleted: cancel them,
        or repeat this after the step. `vacuum` makes deleted data unreadable; `dry_run` as in
        `prune`."""

    async def vacuum(self) -> None:
        """Return the space of removed rows to the file system. Takes seconds per gigabyte, and free
        disk space for a second copy. Writers wait; readers do not, in SQLite. Extends every lease
        by a few seconds afterwards, so that none is lost by the wait."""


log = logging.getLogger("agentrl.store")
MAX_PAUSE = 2.0  # seconds between two tries while the store is unavailable


async def keep_reading(
    store: Store,
    read: Callable[[], Awaitable[None]],
    missed: str,
    *,
    pause: float,
    timeout: float | None = None,
) -> NoReturn:
    """Call `read` now, after every change of the store, and every `timeout` seconds, with at least
    `pause` seconds between calls. If the store is unavailable, `missed` (what does not happen
    meanwhile) is printed once, and `read` is retried after growing pauses."""
    cursor, waits = 0, pause
    while True:
        try:
            cursor = await store.wait(cursor, timeout=timeout)
            await read()
        except StoreError as error:
            if waits == pause:
                log.warning("%s: %s; tried again", missed, error)
            cursor, waits = 0, max(pause, min(2 * waits, MAX_PAUSE))
        else:
            waits = pause
        await asyncio.sleep(waits)
