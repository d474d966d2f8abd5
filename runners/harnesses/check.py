"""Runs a harness against a scripted model, and tells what it calls, sends and needs."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import AgentConfig, RunConfig, RunnerConfig, WorkspaceConfig
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors.command import CommandExecutor
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.harnesses.observe import RequestLog, SeenRequest
from agentrl.runners.harnesses.preset import load_preset, version_of
from agentrl.runners.harnesses.scripted import BUG, PROMPT, ScriptedModel
from agentrl.runners.scoring.verifiers import Verifier
from agentrl.runners.worker import Worker
from agentrl.runners.workspace.folders import Workspace, Workspaces
from agentrl.store import open_store
from agentrl.types import NewRollout, PolicyVersion, Rollout, Transition

RUN = "check"
MARK = re.compile(r"ticket-\d+")  # in the prompt of a rollout, and nowhere else


@dataclass
class Report:
    """What a harness did."""

    harness: str
    program: str
    version: str
    tested: bool  # its preset was, with this version
    seconds: float
    begun: float  # unix seconds
    model: ScriptedModel
    rollouts: list[Rollout]
    calls: list[Transition]  # that were recorded
    seen: list[SeenRequest]

    @property
    def served(self) -> int:
        return len(self.model.served)

    @property
    def exact(self) -> int:
        """Calls that were recorded with the tokens and log-probs that were served, in the trace of
        their own rollout."""
        served = {tuple(one.tokens): one for one in self.model.served}
        numbers = {row.attempt: f"ticket-{row.index:03d}" for row in self.rollouts}
        return sum(
            (one := served.get(tuple(call.completion))) is not None
            and list(call.prompt) == one.prompt
            and [round(float(p), 4) for p in call.logprobs] == one.logprobs
            and set(MARK.findall(str(call.messages))) == {numbers[call.attempt]}
            for call in self.calls
        )

    @property
    def roles(self) -> dict[str, int]:
        """The number of calls of each role."""
        found = sorted(call.role for call in self.calls)
        return {role: found.count(role) for role in found}

    @property
    def refused(self) -> list[SeenRequest]:
        return [one for one in self.seen if one.status >= 400]

    def problems(self) -> Iterator[str]:
        """One sentence each; none for a harness that can be trained."""
        if not self.served:
            yield f"{self.harness} made no model call that was answered"
        for one in self.refused[:3]:
            yield f"{one.path} was refused: {one.error[:300]}"
        for failed in [row.failure for row in self.rollouts if row.failure][:3]:
            yield failed.message
        if self.exact < self.served:
            yield f"{self.exact} of {self.served} calls were recorded exactly"
        if any(row.failure is None and row.reward() != 1 for row in self.rollouts):
            yield "its tools did not mend the bug as the model said"
        if not self.tested:
            yield f"version {self.version or '?'} is not one that its preset was tested with"


async def check(
    name: str,
    root: Path,
    *,
    program: str = "",
    rollouts: int = 1,
    concurrency: int = 1,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Report:
    """Run rollouts of the harness `name`, each of which mends a bug as the scripted model says.

    Raises ConfigError where it is not installed."""
    preset = load_preset(name, root)
    program, model = preset.find_program(program), ScriptedModel()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        store = await stack.enter_async_context(open_store(f"sqlite:///{folder / 'store.db'}"))
        await store.open_run(RUN, {})
        url = await stack.enter_async_context(model.serving())
        await store.publish(
            PolicyVersion(run=RUN, policy="policy", version=0, base_url=url, model="m")
        )
        log = RequestLog()
        gateway = Gateway(store, RUN, rules=preset.match, as_sent=True, watch=log.watch)
        await asyncio.to_thread(gateway.start)
        stack.push_async_callback(asyncio.to_thread, gateway.close)
        config = RunConfig(
            agent=AgentConfig(harness=name, command=[program], env=dict(env or {})),
            workspace=WorkspaceConfig(source="task.files", folder=str(folder)),
            runner=RunnerConfig(concurrency=concurrency),
        )
        executor = CommandExecutor(config.agent, config.runner, root=root, gateway=gateway.base_url)
        workspaces = Workspaces(config, root=root, gateway=gateway.base_url)
        for started in (executor, workspaces):
            await started.start()
            stack.push_async_callback(started.close)
        execution = AttemptRunner(
            store, gateway, executor, Verifier(_is_fixed), workspaces=workspaces
        )
        worker, stop = Worker(RUN, execution, config.runner, name=RUN), asyncio.Event()
        begun, asked = time.time(), []
        for n in range(rollouts):
            task = {"input": f"{PROMPT} (ticket-{n:03d})", "files": BUG}
            new = NewRollout(id=f"{n}", run=RUN, group="g", index=n, task=task, timeout=timeout)
            asked.append(new)
        await store.enqueue(asked)
        working = asyncio.create_task(worker.run(stop))
        await store.settled("g")
        seconds = time.time() - begun
        stop.set()
        await working
        ended = await store.rollouts(RUN)
        traces = [await store.trace(row.id) for row in ended]
        calls = [call for trace in traces if trace for call in trace.transitions]
        roles = iter(call.role for call in sorted(calls, key=lambda call: call.started))
        for one in log.seen:  # calls began in the order of their requests
            one.role = next(roles, "") if one.asks else ""
        version = await version_of(program, folder)
        return Report(
            harness=name,
            program=program,
            version=version,
            tested=preset.was_tested(version),
            seconds=seconds,
            begun=begun,
            model=model,
            rollouts=ended,
            calls=calls,
            seen=log.seen,
        )


def _is_fixed(workspace: Workspace) -> float:
    return float("a + b" in (workspace.path / "calc.py").read_text())
