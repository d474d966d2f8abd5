"""Leases, fences and commits under random interleavings, against a model in plain Python.

No rollout is lost, none is claimed twice under one fence, no group is trained twice, and nothing
written under an old fence or lease is trained: whoever crashes, whatever is repeated, and however
the clock jumps.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentrl.core.errors import Conflict, Fenced
from agentrl.core.types import (
    Attempt,
    Counts,
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    Reward,
    StepCommit,
    StepReward,
)
from agentrl.store import Store, open_store
from agentrl.store.sql import writer
from agentrl.store.sql.rollouts import CLOCK_SLACK, SUSPECT_SHARE
from tests import factories

LEASE = 10.0
RUNNERS = ("one", "two")
JUDGED = Reward(value=0.5, name="judge", source="model:judge")
HOUR = 3600.0
BROKEN = Failure(kind=ErrorKind.AGENT, message="boom")
STOPPED = Failure(kind=ErrorKind.LOST_RUNNER, message="The runner was told to stop.")
OVER = ("succeeded", "failed", "cancelled")
ENDS = {
    "finish": (None, False),
    "fail": (BROKEN, False),
    "retry": (BROKEN, True),
    "give back": (STOPPED, True),
}


@dataclass
class Try:
    attempt: Attempt
    until: float
    runner: str
    together: int = 0  # that its runner held when it stopped responding
    state: str = "running"
    calls: list[str] = field(default_factory=list)  # that count
    sent: list[Outcome] = field(default_factory=list)
    accepted: Outcome | None = None
    crashed: bool = False  # nobody will ever speak for it again


@dataclass
class Row:
    new: NewRollout
    state: str = "queued"
    tries: list[Try] = field(default_factory=list)
    together: float = math.inf  # that its runner may hold

    @property
    def spent(self) -> bool:
        return len(self.tries) >= self.new.max_attempts


somebody_alive = precondition(lambda self: any(not one.crashed for one in self.tries.values()))


class Bench:
    """The store under test. It outlives the examples, each of which has a run of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.now = 1e9
        self.runner = asyncio.Runner()
        self.numbers = count()
        self.store: Store = self.open()

    def open(self) -> Store:
        return open_store(self.url, clock=lambda: self.now)

    def reopen(self) -> None:
        self.do(self.store.close())
        self.store = self.open()

    def do(self, verb):
        return self.runner.run(verb)

    def close(self) -> None:
        self.do(self.store.close())
        self.runner.close()


class Machine(RuleBasedStateMachine):
    """The rules drive a store and the model; the invariants compare them."""

    bench: Bench

    def __init__(self) -> None:
        super().__init__()
        self.do, self.numbers = self.bench.do, self.bench.numbers
        self.run = f"run-{next(self.numbers)}"
        self.rows: dict[str, Row] = {}
        self.tries: dict[str, Try] = {}
        self.claims: dict[str, list[Try]] = {}  # by claim id
        self.claimed: set[str] = set()
        self.trained: dict[str, int] = {}
        self.committed: dict[int, StepCommit] = {}
        self.batches: list[StepCommit] = []
        self.step = 0
        self.epoch = self.do(self.store.open_run(self.run, {})).epoch
        self.enqueue([1, 2, 1], 2)

    @property
    def store(self) -> Store:
        return self.bench.store

    @property
    def now(self) -> float:
        return self.bench.now

    # -- the model ---------------------------------------------------------------------------------

    def live(self, one: Try) -> bool:
        return one.state == "running" and one.until > self.now

    def expire(self) -> None:
        running = [one for one in self.tries.values() if one.state == "running"]
        for one in running:
            if one.until > self.now + LEASE + CLOCK_SLACK:
                one.until = self.now + LEASE
        lost = [one for one in running if not self.live(one)]
        held = Counter(one.runner for one in running)
        for one in running:
            if held[one.runner] > 1 and one.runner in {other.runner for other in lost}:
                one.together = max(one.together, held[one.runner])
        for one in lost:
            self.lose(one, self.rows[one.attempt.rollout.id])

    def lose(self, one: Try, row: Row) -> None:
        one.state = "expired"
        if one.together > 1:  # nobody knows which of them it was
            self.forgive(row)
            row.together = max(1, min(one.together, row.together) // SUSPECT_SHARE)
        else:
            row.together = 1
        row.state = "failed" if row.spent else "queued"

    def forgive(self, row: Row) -> None:
        row.new = msgspec.structs.replace(row.new, max_attempts=row.new.max_attempts + 1)

    def admitted(self, runner: str, n: int) -> list[Row]:
        """The first in the queue, as many as the runner may hold with each other."""
        held = [row for row in self.rows.values() if row.state == "running"]
        held = [row for row in held if row.tries[-1].runner == runner]
        most, size = min((row.together for row in held), default=math.inf), len(held)
        for row in [row for row in self.rows.values() if row.state == "queued"][:n]:
            most = min(most, row.together)
            if len(held) >= most:
                break
            held.append(row)
        return held[size:]

    def groups(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows.values():
            found.setdefault(row.new.group, []).append(row)
        return found

    def ready(self) -> list[str]:
        settled = {
            name
            for name, rows in self.groups().items()
            if name not in self.trained and all(row.state in OVER for row in rows)
        }
        return sorted(self.claimed) + sorted(settled - self.claimed)

    # -- what runners do ---------------------------------------------------------------------------

    @rule(
        n=st.integers(1, 4),
        runner=st.sampled_from(RUNNERS),
        claim_id=st.none() | st.integers(0, 3).map("claim {}".format),
    )
    def claim(self, n: int, runner: str, claim_id: str | None) -> None:
        name, runner = claim_id and f"{self.run} {claim_id}", f"{self.run} {runner}"
        got = self.do(self.store.claim(n, runner=runner, lease=LEASE, run=self.run, claim_id=name))
        self.expire()
        if name in self.claims:
            live = [one for one in self.claims[name] if self.live(one)]
            told = [(one.attempt.id, one.attempt.fence) for one in live]
            assert [(attempt.id, attempt.fence) for attempt in got] == told
            return
        admitted = self.admitted(runner, n)
        assert [attempt.rollout for attempt in got] == [row.new for row in admitted]
        for row, attempt in zip(admitted, got, strict=True):
            assert attempt.id not in self.tries
            assert attempt.fence == len(row.tries) + 1
            row.state = "running"
            row.tries.append(Try(attempt, self.now + LEASE, runner))
            self.tries[attempt.id] = row.tries[-1]
        if got and name is not None:
            self.claims[name] = [self.tries[attempt.id] for attempt in got]

    @somebody_alive
    @rule(beat=st.booleans(), data=st.data())
    def hold(self, beat: bool, data: st.DataObject) -> None:
        one = self.runner(data)
        if beat:
            self.heartbeat(one)
        else:
            self.call(one)

    @somebody_alive
    @rule(end=st.sampled_from(sorted(ENDS)), data=st.data())
    def end(self, end: str, data: st.DataObject) -> None:
        self.finish(self.runner(data), end)

    @somebody_alive
    @rule(end=st.sampled_from(sorted(ENDS)), call=st.booleans(), data=st.data())
    def oversleep(self, end: str, call: bool, data: st.DataObject) -> None:
        """A runner writes after its lease, before anybody has noticed."""
        one = self.runner(data)
        self.bench.now = max(self.now, one.until)
        if call:
            self.call(one)
        self.finish(one, end)

    @somebody_alive
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        one = self.runner(data)
        for outcome in one.sent:
            self.send(one, outcome)

    @somebody_alive
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.runner(data).crashed = True

    def runner(self, data: st.DataObject) -> Try:
        """Whoever holds an attempt, or once held one of the last few."""
        alive = [one for one in self.tries.values() if not one.crashed]
        held = [one for one in alive if one.state == "running"]
        return data.draw(st.sampled_from(held * 5 + alive[-5:]))

    def finish(self, one: Try, end: str) -> None:
        failure, retry = ENDS[end]
        outcome = Outcome(
            attempt=one.attempt.id,
            fence=one.attempt.fence,
            rewards=[Reward(value=float(next(self.numbers)))],
            failure=failure,
            retry=retry,
        )
        one.sent.append(outcome)
        self.send(one, outcome)

    def heartbeat(self, one: Try) -> None:
        beat = self.do(self.store.heartbeat([one.attempt.id], lease=LEASE))
        assert beat == [one.attempt.id] * self.live(one)
        if self.live(one):
            one.until = max(one.until, self.now + LEASE)
            one.together = 0

    def call(self, one: Try) -> None:
        call = factories.call(
            f"call-{next(self.numbers)}", attempt=one.attempt.id, index=len(one.calls)
        )
        for _ in range(2):
            assert self.do(self.store.add_transitions([call])) == [self.live(one)]
        if self.live(one):
            one.calls.append(call.id)

    def send(self, one: Try, outcome: Outcome) -> None:
        live, row = self.live(one), self.rows[one.attempt.rollout.id]
        known = one.accepted == outcome
        assert self.do(self.store.finish([outcome])) == [live or known]
        if not live or known:
            return
        one.accepted = outcome
        one.state = "failed" if outcome.failure else "succeeded"
        if outcome.failure == STOPPED:  # it was no try
            self.forgive(row)
        elif outcome.retry and not row.spent:
            row.together = math.inf  # every runner responded
        row.state = "queued" if outcome.retry and not row.spent else one.state

    # -- what the algorithm does -------------------------------------------------------------------

    @rule(sizes=st.lists(st.integers(1, 2), min_size=1, max_size=4), tries=st.integers(1, 2))
    def enqueue(self, sizes: list[int], tries: int) -> None:
        groups = [(f"{self.run}/{next(self.numbers):06}", n) for n in sizes]
        new = [self.rollout(group, i, tries) for group, n in groups for i in range(n)]
        assert self.do(self.store.enqueue(new)) == len(new)
        assert self.do(self.store.enqueue(new)) == 0
        self.rows.update({rollout.id: Row(rollout) for rollout in new})

    def rollout(self, group: str, index: int, tries: int) -> NewRollout:
        return NewRollout(
            id=f"{group}/{index}",
            run=self.run,
            group=group,
            index=index,
            task={},
            max_attempts=tries,
        )

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """One more rollout for a group, which may have settled; too late once it is claimed."""
        group, rows = data.draw(st.sampled_from(sorted(self.groups().items())))
        new = self.rollout(group, len(rows), 1)
        if group in self.claimed or group in self.trained:
            with pytest.raises(Conflict):
                self.do(self.store.enqueue([new]))
        else:
            assert self.do(self.store.enqueue([new])) == 1
            self.rows[new.id] = Row(new)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row = self.rows[data.draw(st.sampled_from(sorted(self.rows)))]
        open_ = row.state in ("queued", "running")
        assert self.do(self.store.cancel([row.new.id])) == open_
        if open_:
            if row.state == "running":
                row.tries[-1].state = "cancelled"
            row.state = "cancelled"

    @rule(n=st.integers(1, 3))
    def claim_groups(self, n: int) -> None:
        with pytest.raises(Fenced):
            self.do(self.store.claim_groups(self.run, self.epoch - 1, n, timeout=0))
        groups = self.do(self.store.claim_groups(self.run, self.epoch, n, timeout=0))
        self.expire()
        assert [group.id for group in groups] == sorted(self.ready()[:n])
        for group in groups:
            for rollout in group.rollouts:
                row = self.rows[rollout.id]
                last = row.tries[-1] if row.tries else None
                assert rollout.state == row.state
                assert [call.id for call in rollout.transitions] == (last.calls if last else [])
                accepted = last.accepted.rewards if last and last.accepted else []
                assert rollout.rewards == accepted
        self.claimed |= {group.id for group in groups}
        self.batches.append(
            StepCommit(
                run=self.run,
                epoch=self.epoch,
                step=self.step,
                groups=[group.id for group in groups],
                versions={},
                checkpoint=str(self.step),
                metrics={},
                rewards=[
                    StepReward(rollout=rollout.id, reward=JUDGED)
                    for group in groups
                    for rollout in group.rollouts
                    if rollout.attempt is not None
                ],
            )
        )

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A batch that was claimed, perhaps long ago, perhaps committed before."""
        commit = data.draw(st.sampled_from(self.batches[-3:]))
        if commit.epoch != self.epoch:
            with pytest.raises(Fenced):
                self.do(self.store.commit_step(commit))
        elif self.committed.get(commit.step) == commit:
            self.do(self.store.commit_step(commit))
        elif commit.step != self.step or not set(commit.groups) <= self.claimed:
            with pytest.raises(Conflict):
                self.do(self.store.commit_step(commit))
        else:
            self.do(self.store.commit_step(commit))
            assert not set(commit.groups) & self.trained.keys()
            self.committed[commit.step] = commit
            self.claimed -= set(commit.groups)
            self.trained |= dict.fromkeys(commit.groups, commit.step)
            self.step += 1
            judged = {row.rollout for row in commit.rewards}
            for row in self.do(self.store.rollouts(self.run, trained=commit.step)):
                last = self.rows[row.id].tries[-1] if row.id in judged else None
                accepted = last.accepted.rewards if last and last.accepted else []
                assert row.rewards == [*accepted, *([JUDGED] if last else [])]
            steps = self.do(self.store.steps(self.run))
            assert [step.step for step in steps if step.committed] == sorted(self.committed)

    @rule()
    def take_over(self) -> None:
        state = self.do(self.store.open_run(self.run, {}))
        assert (state.epoch, state.step) == (self.epoch + 1, self.step)
        self.epoch += 1
        self.claimed = set()

    # -- what happens to both ----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE, LEASE, HOUR, -LEASE, -HOUR]))
    def clock(self, seconds: float) -> None:
        """It runs, is set (NTP), or leaps (the machine was suspended)."""
        self.bench.now += seconds

    @rule()
    def reopen(self) -> None:
        self.bench.reopen()

    # -- what is always true -----------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        stored = {row.id: row for row in self.do(self.store.rollouts(self.run))}
        assert stored.keys() == self.rows.keys()
        for id, row in self.rows.items():
            assert (stored[id].state, stored[id].attempts) == (row.state, len(row.tries))
            assert stored[id].seconds >= 0

    @invariant()
    def count_what_is_there(self) -> None:
        states = dict.fromkeys(("queued", "running", *OVER), 0)
        for row in self.rows.values():
            states[row.state] += 1
        groups, calls = self.groups(), sum(len(one.calls) for one in self.tries.values())
        assert self.do(self.store.counts(self.run)) == Counts(
            **states,
            groups_open=len(groups) - len(self.ready()) - len(self.trained),
            groups_settled=len(self.ready()),
            groups_trained=len(self.trained),
            transitions=calls,
            tokens=calls,
        )


@pytest.mark.parametrize(
    "url",
    ["sqlite", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("postgres", "http"))],
    indirect=True,
)
@pytest.mark.timeout(900)  # 20 s; on a machine with eight times as much to do as it can, 120 s
def test_the_protocol_agrees_with_its_model(
    url: str, server_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases that a stall of the machine extends are not in the model: here nothing stalls."""
    monkeypatch.setattr(writer, "STALL", math.inf)
    Machine.bench = bench = Bench(url)
    server_clock.clock = lambda: bench.now
    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=30,
                stateful_step_count=50,
                deadline=None,
                phases=[Phase.generate],  # shrinking replays for minutes; a trace is short enough
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        Machine.bench.close()
