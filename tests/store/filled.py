"""A small store in which everything has happened: what the documented queries are asked of.

Run `staff`: three training steps of two groups of four rollouts, each of two calls (the agent asks
a tool, then answers) with rewards of every scope; an evaluation before the first step and after the
last; a lost runner, a late call, a crash, a group that waits to be trained and one in the queue.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.core.types import (
    Attempt,
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    PolicyVersion,
    Purpose,
    Reward,
    Scope,
    Span,
    StepCommit,
    Transition,
    float32,
    int32,
)
from agentrl.store import Store, open_store

START = 1_700_000_000.0
TOOLS = [{"type": "function", "function": {"name": "query"}}]
STEPS, GROUPS, SIZE = 3, 2, 4
EASY = "staff/train/g0000005"  # every rollout of it is right


class Clock:
    """Moved by hand: how often a store looks at it is its own affair."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


async def fill(path: Path) -> Path:
    """The store at `path`, always the same but for the names of attempts."""
    clock = Clock()
    async with open_store(str(path), clock=clock) as store:
        await store.open_run("staff", {"seed": 1, "steps": STEPS + 1})
        await _evaluate(store, clock, 0, right=0)
        for step in range(STEPS):
            await store.publish(PolicyVersion(run="staff", policy="policy", **served(step)))
            await _train(store, clock, step)
            clock.now += 3600
        await _evaluate(store, clock, STEPS, right=2)
        await store.enqueue(_group("staff/train/g0000006", STEPS))
        await _work(store, clock, SIZE, STEPS)
        await store.enqueue(_group("staff/train/g0000007", STEPS))
        (lost,) = await store.claim(1, runner="runner-2", lease=5)
        clock.now += 6
        await store.add_transitions([_call(lost, 0, STEPS)])  # late
        await store.claim(1, runner="runner-1", lease=3600)
    return path


def served(version: int) -> dict[str, object]:
    return {"version": version, "base_url": "http://127.0.0.1:8000/v1", "model": f"v{version}"}


async def _train(store: Store, clock: Clock, step: int) -> None:
    names = [f"staff/train/g{number:07d}" for number in range(step * GROUPS, (step + 1) * GROUPS)]
    for name in names:
        await store.enqueue(_group(name, step))
    await _work(store, clock, GROUPS * SIZE, step)
    await store.claim_groups("staff", 1, GROUPS)
    metrics = {"reward/mean": 0.25 * (step + 1), "time/rollouts": 2.0, "time/update": 1.0}
    await store.commit_step(
        StepCommit(
            run="staff",
            epoch=1,
            step=step,
            groups=names,
            versions={"policy": step + 1},
            checkpoint=f"runs/staff/checkpoints/{step + 1:06d}",
            metrics=metrics,
        )
    )


async def _evaluate(store: Store, clock: Clock, step: int, *, right: int) -> None:
    name = f"staff/eval/{step:06d}/score"
    await store.enqueue(_group(name, step, purpose=Purpose.EVAL, priority=1))
    await _work(store, clock, SIZE, step)
    await store.log("staff", step, {"eval/score": right / SIZE})


async def _work(store: Store, clock: Clock, n: int, step: int) -> None:
    for attempt in await store.claim(n, runner="runner-1", lease=60):
        await store.add_transitions([_call(attempt, 0, step)])
        clock.now += 0.25
        if attempt.rollout.index == 3 and step == 1:
            crash = Failure(kind=ErrorKind.AGENT, message="KeyError: 'team'", traceback="...")
            await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, failure=crash)])
            continue
        await store.add_transitions([_call(attempt, 1, step)])
        await store.finish([_success(attempt, step)])


def _group(name: str, step: int, **more: object) -> list[NewRollout]:
    task = {"id": name, "input": "What is the team of Ada Berg?", "answer": "legal"}
    return [
        NewRollout(
            id=f"{name}/{index:04d}",
            run="staff",
            group=name,
            index=index,
            task=task,
            step=step,
            **more,  # type: ignore[arg-type]
        )
        for index in range(SIZE)
    ]


def _call(attempt: Attempt, index: int, version: int) -> Transition:
    question = [{"role": "user", "content": "What is the team of Ada Berg?"}]
    asked = {"role": "assistant", "content": "query(team)"}
    table = {"role": "tool", "content": "legal"}
    first, second = [101, 7592, 102], [101, 7592, 102, 5, 6, 201, 202]
    return Transition(
        id=f"{attempt.rollout.id}/{attempt.fence}/{index}",
        attempt=attempt.id,
        index=index,
        prompt=int32(second if index else first),
        completion=int32([7, 8, 9] if index else [5, 6]),
        logprobs=float32([-0.5, -0.25, -1.0] if index else [-0.5, -1.5]),
        role="writer" if index else "planner",
        version=max(0, version - (attempt.rollout.index == 0)),  # the first was sampled ahead
        finish="length" if attempt.rollout.index == 2 and index else "stop",
        messages=[*question, asked, table] if index else question,
        tools=TOOLS,
        answer={"role": "assistant", "content": "legal"} if index else asked,
        started=START + index,
        seconds=0.2 + 0.1 * index,
    )


def _success(attempt: Attempt, step: int) -> Outcome:
    value = float(attempt.rollout.index < step + 1 or attempt.rollout.group == EASY)
    tool = {"start": 10**9, "end": 10**9 + 40_000_000, "ok": attempt.rollout.index != 1}
    return Outcome(
        attempt=attempt.id,
        fence=attempt.fence,
        result="legal" if value else "sales",
        rewards=[
            Reward(value=value),
            Reward(value=0.5, name="brief", scope=Scope.ROLE, target="writer"),
            Reward(
                value=1.0,
                name="valid_call",
                scope=Scope.TRANSITION,
                target=f"{attempt.rollout.id}/{attempt.fence}/0",
            ),
        ],
        spans=[
            Span(id="a" * 16, attempt=attempt.id, parent=None, name="agent", kind="agent", **tool),
            Span(
                id="b" * 16, attempt=attempt.id, parent="a" * 16, name="query", kind="tool", **tool
            ),
        ],
    )
