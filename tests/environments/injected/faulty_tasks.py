"""A task of Inspect with faults in solver, scorer and tool."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

from tests.environments.injected import plugins


@scorer(metrics=[accuracy()])
def right() -> Scorer:
    async def score(state: TaskState, target: Target) -> Any:
        await plugins.injected("scoring")
        if plugins.fault() == ("reward", "no reward"):
            return None
        return Score(value=plugins.paid(1.0))

    return score


@solver
def prepared() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await plugins.injected("set-up")
        return state

    return solve


@solver
def ended() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await plugins.injected("clean-up")
        return state

    return solve


@task
def faulty() -> Task:
    rows = [Sample(id=str(i), input="Say x", target="x") for i in range(5)]
    return Task(
        dataset=MemoryDataset(rows), solver=[prepared(), generate(), ended()], scorer=right()
    )
