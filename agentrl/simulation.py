"""How long the steps of a run take, by how far it samples ahead: a simulation of its events.

Nothing is computed but time. Calls that run at once share an engine, whose decode steps take longer
the more they are; a rollout holds its slot while a tool works. Times and lengths are drawn by
rollout and call, so that all settings of a comparison meet the same ones.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import ceil, exp, floor, log


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What takes time, in seconds. A sigma is that of a lognormal distribution with the mean given
    beside it; 0: always the mean."""

    groups: int  # of a step
    group_size: int
    ready: bool = False  # groups are trained as they end, not as they were asked for
    slots: int  # rollouts at a time
    calls: float  # of a rollout, mean: the whole number below or above, as its task wants
    tokens: float  # of a call
    token_sigma: float = 0.0
    tool: float = 0.0  # between two calls
    tool_sigma: float = 0.0
    decode: float  # one step of an engine,
    per_call: float = 0.0  # and more for each call that it decodes
    prompt: float = 0.0  # of an engine, to read what is new in a call's prompt
    engines: int = 1
    update: float  # of the learner, for a step
    publish: float = 0.0  # during which no engine computes


@dataclass(frozen=True, slots=True)
class Prediction:
    """seconds: of a step, once the start is over. Idle times are shares of the run, lags counts of
    updates; too_old: share of the rollouts whose tokens are not trained, because of their lag."""

    seconds: float
    sampler_idle: float
    learner_idle: float
    max_lag: int
    too_old: float


def lognormal(mean: float, sigma: float, *key: object) -> float:
    """A number drawn by `key`."""
    if not sigma or not mean:
        return mean
    return exp(random.Random(repr(key)).gauss(log(mean) - sigma * sigma / 2, sigma))


class Simulation:
    """A run with `max_staleness = ahead`. in_flight: calls go on while weights are updated; else
    those that run end first, and others wait."""

    def __init__(self, work: Workload, ahead: float, *, in_flight: bool, seed: int = 0) -> None:
        self.work, self.ahead, self.in_flight, self.seed = work, ahead, in_flight, seed
        self.now, self.order = 0.0, count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.asked = self.running = 0
        self.queue: deque[tuple[int, int]] = deque()  # rollouts: group, number in it
        self.begun: dict[tuple[int, int], int] = {}  # the version of a rollout's first call
        self.ended: dict[int, list[int]] = defaultdict(list)  # those versions, by group
        # Every running call has come `progress` tokens further since the start; `calls`: to where.
        # debt: seconds until it moves again.
        self.progress = self.debt = 0.0
        self.calls: list[tuple[float, int, Callable[[], None]]] = []
        self.next_end = 0  # number of the event that is the end of a call, unless things change
        self.held: list[Callable[[], None]] | None = None  # calls that wait for an update
        self.batch: list[int] = []  # versions of what is being trained
        self.sampling = 0.0
        self.committed: list[float] = []  # when each step was
        self.lags: list[int] = []

    def run(self, steps: int = 25) -> Prediction:
        self.ask()
        self.expect_end()
        while len(self.committed) < steps:
            time, number, event = heapq.heappop(self.events)
            if event == self.end_call and number != self.next_end:
                continue  # something has changed since
            self.advance(time)
            event()
            self.expect_end()
        first = max(1, steps // 5)  # steps that are not counted: nothing was ahead of them
        most, total = ceil(self.ahead), len(self.lags)
        return Prediction(
            seconds=(self.committed[-1] - self.committed[first - 1]) / (steps - first),
            sampler_idle=1 - self.sampling / self.now,
            learner_idle=1 - steps * self.work.update / self.now,
            max_lag=min(most, max(self.lags)),
            too_old=sum(lag > most for lag in self.lags) / total,
        )

    def after(self, seconds: float, event: Callable[[], None]) -> int:
        number = next(self.order)
        heapq.heappush(self.events, (self.now + seconds, number, event))
        return number

    def step_time(self) -> float:
        return self.work.decode + self.work.per_call * len(self.calls) / self.work.engines

    def advance(self, to: float) -> None:
        passed, self.now = to - self.now, to
        if self.calls:
            self.sampling += passed
            paid = min(passed, self.debt)
            self.debt -= paid
            self.progress += (passed - paid) / self.step_time()

    def expect_end(self) -> None:
        """Of the call that ends next, should nothing happen before."""
        if self.calls:
            left = max(0.0, self.calls[0][0] - self.progress)
            self.next_end = self.after(self.debt + left * self.step_time(), self.end_call)

    def end_call(self) -> None:
        heapq.heappop(self.calls)[2]()
        self.update_if_drained()

    def ask(self) -> None:
        """For as many groups as may be sampled ahead, then begin what there are slots for."""
        work = self.work
        while self.asked < floor((len(self.committed) + self.ahead + 1) * work.groups):
            self.queue.extend((self.asked, number) for number in range(work.group_size))
            self.asked += 1
        while self.queue and self.running < work.slots:
            self.running += 1
            rollout = self.queue.popleft()
            share = random.Random(repr((self.seed, rollout[0]))).random()
            self.call(rollout, 1, max(1, floor(work.calls + share)))

    def call(self, rollout: tuple[int, int], number: int, last: int) -> None:
        if self.held is not None:
            self.held.append(lambda: self.call(rollout, number, last))
            return
        self.begun.setdefault(rollout, len(self.committed))
        work, key = self.work, (self.seed, *rollout, number)
        self.debt += work.prompt / work.engines
        tokens = max(1.0, lognormal(work.tokens, work.token_sigma, *key, "tokens"))

        def answered() -> None:
            if number == last:
                self.finish(rollout)
            else:
                tool = lognormal(work.tool, work.tool_sigma, *key)
                self.after(tool, lambda: self.call(rollout, number + 1, last))

        heapq.heappush(self.calls, (self.progress + tokens, next(self.order), answered))

    def finish(self, rollout: tuple[int, int]) -> None:
        self.running -= 1
        self.ended[rollout[0]].append(self.begun.pop(rollout))
        self.ask()
        self.learn()

    def learn(self) -> None:
        """Train the next groups, once they have ended."""
        work, done = self.work, len(self.committed) * self.work.groups
        numbers = sorted(self.ended) if work.ready else range(done, done + work.groups)
        ended = [n for n in numbers if len(self.ended.get(n, ())) == work.group_size]
        if self.batch or len(ended) < work.groups:
            return
        self.batch = [v for n in ended[: work.groups] for v in self.ended.pop(n)]
        if self.in_flight:
            self.after(work.update, self.commit)
        else:
            self.held = []

    def update_if_drained(self) -> None:
        if self.held is not None and not self.calls:
            self.after(self.work.update + self.work.publish, self.commit)

    def commit(self) -> None:
        self.debt += self.work.publish * self.in_flight
        self.lags += [len(self.committed) - version for version in self.batch]
        self.committed.append(self.now)
        held, self.held, self.batch = self.held or (), None, []
        for call in held:
            call()
        self.ask()
        self.learn()
        self.update_if_drained()
