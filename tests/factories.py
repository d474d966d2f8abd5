"""Records as a store would return them, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig, resolve
from agentrl.types import (
    Group,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    StepCommit,
    Transition,
    float32,
    int32,
)

Register = Callable[[str, str, str], None]  # `conftest.register`
RUN_FILE = """
[agent]
path = "agent.py:agent"
[tasks]
train = "tasks.jsonl"
[verifier]
path = "verifier.py:verify"
[policy]
model = "model"
"""


def run_folder(
    folder: Path,
    agent: str = "agent = lambda text: text\n",
    verifier: str = "def verify(task, result): return 1.0\n",
    tasks: str = '{"input": "x"}\n',
    more: str = "",
) -> Path:
    """The folder with a run file, which begins with `more`, and what it names but the model."""
    files = {"agent.py": agent, "verifier.py": verifier, "tasks.jsonl": tasks}
    for name, text in (files | {"run.toml": more + RUN_FILE}).items():
        (folder / name).write_text(text)
    return folder


def rollout(
    id: str = "r", calls: Iterable[Transition] = (), rewards: Iterable[Reward] = (), **fields: Any
) -> Rollout:
    """A rollout for training whose only attempt, of the same name, has succeeded."""
    known: dict[str, Any] = {
        "run": "run", "group": "g", "index": 0, "task": {}, "purpose": Purpose.TRAIN,
        "state": RolloutState.SUCCEEDED, "step": 0, "attempts": 1, "attempt": id, "result": None,
        "failure": None, "rewards": list(rewards), "transitions": list(calls),
    }  # fmt: skip
    return Rollout(id=id, **known | fields)


def call(
    id: str = "t",
    prompt: Iterable[int] = (1,),
    completion: Iterable[int] = (2,),
    *,
    logprob: float = -1.0,
    **fields: Any,
) -> Transition:
    """The first call of the attempt `a`, each of whose tokens has this log-prob."""
    said = int32(completion)
    known: dict[str, Any] = {"attempt": "a", "index": 0, "logprobs": float32([logprob] * len(said))}
    return Transition(id=id, prompt=int32(prompt), completion=said, **known | fields)


def group(*rollouts: Rollout, id: str = "g", run: str = "run", step: int = 0) -> Group:
    return Group(id=id, run=run, step=step, rollouts=list(rollouts))


def commit(step: int = 0, groups: Sequence[str] = (), **fields: Any) -> StepCommit:
    """What a step of the run `r` leaves in the store."""
    known: dict[str, Any] = {"run": "r", "epoch": 1, "versions": {}, "checkpoint": None}
    return StepCommit(step=step, groups=[*groups], **known | {"metrics": {}} | fields)


def config(folder: Path | None = None, **tables: Any) -> RunConfig:
    """The run `r` with these tables; all that it names and writes is in the folder."""
    own = {} if folder is None else {"root": str(folder), "output": str(folder / "out")}
    return resolve({"name": "r"} | own | tables, source="run.toml")
