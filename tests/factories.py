"""Records as a store would return them, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import AgentRLError
from agentrl.core.types import (
    Attempt,
    Group,
    NewRollout,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    StepCommit,
    Transition,
    float32,
    int32,
)
from agentrl.store import Store

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


def refused(*arguments: str) -> str:
    """What `agentrl ARGUMENTS`, run in this process, is refused with."""
    result = CliRunner().invoke(cli, arguments)
    if isinstance(result.exception, SystemExit):  # of click
        assert result.exit_code == 2
        return result.output
    assert isinstance(result.exception, AgentRLError), result.output
    return str(result.exception)


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


def queue(group: str, count: int = 1, run: str = "r", **fields: Any) -> list[NewRollout]:
    """Rollouts of a group, to be enqueued: `group/0` and so on."""
    known: dict[str, Any] = {"run": run, "group": group, "task": {}}
    return [NewRollout(id=f"{group}/{i}", index=i, **known | fields) for i in range(count)]


async def play(
    store: Store,
    rollouts: Sequence[NewRollout],
    played: Callable[[Attempt], tuple[Sequence[Transition], dict[str, Any]]],
) -> None:
    """Enqueue, run and end rollouts of one run. played: the calls of an attempt, and the fields of
    its outcome."""
    await store.enqueue([*rollouts])
    for attempt in await store.claim(len(rollouts), runner="w", lease=60.0, run=rollouts[0].run):
        calls, fields = played(attempt)
        await store.add_transitions([*calls])
        await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, **fields)])
