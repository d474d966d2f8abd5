"""Records as a store would return them, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.types import Purpose, Reward, Rollout, RolloutState, Transition

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
