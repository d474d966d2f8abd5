"""The page "Train on Harbor tasks", with a tiny policy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.store import open_store
from tests.agentrl.harbor.folders import write_task
from tests.runners.executors.real import needs_podman

pytestmark = [needs_podman, pytest.mark.timeout(400)]
PAGE = Path(__file__).parents[3] / "docs/how-to/environments/harbor.md"
SMALL = ("steps=1", "algorithm.groups=2", "algorithm.group_size=2", "sampling.max_tokens=8")
# An agent in the container, which has no network: it asks the model and keeps its answer.
ASKS = """\
body='{"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}'
wget -O answer --header "authorization: Bearer $OPENAI_API_KEY" \\
  --post-data "$body" $OPENAI_BASE_URL/chat/completions
[ -s answer ] && grep -q choices answer && echo hello > hello.txt
"""


def prepare(folder: Path, image: str) -> None:
    """Write the page's run file, and tasks."""
    (found,) = re.findall(r"```toml\n( *name = .*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "run.toml").write_text(re.sub(r"(?m)^   ", "", found))
    for name in "abcde":
        built = {"environment/Dockerfile": f"FROM {image}\nWORKDIR /app\nCOPY ask /bin/ask\n"}
        write_task(folder / "tasks" / name, {**built, "environment/ask": ASKS})


def agentrl(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *arguments],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, image: str, *settings: str) -> list[Any]:
    """Return the rollouts of a training."""
    prepare(folder, image)
    store = f"store=sqlite:///{folder}/store.db"
    own = [*SMALL, "environment_options.cli=podman", store, *settings]
    agentrl(folder, "train", "run.toml", *own)

    async def rollouts() -> list[Any]:
        async with open_store(f"sqlite:///{folder}/store.db") as store:
            return await store.rollouts("harbor")

    return asyncio.run(rollouts())


def test_solutions_score_full_marks_through_a_gateway(tmp_path: Path, real: str) -> None:
    prepare(tmp_path, real)
    checked = ("doctor", "--environment", "harbor:tasks", "cli=podman", "--tasks", "2", "--json")
    found = json.loads(agentrl(tmp_path, *checked))
    assert found["ok"], found
    assert found["ground_truth"] == 1.0
    assert found["tasks"] == {"train": 4, "heldout": 1}


@pytest.mark.slow
def test_the_policy_with_a_shell_is_trained(
    tmp_path: Path, real: str, tiny_model_dir: Path
) -> None:
    rollouts = train(tmp_path, real, f"policy.model={tiny_model_dir}")
    assert {row.task["id"] for row in rollouts} <= set("abcde")
    assert [row.failure for row in rollouts if row.failure] == []
    assert {row.reward() for row in rollouts} == {0.0}  # a random model solves nothing


@pytest.mark.slow
def test_a_program_of_the_image_reaches_the_model_without_a_network(
    tmp_path: Path, real: str, tiny_model_dir: Path
) -> None:
    command = 'environment_options.command=["sh", "/bin/ask"]'
    rollouts = train(tmp_path, real, f"policy.model={tiny_model_dir}", command)
    assert [row.failure for row in rollouts if row.failure] == []
    assert {row.reward() for row in rollouts} == {1.0}
