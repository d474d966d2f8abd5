"""Runs a client against the real store, runner and gateway in front of the scripted policy."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.config import AgentConfig, PolicyConfig, RunConfig, RunnerConfig
from agentrl.core.config.agents import WorkspaceConfig
from agentrl.core.types import Json, NewRollout, PolicyVersion, Transition
from agentrl.runners.harness import load_preset
from agentrl.runners.harness_check import RequestLog, SeenRequest
from agentrl.runners.main import Worker, attempt_runner
from agentrl.store import open_store
from tests.benchmarks.clients.install import HERE, Client
from tests.benchmarks.clients.policy import CASES, Asked, ScriptedPolicy, questions

RUN = "clients"
# A harness ends with the first answer that calls no tool.
ASKED_ONCE = tuple(case for case, items in CASES.items() if {*items} - {"thought", "words"})
TIMEOUT = 240.0  # seconds for all conversations of a process


@dataclass(slots=True)
class Played:
    """What one client did, streamed or not."""

    client: str
    streamed: bool
    cases: tuple[str, ...] = tuple(CASES)
    outcomes: dict[str, str] = field(default_factory=dict)  # case -> the client's error, if any
    seen: list[SeenRequest] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    calls: list[Transition] = field(default_factory=list)  # in the order in which they started
    console: list[str] = field(default_factory=list)


async def play(client: Client, *, streamed: bool) -> Played:
    """Play all cases: in one process, or a harness with a process for each."""
    policy, log, played = ScriptedPolicy(), RequestLog(), Played(client.name, streamed)
    if client.harness:
        played.cases = ASKED_ONCE
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _console(played):
        config = _config(client, Path(folder))
        async with open_store(f"sqlite:///{folder}/store.db") as store, policy.serving() as url:
            await store.open_run(RUN, {})
            served = PolicyVersion(run=RUN, policy="policy", version=1, base_url=url, model="m")
            await store.publish(served)
            begun = attempt_runner(store, RUN, config, Path(folder), RUN, None, _score, [log])
            async with begun as execution:
                worker, stop = Worker(RUN, execution, config.runner, name=RUN), asyncio.Event()
                await store.enqueue(_queue(client, streamed))
                working = asyncio.create_task(worker.run(stop))
                settled = asyncio.create_task(store.settled("g"))
                await asyncio.wait((settled, working), return_when=asyncio.FIRST_COMPLETED)
                settled.cancel()
                stop.set()
                await working
            for row in await store.rollouts(RUN):
                played.calls += (await store.calls([row.id])).get(row.id, [])
                failed = row.failure.message[-600:] if row.failure else ""
                if row.id in CASES:
                    played.outcomes[row.id] = failed
                else:
                    played.outcomes = row.result if isinstance(row.result, dict) else {"": failed}
    played.calls.sort(key=lambda call: call.started)
    played.seen, played.asked = log.seen, policy.asked
    return played


def _config(client: Client, folder: Path) -> RunConfig:
    common: dict[str, Any] = {
        "policy": PolicyConfig(model="m", unsupported_roles="as_sent"),
        "runner": RunnerConfig(concurrency=1),
    }
    if client.harness:
        program = (
            client.folder / "node_modules" / ".bin" / load_preset(client.harness, HERE).program
        )
        workspace: Any = {"workspace": WorkspaceConfig(source="task.files")}
        agent = AgentConfig(harness=client.harness, command=[str(program.absolute())])
        return RunConfig(agent=agent, **common, **workspace)
    # Node looks for packages above the program. Others of the same folder may run meanwhile.
    programs = client.folder / "agents" / folder.name
    shutil.copytree(HERE / "agents", programs, dirs_exist_ok=True)
    python = client.folder / "bin" / "python"
    start = ["node"] if client.npm else [str(python.absolute())]
    command = [*start, str((programs / client.program).absolute()), client.argument]
    return RunConfig(agent=AgentConfig(command=command, env={"HOME": str(folder)}), **common)


def _score(result: Json) -> float:
    return 1.0


def _queue(client: Client, streamed: bool) -> list[NewRollout]:
    common: Any = {"run": RUN, "group": "g", "timeout": TIMEOUT}
    if client.harness:
        files = {"README.md": "Nothing is here."}
        return [
            NewRollout(
                id=case, index=n, task={"input": questions(case)[0], "files": files}, **common
            )
            for n, case in enumerate(ASKED_ONCE)
        ]
    task = {"streamed": streamed, "cases": {case: questions(case) for case in CASES}}
    return [NewRollout(id="all", index=0, task={"input": task}, **common)]


@contextmanager
def _console(played: Played) -> Iterator[None]:
    """Collect what the runner writes on the console."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            played.console.append(record.getMessage())

    lines, logger = Lines(logging.WARNING), logging.getLogger("agentrl")
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)


if __name__ == "__main__":  # for a look at one client: NAME [streamed]
    from tests.benchmarks.clients.install import clients

    (one,) = clients(sys.argv[1:2])
    result = asyncio.run(play(one, streamed="streamed" in sys.argv))
    for case, outcome in result.outcomes.items():
        print(case or "all", outcome or "ended")
    for request in result.seen:
        print(request.path, request.status, request.error[:300])
    print(*result.console, sep="\n")
