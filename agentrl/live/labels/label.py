"""Labels ended sessions: their signals, and the outcome that follows from them.

Always true: a label is computed from the stored session, and written at once with its mark; so a
killed watch loses nothing and asks at most again. Feedback that arrives before a session is trained
rewrites its label; later it is stored as ever, and the label stays.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import fmean

import msgspec
from msgspec.structs import replace

from agentrl.config import RunConfig
from agentrl.errors import NotFound, StoreError
from agentrl.live.labels import weighing
from agentrl.live.labels.asking import Asker
from agentrl.live.labels.signals import NEXT_MESSAGE, digest_of_session, posted, replies
from agentrl.live.records import people
from agentrl.live.records.marks import (
    MARK,
    OUTCOME,
    SIGNAL,
    SOURCE,
    Mark,
    ended_of,
    mark_of,
    outcome_of,
    user_of,
)
from agentrl.live.records.sessions import ended, oldest_first
from agentrl.live.records.table import live_of
from agentrl.store.base import Store
from agentrl.types import Reward, Rollout, RolloutState, Scope, StepReward, Trace

log = logging.getLogger("agentrl.live")
Outliers = tuple[dict[str, str], dict[str, str]]  # `Ledger.contrary` and `Ledger.unlike`
AT_ONCE = 16  # sessions that are asked about at the same time
PAUSE = 0.2  # seconds between two looks, however much is written
POLL = 60.0  # seconds after which the store is looked at again


class Labeller:
    """Labels the sessions of a run. Call `start` once, then `look` whenever the store changed."""

    def __init__(
        self, store: Store, config: RunConfig, asker: Asker, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._run, self._asker, self._clock = store, config.name, asker, clock
        self._settings = live_of(config)
        self._weights = self._settings.signals.weight
        self._ledger = weighing.Ledger(self._settings.people.per_user, self._weights)
        self._asking: dict[str, asyncio.Task[None]] = {}  # by rollout
        self._admitting = asyncio.Lock()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._said: set[str] = set()

    async def start(self) -> None:
        """Read what is known of the sessions so far."""
        rows = [row async for row in people.all_sessions(self._store, self._run) if mark_of(row)]
        for row in oldest_first(rows):
            self._learn(row, mark_of(row) or Mark(ended=0.0, day=""))

    async def look(self) -> None:
        """Begin to label what has ended, and rewrite what got feedback."""
        sessions = await ended(self._store, self._run)
        known = [(row, self._with_posted(row, mark)) for row in sessions if (mark := mark_of(row))]
        for row, mark in known:
            self._learn(row, mark)
        outliers = self._outliers()
        for row, mark in known:
            await self._write(row, self._weighed(row, mark, outliers), {})
        for row in oldest_first(sessions):
            if mark_of(row) is None and row.id not in self._asking:
                self._asking[row.id] = asyncio.create_task(self._label(row))

    async def settle(self) -> None:
        """Wait until all that `look` has begun is written. Raises the first error."""
        tasks = [*self._asking.values()]
        self._asking.clear()
        await asyncio.gather(*tasks)

    def failed(self) -> None:
        """Forget what has been written; raises the first error."""
        for id, task in [*self._asking.items()]:
            if task.done():
                del self._asking[id]
                if not task.cancelled():  # with another that asked the same: it is asked again
                    task.result()

    async def _label(self, row: Rollout) -> None:
        async with self._slots:
            async with self._admitting:  # in the order in which they ended
                trace = await self._store.trace(row.id)
                if trace is None:  # deleted since
                    return
                mark = self._admitted(trace)
            judged: dict[str, float] = {}
            if not mark.held and row.state is RolloutState.SUCCEEDED and trace.transitions:
                mark, judged = await self._asked(mark, trace)
            mark = self._with_posted(trace.rollout, mark)
            self._learn(row, mark)
            await self._write(trace.rollout, self._weighed(row, mark, self._outliers()), judged)

    def _admitted(self, trace: Trace) -> Mark:
        """A mark that says whether the session counts."""
        row = trace.rollout
        day = datetime.fromtimestamp(ended_of(row), UTC).date().isoformat()
        digest = digest_of_session(trace.transitions)
        mark = Mark(ended=ended_of(row), day=day, digest=digest)
        return replace(mark, held=self._ledger.admit(row.id, user_of(row), mark))

    def _learn(self, row: Rollout, mark: Mark) -> None:
        self._ledger.admit(row.id, user_of(row), mark)
        self._ledger.learn(row.id, user_of(row), mark)

    async def _asked(self, mark: Mark, trace: Trace) -> tuple[Mark, dict[str, float]]:
        """The mark with the verifier's and the judge's signals, and those of calls."""
        after = replies(trace.transitions)
        signals, judged = await asyncio.gather(
            self._asker.verify(trace), self._asker.judge(after, trace.rollout.id)
        )
        if judged:
            signals = {**signals, NEXT_MESSAGE: fmean(judged.values())}
        return replace(mark, asked=signals, delays=self._delays(mark, signals)), judged

    def _with_posted(self, row: Rollout, mark: Mark) -> Mark:
        given = posted(row.rewards)
        for name in given.keys() - self._weights.keys() - self._said:
            self._said.add(name)
            log.warning(
                "feedback %r has no weight in live.signals.weights: it is kept, not learned from",
                name,
            )
        explicit = any(self._weights.get(name) for name in given)
        return replace(mark, posted=given, explicit=explicit, delays=self._delays(mark, given))

    def _delays(self, mark: Mark, signals: dict[str, float]) -> dict[str, float]:
        late = round(max(0.0, self._clock() - mark.ended), 1)
        return dict.fromkeys(signals, late) | mark.delays

    def _weighed(self, row: Rollout, mark: Mark, outliers: Outliers) -> Mark:
        """The mark with why the session, or what was posted, does not count."""
        user, (contrary, unlike) = user_of(row), outliers
        held = self._ledger.admit(row.id, user, mark)
        if not held and user in unlike and self._ledger.is_beyond(row.id, user, mark.day):
            held = weighing.UNLIKE
        ignored = weighing.CONTRARY if mark.posted and user in contrary else ""
        return replace(mark, held=held, ignored=ignored)

    def _outliers(self) -> Outliers:
        found = self._ledger.contrary(), self._ledger.unlike()
        for users, what in zip(found, ("votes", "most sessions"), strict=True):
            for user, why in users.items():
                if (about := f"{what} of user {user}") not in self._said:
                    self._said.add(about)
                    log.warning("%s are held back: %s", about, why)
        return found

    async def _write(self, row: Rollout, mark: Mark, judged: dict[str, float]) -> None:
        """Write a label unless it is written already."""
        outcome = weighing.weighted(mark.signals, self._weights)
        if math.isnan(outcome) and mark.ignored and _had_outcome(row):
            mark = replace(mark, held=mark.ignored)  # its reward cannot be taken away
        known = math.isnan(outcome) or outcome == outcome_of(row)
        if mark == mark_of(row) and (mark.held or known):
            return
        note = msgspec.json.encode(mark).decode()
        rewards = [Reward(name=MARK, value=1.0, source=SOURCE, note=note)]
        if not (math.isnan(outcome) or mark.held):
            rewards.append(Reward(name=OUTCOME, value=outcome, source=SOURCE))
        about = {"scope": Scope.TRANSITION, "source": SOURCE}
        rewards += [Reward(name=SIGNAL, value=v, target=c, **about) for c, v in judged.items()]  # type: ignore[arg-type]
        try:
            await self._store.add_rewards([StepReward(rollout=row.id, reward=r) for r in rewards])
        except NotFound:  # deleted since
            return


def _had_outcome(row: Rollout) -> bool:
    return any(r.source == SOURCE and r.name == OUTCOME for r in row.rewards)


async def run(store: Store, config: RunConfig) -> None:
    """Label sessions of the run as they end, until cancelled."""
    async with Asker(store, config) as asker:
        labeller, cursor, started = Labeller(store, config, asker), 0, False
        while True:
            try:
                cursor = await store.wait(cursor, timeout=POLL)
                if not started:
                    await labeller.start()
                    started = True
                await labeller.look()
                labeller.failed()
            except StoreError as error:
                log.warning("sessions are not labelled now: %s; tried again", error)
            await asyncio.sleep(PAUSE)
