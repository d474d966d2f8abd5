"""Labels ended sessions: their signals, and the outcome that follows from them.

Always true: a label is computed from the stored session, and written at once with its mark; so a
killed watch loses nothing and asks at most again. Feedback that arrives before a session is trained
rewrites its label; later it is stored as ever, and the label stays. A session that cannot be
labelled is held: it is never trained, and no other waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.base.loading import kind_of
from agentrl.config import RunConfig
from agentrl.errors import Invalid, NotFound, StoreError
from agentrl.live.labels import weighing
from agentrl.live.labels.asking import Asker
from agentrl.live.labels.signals import NEXT_MESSAGE, digest_of_session, posted, replies
from agentrl.live.labels.weighing import is_counted
from agentrl.live.records import people
from agentrl.live.records.marks import (
    MARK,
    OUTCOME,
    SOURCE,
    Mark,
    ended_of,
    mark_of,
    outcome_of,
    user_of,
)
from agentrl.live.records.sessions import ended, oldest_first
from agentrl.store.base import Store
from agentrl.store.following import keep_reading
from agentrl.types import SIGNAL, Reward, Rollout, RolloutState, Scope, StepReward, Trace

log = logging.getLogger("agentrl.live")
HELD = "it cannot be labelled: {}"
AT_ONCE = 16  # sessions that are asked about at the same time
PAUSE = 0.2  # seconds between two looks, however much is written
IDLENESS = 4.0  # pause per time of a look, so that many open sessions take a fifth of a core
POLL = 60.0  # seconds after which the store is looked at again


class Labeller:
    """Labels the sessions of a run. Call `start` once, then `look` whenever the store changed."""

    def __init__(
        self, store: Store, config: RunConfig, asker: Asker, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._run, self._asker, self._clock = store, config.name, asker, clock
        self._settings = config.live
        self._weights = self._settings.signals.weight
        self._ledger = weighing.Ledger(self._settings.people.per_user, self._weights)
        self._asking: dict[str, asyncio.Task[None]] = {}  # by rollout
        self._admitting = asyncio.Lock()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._said, self._said_unweighed = set[str](), False  # outliers; names may be users' words
        self._given_up = set[str]()  # sessions of which not even that can be written

    async def start(self) -> None:
        """Read what is known of the sessions so far."""
        async for row in people.all_sessions(self._store, self._run):
            if mark := mark_of(row):
                self._ledger.learn(row.id, user_of(row), mark)
        self._ledger.tidy()

    async def look(self) -> None:
        """Begin to label what has ended, and rewrite what got feedback."""
        sessions = await ended(self._store, self._run)
        marks = {row.id: mark_of(row) for row in sessions}
        known = [(row, mark) for row in sessions if (mark := marks[row.id]) and is_counted(mark)]
        for row, mark in known:
            await self._safely(row, self._learn(row, mark))
        for row, mark in known:
            await self._safely(row, self._write_again(row, mark))
        self._given_up &= marks.keys()
        for row in oldest_first(sessions):
            if marks[row.id] is None and row.id not in self._asking.keys() | self._given_up:
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

    async def _learn(self, row: Rollout, mark: Mark) -> None:
        self._ledger.learn(row.id, user_of(row), self._with_posted(row, mark))

    async def _write_again(self, row: Rollout, mark: Mark) -> None:
        await self._write(row, self._weighed(row, self._with_posted(row, mark)), {})

    async def _label(self, row: Rollout) -> None:
        async with self._slots:
            await self._safely(row, self._labelled(row))

    async def _safely(self, row: Rollout, work: Coroutine[Any, Any, None]) -> None:
        """Do what is about one session, which is held if that cannot be done: others must not wait
        for it. Raises StoreError for what can be tried again."""
        try:
            await work
        except Invalid as error:
            await self._hold(row, error)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - of any part of a session
            await self._hold(row, error)

    async def _labelled(self, row: Rollout) -> None:
        async with self._admitting:  # in the order in which they ended
            trace = await self._store.trace(row.id)
            if trace is None:  # deleted since
                return
            mark = self._admitted(trace)
        judged: dict[str, float] = {}
        if not mark.held and row.state is RolloutState.SUCCEEDED and trace.transitions:
            mark, judged = await self._asked(mark, trace)
        mark = self._with_posted(trace.rollout, mark)
        self._ledger.learn(row.id, user_of(row), mark)
        await self._write(trace.rollout, self._weighed(row, mark), judged)

    async def _hold(self, row: Rollout, error: Exception) -> None:
        """Write that a session cannot be labelled; else forget it until the watch starts again."""
        why = HELD.format(kind_of(error))
        log.warning("session %s is held: %s", row.group, why)
        now = self._clock()
        try:
            await self._write(row, Mark(ended=now, day=_day_of(now), held=why), {})
        except Invalid:
            self._given_up.add(row.id)

    def _admitted(self, trace: Trace) -> Mark:
        """A mark that says whether the session counts."""
        row = trace.rollout
        ended = ended_of(row) or self._clock()  # it failed, and nobody wrote its end
        digest = digest_of_session(trace.transitions)
        mark = Mark(ended=ended, day=_day_of(ended), digest=digest)
        return replace(mark, held=self._ledger.admit(row.id, user_of(row), mark))

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
        if given.keys() - self._weights.keys() and not self._said_unweighed:
            self._said_unweighed = True
            log.warning(
                "feedback under another name than those in live.signals.weights is kept, and not "
                "learned from; `agentrl live export` shows the name"
            )
        explicit = any(self._weights.get(name) for name in given)
        return replace(mark, posted=given, explicit=explicit, delays=self._delays(mark, given))

    def _delays(self, mark: Mark, signals: dict[str, float]) -> dict[str, float]:
        late = round(max(0.0, self._clock() - mark.ended), 1)
        return dict.fromkeys(signals, late) | mark.delays

    def _weighed(self, row: Rollout, mark: Mark) -> Mark:
        """The mark with why the session, or what was posted, does not count."""
        user, (contrary, unlike) = user_of(row), self._outliers()
        held = mark.held if not is_counted(mark) else ""
        if not held and user in unlike and self._ledger.is_beyond(row.id, user, mark):
            held = weighing.UNLIKE
        ignored = weighing.CONTRARY if mark.posted and user in contrary else ""
        return replace(mark, held=held, ignored=ignored)

    def _outliers(self) -> weighing.Outliers:
        found = self._ledger.outliers()
        for users, what in zip(found, ("votes", "most sessions"), strict=True):
            for user in users.keys() - self._said:
                self._said.add(user)
                log.warning("%s of user %s are held back: %s", what, user, users[user])
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


def _day_of(time: float) -> str:
    """The UTC date of unix seconds. Raises OverflowError for none."""
    return datetime.fromtimestamp(time, UTC).date().isoformat()


def _had_outcome(row: Rollout) -> bool:
    return any(r.source == SOURCE and r.name == OUTCOME for r in row.rewards)


async def run(store: Store, config: RunConfig) -> None:
    """Label sessions of the run as they end, until cancelled."""
    async with Asker(store, config) as asker:
        labeller, started = Labeller(store, config, asker), False

        async def look() -> None:
            nonlocal started
            if not started:
                await labeller.start()
                started = True
            began = time.monotonic()
            await labeller.look()
            labeller.failed()
            await asyncio.sleep(IDLENESS * (time.monotonic() - began))

        missed = "sessions are not labelled now"
        await keep_reading(store, look, missed, pause=PAUSE, timeout=POLL)
