"""Commands in workspaces of their own, from the executor to the verifier."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import RunConfig, resolve
from agentrl.core.types import Rollout
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.workspace.folders import Workspaces

Play = Callable[..., Awaitable[list[Rollout]]]
CALL = """
import json, os, urllib.request
def call(text):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process and its children, where workspaces are."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    use_temporary(folder, monkeypatch)
    return folder


def use_temporary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def configured(tmp_path: Path, code: str, **tables: Any) -> RunConfig:
    """A run whose agent is a Python program that may use `call(text)`."""
    workspace = {"source": "task.files"}
    data: dict[str, Any] = {
        "name": "test",
        "root": str(tmp_path),
        "output": str(tmp_path / "out"),
        "agent": {"command": [tables.pop("python", sys.executable), "-S", "-c", CALL + code]}
        | tables.pop("agent", {}),
        "workspace": workspace | tables.pop("workspace", {}),
    }
    return resolve(data | tables, source="test")


@pytest.fixture
async def play(bench: Any, tmp_path: Path, temporary: Path) -> Play:
    """Runs a program on tasks; the rollouts. Nothing may be left of their workspaces."""

    async def run(
        code: str,
        *tasks: dict[str, Any],
        verifier: Callable[..., Any] = lambda workspace: 1.0,
        settings: dict[str, Any] | None = None,
        **queue: Any,
    ) -> list[Rollout]:
        config = configured(tmp_path, code, **(settings or {}))
        url = bench.gateway.base_url
        executor = make_executor(config, root=tmp_path, gateway=url, runner="test")
        workspaces = Workspaces(config, root=tmp_path, gateway=url)
        await executor.start()
        try:
            await workspaces.start()
            found: list[Rollout] = await bench.run(
                executor,
                *({"input": "x", "files": {}} | task for task in tasks),
                verifier=verifier,
                workspaces=workspaces,
                limits=config.agent,
                **queue,
            )
            left = {path.name for path in workspaces.folder.iterdir()}
            assert left == {"templates"}
        finally:
            await executor.close()
            await workspaces.close()
        assert not list(temporary.glob("agentrl-workspaces-*/*"))
        return found

    return run
