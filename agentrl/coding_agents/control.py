"""Check a run file, start and stop a run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from agentrl.coding_agents.runs import Runs, owner_of
from agentrl.config import RunConfig, load, to_toml
from agentrl.errors import ConfigError
from agentrl.store.urls import split_secret

EARLY = 8.0  # seconds in which a start fails that cannot succeed
PATIENCE = 30.0  # seconds until a run has stopped, which ends its step's calls first


def readable(runs: Runs, name: str) -> Path:
    """The path of a run file. Raises ConfigError outside of the folder."""
    path = Path(runs.folder, name).resolve()
    if not path.is_relative_to(runs.folder):
        raise ConfigError(f"{name} is not below {runs.folder}, where this server may read")
    return path


def read(runs: Runs, name: str, overrides: list[str]) -> RunConfig:
    """The settings of a run file, without the values of the agent's environment."""
    config = load(readable(runs, name), overrides)
    env = dict.fromkeys(config.agent.env, "(hidden)")
    return msgspec.structs.replace(config, agent=msgspec.structs.replace(config.agent, env=env))


def check(runs: Runs, name: str, overrides: list[str], *, code: bool) -> str:
    """The settings of a run file that was checked. code: load what it names, too."""
    config = read(runs, name, overrides)
    said = "Names, values and contradictions of the settings are right. Agent, tasks and verifier"
    if not code:
        return f"{said} were not loaded: this server was started without --allow-start.\n\n" + (
            to_toml(msgspec.structs.replace(config, store=split_secret(config.store)[0]))
        )
    words = [str(readable(runs, name)), *overrides, "--dry-run"]
    done = subprocess.run(_agentrl("train", *words), cwd=runs.folder, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, timeout=300)  # fmt: skip
    if done.returncode:
        raise ConfigError(_sentence(done.stderr))
    return f"{said} are loaded when it starts.\n\n{done.stdout}"


async def start(runs: Runs, name: str, overrides: list[str]) -> str:
    """Start or resume a run in a process that outlives this one."""
    config = read(runs, name, overrides)
    log = runs.folder / "runs" / f"{config.name}.log"
    process, begun = _begin([str(readable(runs, name)), *overrides], runs.folder, log)
    for _ in range(int(EARLY * 10)):
        await asyncio.sleep(0.1)
        if (code := process.poll()) is not None:
            said = log.read_bytes()[begun:].decode(errors="replace")
            if code:
                raise ConfigError(_sentence(said))
            return f"Run {config.name!r} has ended already:\n{said[-2000:]}"
    where = log.relative_to(runs.folder)
    return (
        f"Run {config.name!r} is running, as process {process.pid}; it prints into {where}. "
        "list_runs and metrics show its progress; stop_run stops it, and starting it again resumes."
    )


def _begin(words: list[str], folder: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The process of `agentrl train`, in a session of its own, and where in `log` it prints."""
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as out:
        out.write(f"\n$ agentrl train {' '.join(words)}\n".encode())
        begun = out.tell()
        out.flush()
        command, apart = _agentrl("train", *words), subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=out, stdin=apart, start_new_session=True
        )
        return process, begun


async def stop(runs: Runs, run: str) -> str:
    """Stop a live run like Ctrl-C does: what it has trained is kept."""
    async with runs.opened(run) as (_, state):
        owner = owner_of(state)
        lives = owner.lives() if owner and state.owned_until else False
    if owner is None or lives is False:
        return f"Run {run!r} is not running."
    if lives is None:
        raise ConfigError(f"run {run!r} runs on {owner.host}: stop process {owner.pid} there")
    os.kill(owner.pid, signal.SIGINT)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        await asyncio.sleep(0.1)
        if not owner.lives():
            return f"Run {run!r} has stopped; starting it again resumes after its last checkpoint."
    return f"Run {run!r} was told to stop and has not ended yet; list_runs says when it has."


def _agentrl(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentrl", *words]


def _sentence(output: str) -> str:
    """The last line that a command printed, which is its error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it failed and printed nothing"
