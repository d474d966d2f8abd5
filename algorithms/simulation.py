"""A simulation, by discrete events, of the step time of a run for different values of
`max_staleness`.

Only time is simulated. Concurrent calls share an engine, whose decode steps take longer with more
calls; a rollout keeps its slot while a tool runs. Durations and lengths are drawn with rollout and
call as the seed, so all settings in a comparison get the same ones.
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
    """Sizes and durations (seconds) of a run. `token_sigma` and `tool_sigma` are the sigmas of
    lognormal distributions with the means `tokens` and `tool`; 0: constant."""

    groups: int  # per step
    group_size: int
    ready: bool = False  # train groups in the order in which they end, not as requested
    slots: int  # concurrent rollouts
    calls: float  # mean per rollout; each task rounds it up or down
    tokens: float  # mean per call
    token_sigma: float = 0.0
    tool: float = 0.0  # mean time between two calls
    tool_sigma: float = 0.0
    decode: float  # one decode step of an engine,
    per_call: float = 0.0  # plus this for each call in it
    prompt: float = 0.0  # prefill of the new part of a call's prompt
    engines: int = 1
    update: float  # update time of the learner, per step
    publish: float = 0.0  # weight sync, during which no engine computes


@dataclass(frozen=True, slots=True)
class Prediction:
    """seconds: mean time of a step after the warm-up. Idle times are fractions of the run; max_lag
    counts updates; too_old: fraction of rollouts not trained because of their lag."""

    seconds: float
    sampler_idle: float
    learner_idle: float
    max_lag: int
    too_old: float


def lognormal(mean: float, sigma: float, *key: object) -> float:
    """A lognormal sample with this mean, drawn with `key` as the seed."""
    if not sigma or not mean:
        return mean
    return exp(random.Random(repr(key)).gauss(log(mean) - sigma * sigma / 2, sigma))


class Simulation:
    """A run with `max_staleness = ahead`. in_flight: calls continue during updates; otherwise
    running calls end first and new ones wait."""

    def __init__(self, work: Workload, ahead: float, *, in_flight: bool, seed: int = 0) -> None:
        self.work, self.ahead, self.in_flight, self.seed = work, ahead, in_flight, seed
        self.now, self.order = 0.0, count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.asked = self.running = 0
        self.queue: deque[tuple[int, int]] = deque()  # rollouts: (group, index in it)
        self.begun: dict[tuple[int, int], int] = {}  # rollout -> version of its first call
        self.ended: dict[int, list[int]] = defaultdict(list)  # group -> versions of ended rollouts
        # progress: tokens that a call running since time 0 would have; a call in `calls` ends when
        # `progress` reaches its first item. debt: seconds until `progress` grows again.
        self.progress = self.debt = 0.0
        self.calls: list[tuple[float, int, Callable[[], None]]] = []
        self.next_end = 0  # number of the event at which the next call ends
        self.held: list[Callable[[], None]] | None = None  # calls that wait for an update
        self.batch: list[int] = []  # versions of the rollouts in the current update
        self.sampling = 0.0
        self.committed: list[float] = []  # time of each step's commit
        self.lags: list[int] = []

    def run(self, steps: int = 25) -> Prediction:
        self.ask()
        self.expect_end()
        while len(self.committed) < steps:
            time, number, event = heapq.heappop(self.events)
            if event == self.end_call and number != self.next_end:
                continue  # outdated, because the set of running calls has changed
            self.advance(time)
            event()
            self.expect_end()
        first = max(1, steps // 5)  # warm-up steps, which are not counted
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
        """Schedule the next end of a call, assuming that nothing else happens before."""
        if self.calls:
            remaining = max(0.0, self.calls[0][0] - self.progress)
            self.next_end = self.after(self.debt + remaining * self.step_time(), self.end_call)

    def end_call(self) -> None:
        heapq.heappop(self.calls)[2]()
        self.update_if_drained()

    def ask(self) -> None:
        """Request as many groups as may be sampled ahead, and start rollouts in free slots."""
        work = self.work
        while self.asked < floor((len(self.committed) + self.ahead + 1) * work.groups):
            self.queue.extend((self.asked, number) for number in range(work.group_size))
            self.asked += 1
        while self.queue and self.running < work.slots:
            self.running += 1
            rollout = self.queue.popleft()
            offset = random.Random(repr((self.seed, rollout[0]))).random()
            self.call(rollout, 1, max(1, floor(work.calls + offset)))

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
        """Train the next groups if all of them have ended."""
        work, trained = self.work, len(self.committed) * self.work.groups
        numbers = sorted(self.ended) if work.ready else range(trained, trained + work.groups)
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
