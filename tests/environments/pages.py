"""The pages of docs/how-to/environments: a recipe each, whose files the tests use as they are."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import load
from agentrl.core.types import StepRow
from agentrl.store import open_store

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```\w+\n# (\S+\.(?:py|toml))\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python(name: str) -> Path:
    """The interpreter that has the package, or a skipped test."""
    if not (ROOT / f".environments/{name}/.installed").is_file():
        pytest.skip("its environment is installed by `make test-environments`")
    return ROOT / f".environments/{name}/bin/python"


def figures(name: str) -> dict[str, Any]:
    """What `agentrl doctor --environment` finds in that interpreter."""
    command = [python(name), "-m", f"tests.environments.{name}.figures"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def played(
    name: str, what: str, replies: dict[str, list[Any]], root: Path = ROOT, **options: Any
) -> dict[str, Any]:
    """What was stored of a rollout with scripted replies by role, the last of each again and
    again. `root`: the run file's folder."""
    given = [str(root), f"{name}:{what}", json.dumps(options), json.dumps(replies)]
    command = [python(name), "-m", "tests.environments.played", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def write_files(name: str, folder: Path) -> Path:
    """Write the files of a page into `folder`, and return its run file."""
    page = (ROOT / f"docs/how-to/environments/{name}.md").read_text(encoding="utf-8")
    for file, text in BLOCK.findall(page):
        (folder / file).write_text(text)
    return folder / "run.toml"


async def trained(name: str, folder: Path, policy: str, *settings: str) -> list[StepRow]:
    """The steps of a training of the page's run file. `policy`: code of a function `build` that
    writes a tiny policy in place of the page's model."""
    file, own = write_files(name, folder), f"environment_options.python={python(name)}"
    (folder / "policy.py").write_text(policy)
    tiny = ("policy.model=", "policy.build=policy.py:build", f"output={folder / 'out'}")
    settings = (own, *tiny, *settings)
    command = [sys.executable, "-m", "agentrl", "train", str(file), *settings]
    run: Any = {"cwd": folder, "capture_output": True, "text": True, "check": False}
    done = await asyncio.to_thread(subprocess.run, command, **run)
    assert done.returncode == 0, done.stdout + done.stderr
    config = load(file, list(settings))
    async with open_store(config.store) as store:
        return await store.steps(config.name)
