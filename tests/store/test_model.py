"""Leases, fences and commits under random interleavings, against a model in plain Python.

No rollout is lost, none has two live attempts, no group is trained twice, nothing written under an
old fence is trained.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
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

    template: Path
    attempts: Bundle[Attempt] = Bundle("attempts")
    commits: Bundle[StepCommit] = Bundle("commits")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=self.template.parent))
        shutil.copy(self.template, self.folder / "store.db")
        self.runner = asyncio.Runner()
        self.now = 1e9
        self.open()
        self.rows: dict[str, Row] = {}
        self.tries: dict[str, Try] = {}
        self.claimed: set[str] = set()
        self.trained: dict[str, int] = {}
        self.committed: dict[int, StepCommit] = {}
        self.step = 0
        self.numbers = count()
        self.epoch = self.do(self.store.open_run("run", {})).epoch

    def open(self) -> None:
        self.store = open_store(str(self.folder / "store.db"), clock=lambda: self.now)

    def do(self, verb):
        return self.runner.run(verb)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.do(self.store.close())
            self.runner.close()
            shutil.rmtree(self.folder)

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

    @rule(n=st.integers(1, 3), tries=st.integers(1, 2))
    def enqueue(self, n: int, tries: int) -> None:
        group = f"g{next(self.numbers):04}"
        new = [
            NewRollout(
                id=f"{group}/{i}", run="run", group=group, index=i, task={}, max_attempts=tries
            )
            for i in range(n)
        ]
        assert self.do(self.store.enqueue(new)) == n
        assert self.do(self.store.enqueue(new)) == 0
        self.rows.update({rollout.id: Row(rollout) for rollout in new})

    @rule(target=attempts, n=st.integers(1, 4))
    def claim(self, n: int):
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
        return multiple(*got)

    @rule(attempt=attempts)
    def heartbeat(self, attempt: Attempt) -> None:
        one = self.tries[attempt.id]
        live = self.live(one)
        assert self.do(self.store.heartbeat([attempt.id], lease=LEASE)) == [attempt.id] * live
        if live:
            one.until = self.now + LEASE

    @rule(attempt=attempts)
    def call(self, attempt: Attempt) -> None:
        one = self.tries[attempt.id]
        call = Transition(
            id=f"call-{next(self.numbers)}",
            attempt=attempt.id,
            index=len(one.calls),
            prompt=int32([1]),
            completion=int32([2]),
            logprobs=float32([-1.0]),
        )
        for _ in range(2):
            assert self.do(self.store.add_transitions([call])) == [self.live(one)]
        if self.live(one):
            one.calls.append(call.id)

    @rule(attempt=attempts, failure=st.sampled_from([None, BROKEN]), retry=st.booleans())
    def finish(self, attempt: Attempt, failure: Failure | None, retry: bool) -> None:
        one, row = self.tries[attempt.id], self.rows[attempt.rollout.id]
        outcome = Outcome(
            attempt=attempt.id,
            fence=attempt.fence,
            failure=failure,
            retry=retry and failure is not None,
        )
        live = self.live(one)
        assert self.do(self.store.finish([outcome])) == [live or one.outcome == outcome]
        if live:
            one.outcome = outcome
            one.state = "failed" if failure else "succeeded"
            row.state = "queued" if outcome.retry and not row.spent else one.state

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row = self.rows[data.draw(st.sampled_from(sorted(self.rows)))]
        open_ = row.state in ("queued", "running")
        assert self.do(self.store.cancel([row.new.id])) == open_
        if open_:
            if row.state == "running":
                row.tries[-1].state = "cancelled"
            row.state = "cancelled"

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE, 3 * LEASE]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # -- what the algorithm does -------------------------------------------------------------------

    @rule(target=commits, n=st.integers(1, 3), old=st.booleans())
    def claim_groups(self, n: int, old: bool):
        if old:
            with pytest.raises(Fenced):
                self.do(self.store.claim_groups("run", self.epoch - 1, n, timeout=0))
            return multiple()
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
        return self.commit_of([group.id for group in groups])

    def commit_of(self, groups: list[str]) -> StepCommit:
        return StepCommit(
            run="run",
            epoch=self.epoch,
            step=self.step,
            groups=groups,
            versions={},
            checkpoint=str(self.step),
            metrics={},
        )

    @rule(target=commits, commit=consumes(commits))
    def commit(self, commit: StepCommit) -> StepCommit:
        if commit.epoch != self.epoch:
            with pytest.raises(Fenced):
                self.do(self.store.commit_step(commit))
        elif commit.step != self.step or not set(commit.groups) <= self.claimed:
            if self.committed.get(commit.step) == commit:
                self.do(self.store.commit_step(commit))
            else:
                with pytest.raises(StoreError):
                    self.do(self.store.commit_step(commit))
        else:
            self.do(self.store.commit_step(commit))
            self.committed[commit.step] = commit
            self.claimed -= set(commit.groups)
            self.trained |= dict.fromkeys(commit.groups, commit.step)
            self.step += 1
        return commit

    @rule()
    def take_over(self) -> None:
        state = self.do(self.store.open_run("run", {}))
        assert (state.epoch, state.step) == (self.epoch + 1, self.step)
        self.epoch += 1
        self.claimed = set()

    @rule()
    def restart(self) -> None:
        self.do(self.store.close())
        self.open()

    # -- what is always true -----------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "store"):
            return
        stored = {row.id: row for row in self.do(self.store.rollouts("run"))}
        assert stored.keys() == self.rows.keys()
        for id, row in self.rows.items():
            assert (stored[id].state, stored[id].attempts) == (row.state, len(row.tries))
        counts = self.do(self.store.counts("run"))
        assert counts.groups_trained == len(self.trained)
        assert counts.groups_settled == len(self.ready())
        assert counts.transitions == sum(len(one.calls) for one in self.tries.values())


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.db"
    asyncio.run(open_store(str(path)).close())
    return path


def test_the_protocol_agrees_with_its_model(template: Path) -> None:
    Machine.template = template
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
