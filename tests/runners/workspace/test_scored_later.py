"""A run whose runner stops, or is killed, before it was scored: the next one only scores it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from agentrl.core.types import NewRollout, RolloutState
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.workspace.folders import Workspace, Workspaces
from tests.runners.conftest import Start
from tests.runners.test_main import RUN, TASK, open_run
from tests.runners.workspace.conftest import configured

SCORES = """
import os, signal
from pathlib import Path

def verify(workspace, trace, result):
    made = (workspace.path / "made").read_text()
    if not (killed := Path("{folder}/killed")).exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float((made, result, len(trace.transitions)) == ("by the agent", "said", 1))
"""


async def test_a_rollout_that_was_being_scored_is_scored_by_the_next_runner(
    store: Any, model: Any, tmp_path: Path, runner: Start
) -> None:
    (tmp_path / "scores.py").write_text(SCORES.format(folder=tmp_path))
    config = configured(
        tmp_path,
        "call('x'); open('made', 'w').write('by the agent'); print('said')",
        verifier={"path": "scores.py:verify"},
        runner={"lease": 1.0},
    )
    await open_run(store, model, config)
    await store.enqueue([NewRollout(id="a", run=RUN, group="a", index=0, task=TASK)])
    first = await runner(RUN)
    assert await first.wait() == -signal.SIGKILL
    await runner(RUN)
    assert await store.settled("a", timeout=60)
    (rollout,) = await store.rollouts(RUN)
    assert (rollout.state, rollout.reward()) == (RolloutState.SUCCEEDED, 1.0)
    assert rollout.attempts > 1
    assert len(model.requests) == 1  # the agent ran once


async def test_one_that_was_given_back_is_scored_and_not_run_again(
    bench: Any, tmp_path: Any
) -> None:
    code = "call('x'); open('made', 'w').write('by the agent'); os.unlink('old'); print('said')"
    config = configured(tmp_path, code)
    url = bench.gateway.base_url
    spaces = Workspaces(config, root=tmp_path, gateway=url)
    executor = make_executor(config, root=tmp_path, gateway=url, runner="test")
    await executor.start()
    await spaces.start()
    seen, scoring = [], asyncio.Event()

    async def hang(workspace: Workspace) -> float:
        scoring.set()
        await asyncio.sleep(60)
        return 0.0

    def verify(workspace: Workspace, trace: Any, result: Any) -> float:
        names = sorted(path.name for path in workspace.path.iterdir())
        seen.append((names, (workspace.path / "made").read_text(), result, len(trace.transitions)))
        return 0.5

    try:
        await bench.enqueue({"input": "x", "files": {"old": "x"}})
        how: dict[str, Any] = {"workspaces": spaces, "drain": 0.0}
        stop = asyncio.Event()
        working = asyncio.create_task(bench.worker(executor, hang, **how).run(stop))
        await scoring.wait()
        stop.set()
        await working
        stop = asyncio.Event()
        working = asyncio.create_task(bench.worker(executor, verify, **how).run(stop))
        assert await bench.store.settled("g-r0", timeout=20.0)
        stop.set()
        await working
        assert [path.name for path in spaces.folder.iterdir()] == ["templates"]
    finally:
        await executor.close()
        await spaces.close()
    (rollout,) = await bench.store.rollouts("test")
    assert (rollout.state, rollout.reward()) == (RolloutState.SUCCEEDED, 0.5)
    assert seen == [([".git", "made"], "by the agent", "said", 1)]
    assert len(bench.model.requests) == 1
    assert rollout.attempts == 2
