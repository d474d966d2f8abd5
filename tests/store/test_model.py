"""Leases, fences and commits under random interleavings, against a model in plain Python.

No rollout is lost, none has two live attempts, no group is trained twice, nothing written under an
old fence is trained.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

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

from agentrl.errors import Fenced, StoreError
from agentrl.store import open_store
from agentrl.types import (
    Attempt,
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    StepCommit,
    Transition,
    float32,
    int32,
)

LEASE = 10.0
BROKEN = Failure(kind=ErrorKind.AGENT, message="boom")


@dataclass
class Try:
    attempt: Attempt
    until: float
    state: str = "running"
    calls: list[str] = field(default_factory=list)
    outcome: Outcome | None = None


@dataclass
class Row:
    new: NewRollout
    state: str = "queued"
    tries: list[Try] = field(default_factory=list)

    @property
    def spent(self) -> bool:
        return len(self.tries) >= self.new.max_attempts


class Machine(RuleBasedStateMachine):
    """The rules drive a store and the model; the invariants compare them."""

    fresh: Callable[[], str]  # URL of an empty store

    def __init__(self) -> None:
        super().__init__()
        self.url = type(self).fresh()
        self.runner = asyncio.Runner()
        self.now = 1e9
        self.open()
        self.rows: dict[str, Row] = {}
        self.tries: dict[str, Try] = {}
        self.claimed: set[str] = set()
        self.trained: dict[str, int] = {}
        self.committed: dict[int, StepCommit] = {}
        self.batches: list[StepCommit] = []
        self.step = 0
        self.numbers = count()
        self.epoch = self.do(self.store.open_run("run", {})).epoch
        self.enqueue([1, 2, 1], 2)

    def open(self) -> None:
        self.store = open_store(self.url, clock=lambda: self.now)

    def do(self, verb):
        return self.runner.run(verb)

    def teardown(self) -> None:
        self.do(self.store.close())
        self.runner.close()

    # -- the model ---------------------------------------------------------------------------------

    def live(self, one: Try) -> bool:
        return one.state == "running" and one.until > self.now

    def expire(self) -> None:
        for row in self.rows.values():
            if row.state == "running" and not self.live(row.tries[-1]):
                row.tries[-1].state = "expired"
                row.state = "failed" if row.spent else "queued"

    def groups(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows.values():
            found.setdefault(row.new.group, []).append(row)
        return found

    def ready(self) -> list[str]:
        over = ("succeeded", "failed", "cancelled")
        settled = {
            name
            for name, rows in self.groups().items()
            if name not in self.trained and all(row.state in over for row in rows)
        }
        return sorted(self.claimed) + sorted(settled - self.claimed)

    # -- what runners do ---------------------------------------------------------------------------

    @rule(sizes=st.lists(st.integers(1, 2), min_size=1, max_size=4), tries=st.integers(1, 2))
    def enqueue(self, sizes: list[int], tries: int) -> None:
        new = [
            NewRollout(id=f"{g}/{i}", run="run", group=g, index=i, task={}, max_attempts=tries)
            for g, n in ((f"g{next(self.numbers):04}", n) for n in sizes)
            for i in range(n)
        ]
        assert self.do(self.store.enqueue(new)) == len(new)
        assert self.do(self.store.enqueue(new)) == 0
        self.rows.update({rollout.id: Row(rollout) for rollout in new})

    @rule(n=st.integers(1, 4))
    def claim(self, n: int) -> None:
        got = self.do(self.store.claim(n, runner="r", lease=LEASE))
        self.expire()
        queued = [row for row in self.rows.values() if row.state == "queued"]
        assert [attempt.rollout for attempt in got] == [row.new for row in queued[:n]]
        for row, attempt in zip(queued, got, strict=False):
            assert attempt.id not in self.tries
            assert attempt.fence == len(row.tries) + 1
            row.state = "running"
            row.tries.append(Try(attempt, self.now + LEASE))
            self.tries[attempt.id] = row.tries[-1]

    @precondition(lambda self: self.tries)
    @rule(verb=st.sampled_from(["heartbeat", "call", "finish", "fail", "retry"]), data=st.data())
    def runner(self, verb: str, data: st.DataObject) -> None:
        """Whoever holds an attempt, or once held it, does something with it."""
        one = data.draw(st.sampled_from(list(self.tries.values())[-6:]))
        live = self.live(one)
        if verb == "heartbeat":
            beat = self.do(self.store.heartbeat([one.attempt.id], lease=LEASE))
            assert beat == [one.attempt.id] * live
            if live:
                one.until = self.now + LEASE
        elif verb == "call":
            self.call(one, live)
        else:
            failure = None if verb == "finish" else BROKEN
            self.finish(one, live, failure, retry=verb == "retry")

    def call(self, one: Try, live: bool) -> None:
        call = Transition(
            id=f"call-{next(self.numbers)}",
            attempt=one.attempt.id,
            index=len(one.calls),
            prompt=int32([1]),
            completion=int32([2]),
            logprobs=float32([-1.0]),
        )
        for _ in range(2):
            assert self.do(self.store.add_transitions([call])) == [live]
        if live:
            one.calls.append(call.id)

    def finish(self, one: Try, live: bool, failure: Failure | None, retry: bool) -> None:
        row = self.rows[one.attempt.rollout.id]
        outcome = Outcome(
            attempt=one.attempt.id, fence=one.attempt.fence, failure=failure, retry=retry
        )
        assert self.do(self.store.finish([outcome])) == [live or one.outcome == outcome]
        if live:
            one.outcome = outcome
            one.state = "failed" if failure else "succeeded"
            row.state = "queued" if retry and not row.spent else one.state

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row = self.rows[data.draw(st.sampled_from(sorted(self.rows)))]
        open_ = row.state in ("queued", "running")
        assert self.do(self.store.cancel([row.new.id])) == open_
        if open_:
            if row.state == "running":
                row.tries[-1].state = "cancelled"
            row.state = "cancelled"

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # -- what the algorithm does -------------------------------------------------------------------

    @rule(n=st.integers(1, 3))
    def claim_groups(self, n: int) -> None:
        with pytest.raises(Fenced):
            self.do(self.store.claim_groups("run", self.epoch - 1, n, timeout=0))
        groups = self.do(self.store.claim_groups("run", self.epoch, n, timeout=0))
        self.expire()
        assert [group.id for group in groups] == sorted(self.ready()[:n])
        for group in groups:
            for rollout in group.rollouts:
                row = self.rows[rollout.id]
                assert rollout.state == row.state
                kept = [call.id for call in rollout.transitions]
                assert kept == (row.tries[-1].calls if row.tries else [])
        self.claimed |= {group.id for group in groups}
        self.batches.append(
            StepCommit(
                run="run",
                epoch=self.epoch,
                step=self.step,
                groups=[group.id for group in groups],
                versions={},
                checkpoint=str(self.step),
                metrics={},
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
            with pytest.raises(StoreError):
                self.do(self.store.commit_step(commit))
        else:
            self.do(self.store.commit_step(commit))
            self.committed[commit.step] = commit
            self.claimed -= set(commit.groups)
            self.trained |= dict.fromkeys(commit.groups, commit.step)
            self.step += 1

    @rule(restart=st.booleans())
    def take_over(self, restart: bool) -> None:
        if restart:
            self.do(self.store.close())
            self.open()
        state = self.do(self.store.open_run("run", {}))
        assert (state.epoch, state.step) == (self.epoch + 1, self.step)
        self.epoch += 1
        self.claimed = set()

    # -- what is always true -----------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        stored = {row.id: row for row in self.do(self.store.rollouts("run"))}
        assert stored.keys() == self.rows.keys()
        for id, row in self.rows.items():
            assert (stored[id].state, stored[id].attempts) == (row.state, len(row.tries))
        counts = self.do(self.store.counts("run"))
        assert counts.groups_trained == len(self.trained)
        assert counts.groups_settled == len(self.ready())
        assert counts.transitions == sum(len(one.calls) for one in self.tries.values())


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes empty stores."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres")
    template, numbers = tmp_path / "template.db", count()
    asyncio.run(open_store(str(template)).close())
    return lambda: str(shutil.copy(template, tmp_path / f"store-{next(numbers)}.db"))


def test_the_protocol_agrees_with_its_model(fresh: Callable[[], str]) -> None:
    Machine.fresh = staticmethod(fresh)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate],  # shrinking replays for minutes; the trace is short enough
            suppress_health_check=list(HealthCheck),
        ),
    )
