"""Labels ended sessions: their signals, and the outcome computed from them.

Invariant: a label is computed from the stored session, and written at once with its mark; so a
killed watch loses nothing and repeats at most one question. Feedback that arrives before a session
is trained rewrites its label; later it is still stored, and the label stays. A session that cannot
be labelled is held back: it is never trained, and no other session waits for it.

The verifier and the judge of next messages are the user's code. They run in processes that answer
one question after another. The watch owns these processes and the judge's connections. Invariant:
if an answer takes longer than `live.signals.timeout`, its process is killed. After any problem the
session stays without this signal, and each kind of problem is reported once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec

from agentrl.core.config import RunConfig
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.loading import kind_of
from agentrl.core.processes import environment_without_secrets
from agentrl.core.types import Scope, Trace
from agentrl.live.signals import VERIFIER, Reply

# isort: split
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from statistics import fmean

from msgspec.structs import replace

from agentrl.algorithms.judges import JudgeClient
from agentrl.core.config.rewards import PointwiseJudge
from agentrl.core.errors import Invalid, NotFound, StoreError
from agentrl.core.types import SIGNAL, Reward, Rollout, RolloutState, StepReward
from agentrl.live import records, signals
from agentrl.live.answering import Settings, SignalRequest, SignalResponse, pack, read
from agentrl.live.records import (
    MARK,
    OUTCOME,
    SOURCE,
    Mark,
    ended,
    ended_of,
    mark_of,
    oldest_first,
    outcome_of,
    user_of,
)
from agentrl.live.signals import (
    NEXT_MESSAGE,
    Message,
    digest_of_session,
    is_counted,
    posted,
    replies,
)
from agentrl.runners.executors.command import Channel, ProcessLauncher, SupervisorLost
from agentrl.runners.executors.supervisor import ProcessSpec
from agentrl.store.base import Store, keep_reading

HELD = "it cannot be labelled: {}"


AT_ONCE = 16  # sessions that are labelled concurrently


PAUSE = 0.2  # minimum seconds between two reads of the store


POLL = 60.0  # maximum seconds between two reads of the store


class Labeller:
    """Labels the sessions of a run. Call `start` once, then `look` after every change of the
    store."""

    def __init__(
        self, store: Store, config: RunConfig, asker: Asker, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._run, self._asker, self._clock = store, config.name, asker, clock
        self._settings = config.live
        self._weights = self._settings.signals.weight
        self._ledger = signals.Ledger(self._settings.people.per_user, self._weights)
        self._asking: dict[str, asyncio.Task[None]] = {}  # rollout -> its labelling
        self._admitting = asyncio.Lock()
        self._slots = asyncio.Semaphore(AT_ONCE)
        # Outliers already reported, and whether unweighted feedback was: its name may be private.
        self._reported, self._reported_unweighed = set[str](), False
        self._given_up = set[str]()  # sessions that could not even be marked as held back

    async def start(self) -> None:
        """Read the existing labels of the sessions."""
        async for row in records.all_sessions(self._store, self._run):
            if mark := mark_of(row):
                self._ledger.learn(row.id, user_of(row), mark)
        self._ledger.tidy()

    async def look(self) -> None:
        """Begin to label sessions that have ended, and relabel those with new feedback."""
        sessions = await ended(self._store, self._run)
        marks = {row.id: mark_of(row) for row in sessions}
        labelled = [(row, mark) for row in sessions if (mark := marks[row.id]) and is_counted(mark)]
        for row, mark in labelled:
            await self._safely(row, self._learn(row, mark))
        for row, mark in labelled:
            await self._safely(row, self._write_again(row, mark))
        self._given_up &= marks.keys()
        for row in oldest_first(sessions):
            if marks[row.id] is None and row.id not in self._asking.keys() | self._given_up:
                self._asking[row.id] = asyncio.create_task(self._label(row))

    async def settle(self) -> None:
        """Wait for all labels that `look` has begun. Raises the first error."""
        tasks = [*self._asking.values()]
        self._asking.clear()
        await asyncio.gather(*tasks)

    def failed(self) -> None:
        """Drop finished tasks; raises the first error."""
        for id, task in [*self._asking.items()]:
            if task.done():
                del self._asking[id]
                # Cancelled together with an equal question, which will be asked again.
                if not task.cancelled():
                    task.result()

    async def _learn(self, row: Rollout, mark: Mark) -> None:
        self._ledger.learn(row.id, user_of(row), self._with_posted(row, mark))

    async def _write_again(self, row: Rollout, mark: Mark) -> None:
        await self._write(row, self._weighed(row, self._with_posted(row, mark)), {})

    async def _label(self, row: Rollout) -> None:
        async with self._slots:
            await self._safely(row, self._labelled(row))

    async def _safely(self, row: Rollout, work: Coroutine[Any, Any, None]) -> None:
        """Process one session; hold it back if that fails, because others must not wait for it.
        Raises StoreError if it can be tried again."""
        try:
            await work
        except Invalid as error:
            await self._hold(row, error)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - of any part of a session
            await self._hold(row, error)

    async def _labelled(self, row: Rollout) -> None:
        async with self._admitting:  # in the order of their ends
            trace = await self._store.trace(row.id)
            if trace is None:  # deleted since
                return
            mark = self._admitted(trace)
        judged: dict[str, float] = {}
        if not mark.held and row.state is RolloutState.SUCCEEDED and trace.transitions:
            mark, judged = await self._with_asked(mark, trace)
        mark = self._with_posted(trace.rollout, mark)
        self._ledger.learn(row.id, user_of(row), mark)
        await self._write(trace.rollout, self._weighed(row, mark), judged)

    async def _hold(self, row: Rollout, error: Exception) -> None:
        """Mark a session as impossible to label; if that fails, too, ignore it until the watch
        restarts."""
        why = HELD.format(kind_of(error))
        log.warning("session %s is held: %s", row.group, why)
        now = self._clock()
        try:
            await self._write(row, Mark(ended=now, day=_day_of(now), held=why), {})
        except Invalid:
            self._given_up.add(row.id)

    def _admitted(self, trace: Trace) -> Mark:
        """A mark with the decision whether the session counts."""
        row = trace.rollout
        # The labelling failed before the session's end was written.
        ended = ended_of(row) or self._clock()
        digest = digest_of_session(trace.transitions)
        mark = Mark(ended=ended, day=_day_of(ended), digest=digest)
        return replace(mark, held=self._ledger.admit(row.id, user_of(row), mark))

    async def _with_asked(self, mark: Mark, trace: Trace) -> tuple[Mark, dict[str, float]]:
        """The mark with the signals of verifier and judge, and the judgements by call."""
        after = replies(trace.transitions)
        signals, judged = await asyncio.gather(
            self._asker.verify(trace), self._asker.judge(after, trace.rollout.id)
        )
        if judged:
            signals = {**signals, NEXT_MESSAGE: fmean(judged.values())}
        return replace(mark, asked=signals, delays=self._delays(mark, signals)), judged

    def _with_posted(self, row: Rollout, mark: Mark) -> Mark:
        values = posted(row.rewards)
        if values.keys() - self._weights.keys() and not self._reported_unweighed:
            self._reported_unweighed = True
            log.warning(
                "feedback under another name than those in live.signals.weights is kept, and not "
                "learned from; `agentrl live users --export` shows the name"
            )
        explicit = any(self._weights.get(name) for name in values)
        return replace(mark, posted=values, explicit=explicit, delays=self._delays(mark, values))

    def _delays(self, mark: Mark, signals: dict[str, float]) -> dict[str, float]:
        late = round(max(0.0, self._clock() - mark.ended), 1)
        return dict.fromkeys(signals, late) | mark.delays

    def _weighed(self, row: Rollout, mark: Mark) -> Mark:
        """Add to the mark the reason why the session, or its posted feedback, does not count."""
        user, (contrary, unlike) = user_of(row), self._outliers()
        held = mark.held if not is_counted(mark) else ""
        if not held and user in unlike and self._ledger.is_beyond(row.id, user, mark):
            held = signals.UNLIKE
        ignored = signals.CONTRARY if mark.posted and user in contrary else ""
        return replace(mark, held=held, ignored=ignored)

    def _outliers(self) -> signals.Outliers:
        outliers = self._ledger.outliers()
        for users, what in zip(outliers, ("votes", "most sessions"), strict=True):
            for user in users.keys() - self._reported:
                self._reported.add(user)
                log.warning("%s of user %s are held back: %s", what, user, users[user])
        return outliers

    async def _write(self, row: Rollout, mark: Mark, judged: dict[str, float]) -> None:
        """Write a label unless it is written already."""
        outcome = signals.weighted(mark.signals, self._weights)
        if math.isnan(outcome) and mark.ignored and _had_outcome(row):
            mark = replace(mark, held=mark.ignored)  # the mark's reward cannot be removed
        unchanged = math.isnan(outcome) or outcome == outcome_of(row)
        if mark == mark_of(row) and (mark.held or unchanged):
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
    """The UTC date of unix seconds. Raises OverflowError for a time out of range."""
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
            await asyncio.sleep(records.PAUSE_SHARE * (time.monotonic() - began))

        missed = "sessions are not labelled now"
        await keep_reading(store, look, missed, pause=PAUSE, timeout=POLL)


log = logging.getLogger("agentrl.live")


CHILD = ("-m", "agentrl.live.answering")


PROCESSES = 2  # questions that are answered concurrently


LOADING = 120.0  # seconds for a user's file to be imported


MAX_PRINTED_BYTES = 2**16  # bytes that the user's functions may print about one session


ANSWERED = re.compile(r"( answered \d+): .*", re.DOTALL)


ENDED = (asyncio.IncompleteReadError, ConnectionError, SupervisorLost, OSError)


RUBRIC = (
    "whether what came after its last answer, in `next`, shows that this answer helped: a user who "
    "thanks it or goes on with the task, a tool that works; not a user who repeats the question, "
    "corrects it or complains, or a tool that fails"
)


class Asker:
    """Asks about sessions; use as a context manager."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._signals, self._root = config.live.signals, config.root
        self._verifies = bool(config.verifier.path or config.verifier.rewards)
        self._function = self._signals.next_message if ":" in self._signals.next_message else ""
        self._settings = Settings(
            root=str(config.root), verifier=config.verifier.path,
            rewards=dict(config.verifier.rewards), next_message=self._function,
        )  # fmt: skip
        self._launcher = ProcessLauncher(env=environment_without_secrets())
        self._free: asyncio.Queue[Channel | None] = asyncio.Queue()
        self._store, self._config, self._reported = store, config, set[tuple[str, str]]()
        self._session = aiohttp.ClientSession()
        self._judge: JudgeClient | None = None

    async def __aenter__(self) -> Asker:
        """Start a process, so that a function that cannot be used is an error now."""
        name = self._signals.next_message
        if name and not self._function:
            judge = PointwiseJudge(upstream=name, rubric=RUBRIC)
            self._judge = JudgeClient(NEXT_MESSAGE, judge, self._config, self._store, self._session)
        for _ in range(PROCESSES - 1):
            self._free.put_nowait(None)
        async with AsyncExitStack() as failing:
            failing.push_async_callback(self.__aexit__)
            if self._verifies or self._function:
                await self._launcher.start()
                self._free.put_nowait(await _started(self._launcher, self._settings))
            failing.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()
        while not self._free.empty():
            if process := self._free.get_nowait():
                await process.end()
        await self._launcher.close()

    async def verify(self, trace: Trace) -> dict[str, float]:
        """The verifier's signals of a session, by name; empty if it has none."""
        if not self._verifies:
            return {}
        answer = await self._ask(VERIFIER, SignalRequest(trace=trace))
        return answer.signals

    async def judge(self, replies: Sequence[Reply], subject: str) -> dict[str, float]:
        """Judgements of the messages that followed the answers of a session, by call. subject: its
        rollout."""
        if not replies or not self._signals.next_message:
            return {}
        if self._judge is not None:
            values = await self._ask_model(self._judge, replies, subject)
        else:
            values = (await self._ask(NEXT_MESSAGE, SignalRequest(replies=[*replies]))).judged
        return {r.call: v for r, v in zip(replies, values, strict=False) if v is not None}

    async def _ask(self, what: str, question: SignalRequest) -> SignalResponse:
        process = await self._free.get()
        answer: SignalResponse | None = None
        try:
            if process is None:
                process = await _started(self._launcher, self._settings)
            async with asyncio.timeout(self._signals.timeout):
                answer = await _answer(process, question)
        except TimeoutError:
            self._say(what, "took too long", f"took longer than live.signals.timeout = "
                      f"{self._signals.timeout:g} s and was ended")  # fmt: skip
        except ENDED as error:
            self._say(what, "died", f"ended its process ({type(error).__name__})")
        except AgentRLError as error:
            self._say(what, "load", f"cannot be loaded: {error}")
        finally:
            if answer is None and process is not None:
                await asyncio.shield(process.end())
                process = None
            self._free.put_nowait(process)
        if answer is not None and answer.problem:
            self._say(what, answer.problem.split(maxsplit=1)[0], answer.problem)
        return answer or SignalResponse()

    async def _ask_model(
        self, judge: JudgeClient, replies: Sequence[Reply], subject: str
    ) -> list[float | None]:
        records = [_record(reply) for reply in replies]
        try:
            async with asyncio.timeout(self._signals.timeout):
                return await judge.score(records, subject)
        except TimeoutError:
            why = f"took longer than live.signals.timeout = {self._signals.timeout:g} s"
            self._say(NEXT_MESSAGE, "took too long", why)
        except (AgentRLError, KeyError) as error:
            # Without the server's message, which may quote users.
            why = ANSWERED.sub(r"\1", str(error))
            self._say(NEXT_MESSAGE, "failed", f"gave no answer: {why}")
        finally:
            judge.forget_pending()  # the store has the answers
        return []

    def _say(self, what: str, kind: str, problem: str) -> None:
        """Report a problem once; `agentrl live status` counts the sessions without a signal."""
        if (what, kind) not in self._reported:
            self._reported.add((what, kind))
            name = "the verifier" if what == VERIFIER else "live.signals.next_message"
            log.warning("%s %s; such sessions stay without this signal", name, problem)


def _record(reply: Reply) -> list[Message]:
    return [*reply.messages, reply.answer, {"next": reply.next}]


async def _started(launcher: ProcessLauncher, settings: Settings) -> Channel:
    """A process that has loaded the user's functions. Raises ConfigError."""
    argv = [sys.executable, *CHILD, msgspec.json.encode(settings).decode(), "3"]
    spec = ProcessSpec(argv=argv, env=environment_without_secrets(), folder=settings.root)
    process = await launcher.talk(spec, MAX_PRINTED_BYTES)
    try:
        async with asyncio.timeout(LOADING):
            problem = (await read(process.reader, SignalResponse)).problem
    except TimeoutError:
        problem = f"importing the verifier or judge takes longer than {LOADING:g} s"
    except ENDED:
        problem = "the process ended while loading the verifier or judge; see above"
    if problem:
        await process.end()
        raise ConfigError(problem)
    return process


async def _answer(process: Channel, question: SignalRequest) -> SignalResponse:
    process.printed.reset()
    process.writer.write(pack(question))
    await process.writer.drain()
    return await read(process.reader, SignalResponse)
