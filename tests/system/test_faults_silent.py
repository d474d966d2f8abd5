"""A run that learns nothing says so at once, and does not end as if it had."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentrl.core.errors import TrainingError
from agentrl.core.types import EMPTY, Purpose, Rollout, RolloutState, StepRow
from agentrl.store import open_store
from tests import warm
from tests.system.conftest import ASKS
from tests.system.steady import config, failing_config, run

SMALL = ["algorithm.groups=1", "algorithm.group_size=2", "steps=4", "tasks.heldout="]
SMALL += ["audit.before=true"]  # which no fault of the verifier may end
GOOD = "def verify(task, result): return float(len(result) % 7)\n"
DEAD = """
from openai import OpenAI
ready = OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0)

def agent(text):
    message = {"role": "user", "content": text}
    return ready.chat.completions.create(model="m", messages=[message]).id
"""
CASES = {  # agent, verifier, kind, and what the console says of it
    "the agent raises": (
        "def agent(text): raise ValueError('no luck')", GOOD, "agent_error", "no luck",
    ),
    "the verifier returns None": (
        ASKS.format(times=1), "def verify(task, result): pass", "verifier_error", "None",
    ),
    "the verifier returns text": (
        ASKS.format(times=1), "def verify(task, result): return '0.5'", "verifier_error", "'0.5'",
    ),
    "the model URL is dead": (DEAD, GOOD, "agent_error", "Connection error"),
    "prompts are too long": (
        ASKS.format(times=3000).replace('choices"][0]["message"]["content', 'error"]["code'),
        GOOD, "no_model_call", "context",
    ),
    "the gateway is bypassed": ("def agent(text): return text", GOOD, "no_model_call", "gateway"),
}  # fmt: skip


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "agentrl", "train", "run.toml", *SMALL, *overrides, cwd=folder)


def committed(folder: Path, name: str) -> tuple[list[StepRow], str | None]:
    async def read() -> tuple[list[StepRow], str | None]:
        async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
            state = await store.run(name)
            rows = [row for row in await store.steps(name) if row.committed]
            return rows, state.checkpoint if state else None

    return asyncio.run(read())


def failed(folder: Path) -> list[Rollout]:
    async def read() -> list[Rollout]:
        async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
            rows = await store.rollouts("tiny", purpose=Purpose.TRAIN)
            return [row for row in rows if row.state.terminal]

    return asyncio.run(read())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[:-1]] + [*CASES][-1:],
)
def test_a_run_without_a_usable_rollout_ends_with_the_cause(run_folder: Path, case: str) -> None:
    agent, verifier, kind, message = CASES[case]
    (run_folder / "agent.py").write_text(agent)
    (run_folder / "verifier.py").write_text(verifier)
    result = train(run_folder)
    assert result.returncode == 2, result.stdout + result.stderr
    (said,) = [line for line in result.stdout.splitlines() if line.startswith(f"{kind}: ")]
    assert "failed so far" in said
    assert "agentrl show tiny/train/" in result.stdout
    assert message in result.stdout
    assert "reward -" not in result.stdout
    mistaken = kind == "verifier_error"  # every rollout will have it: the first step says so
    if mistaken:
        assert "verifier.py:verify: the verifier returned" in result.stderr
    elif message != "context":  # then the prompt is named
        assert ("OPENAI_BASE_URL" if message == "gateway" else kind) in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    for row in failed(run_folder):
        assert row.failure is not None
        assert (row.state, row.failure.kind, row.rewards) == (RolloutState.FAILED, kind, [])
    rows, checkpoint = committed(run_folder, "tiny")
    assert len(rows) == (1 if mistaken else 3)
    assert checkpoint is None
    for row in rows:
        assert row.metrics == {
            "rollouts": 2.0, "rollouts/failed": 2.0, f"rollouts/failed/{kind}": 2.0, EMPTY: 2.0,
            "calls/refused": 0.0, "calls/inexact": 0.0, "calls/too_long": 0.0,
        }  # fmt: skip


@pytest.mark.slow
def test_killed_in_between_empty_steps_are_counted_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The third is the third, whoever committed the first two."""
    settings = failing_config(tmp_path, tiny_model_dir)
    steady = [sys.executable, "-m", "tests.system.steady", "failing", str(tmp_path)]
    for done in (1, 2):
        killed = subprocess.run([*steady, str(tiny_model_dir), "commit:1"], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(committed(tmp_path, "steady")[0]) == done
    with pytest.raises(
        TrainingError, match=r"in 3 steps in a row.*rollouts fail: 100%.*agent_error"
    ):
        asyncio.run(run(settings, lambda point: None))
    rows, checkpoint = committed(tmp_path, "steady")
    assert [EMPTY in row.metrics for row in rows] == [True] * 3
    assert checkpoint is None
    with pytest.raises(TrainingError, match="4 steps"):  # it has one more chance
        asyncio.run(run(settings, lambda point: None))


def test_a_run_that_is_mended_goes_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(TrainingError, match="resumes after step 3"):
        asyncio.run(run(failing_config(tmp_path, tiny_model_dir), lambda point: None))
    asyncio.run(run(config(tmp_path, tiny_model_dir), lambda point: None))
    rows, checkpoint = committed(tmp_path, "steady")
    assert [EMPTY in row.metrics for row in rows] == [True] * 3 + [False] * 3
    assert checkpoint is not None


def test_a_run_of_empty_steps_alone_never_succeeds(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Not with fewer steps than the limit, and not when it is started again."""
    short = replace(failing_config(tmp_path, tiny_model_dir), steps=1)
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"1 steps in a row.*with --fresh"):
            asyncio.run(run(short, lambda point: None))


def test_an_evaluation_without_one_result_fails_with_the_cause(run_folder: Path) -> None:
    """Of a run without a model of its own, which evaluates the same way as a checkpoint does."""
    (run_folder / "agent.py").write_text("def agent(text): raise ValueError('no luck')")
    command = ["-m", "agentrl", "eval", "run.toml", "policy.model="]
    command += ["upstreams.far.base_url=http://127.0.0.1:1/v1", "roles.agent=far"]
    evaluated = warm.run(*command, cwd=run_folder)
    assert evaluated.returncode == 2, evaluated.stdout + evaluated.stderr
    assert "every rollout failed, 4 of 4 failed by agent_error" in evaluated.stderr
    assert "no luck" in evaluated.stderr
    assert "Traceback" not in evaluated.stderr
