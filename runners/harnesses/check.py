"""Runs a harness against a scripted model, and tells what it calls, sends and needs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from agentrl.config import AgentConfig, RetriesConfig, RunnerConfig
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors.command import CommandExecutor
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.harnesses.observe import RefusingProxy, RequestLog, SeenRequest
from agentrl.runners.harnesses.preset import load_preset, version_of
from agentrl.runners.harnesses.scripted import BUG, PROMPT, ScriptedModel
from agentrl.runners.scoring.verifiers import Verifier
from agentrl.runners.worker import Worker
from agentrl.store import open_store
from agentrl.types import Json, NewRollout, PolicyVersion, Trace, Transition

RUN = "check"
MARK = re.compile(r"ticket-\d+")


class CheckedCall(msgspec.Struct, kw_only=True):
    path: str
    status: int
    size: int  # bytes
    seconds: float  # since the rollout began
    role: str  # empty where it was not recorded
    stream: bool
    tools: int
    fields: list[str]  # of the body
    error: str


class Report(msgspec.Struct, kw_only=True):
    """What a harness did. `exact`: calls recorded with the tokens and log-probs that it got."""

    harness: str
    program: str
    version: str
    tested: bool
    rollouts: int
    fixed: int  # rollouts that ended well, if the bug is fixed
    seconds: float
    served: int  # completions
    recorded: int
    exact: int
    attributed: int  # recorded calls in whose prompt is the mark of their own rollout, and no other
    roles: dict[str, int]  # calls of each
    reached: list[str]  # addresses outside of this machine that it asked for
    failures: list[str]
    calls: list[CheckedCall]

    @property
    def refused(self) -> list[CheckedCall]:
        return [call for call in self.calls if call.status >= 400]

    def problems(self) -> Iterator[str]:
        """One sentence each; none for a harness that can be trained."""
        if not self.served:
            yield f"{self.harness} made no model call that was answered"
        for call in self.refused[:3]:
            yield f"{call.path} was refused: {call.error}"
        yield from self.failures[:3]
        if self.attributed < self.recorded:
            yield f"{self.attributed} of {self.recorded} calls are in the trace of their rollout"
        if self.exact < self.served:
            yield f"{self.exact} of {self.served} calls were recorded exactly"
        if self.reached:
            yield f"it asked for {', '.join(self.reached)}, and a preset should turn that off"
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
) -> Report:
    """Run rollouts of the harness `name`, each of which mends a bug as the scripted model says.

    Raises ConfigError where it is not installed."""
    preset = load_preset(name, root)
    program = preset.find_program(program)
    model, proxy = ScriptedModel(), RefusingProxy()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        store = await stack.enter_async_context(open_store(f"sqlite:///{folder / 'store.db'}"))
        await store.open_run(RUN, {})
        gateway = Gateway(store, RUN, rules=preset.match)
        await asyncio.to_thread(gateway.start)
        stack.push_async_callback(asyncio.to_thread, gateway.close)
        log = RequestLog(gateway.base_url.removesuffix("/v1"))
        for server in (model, proxy, log):
            await server.start()
            stack.push_async_callback(server.close)
        await store.publish(
            PolicyVersion(run=RUN, policy="policy", version=0, base_url=model.base_url, model="m")
        )
        _make_repository(folder / "repository")
        agent = AgentConfig(
            harness=name,
            command=[program],
            folder=str(folder / "repository"),
            env=proxy.environment,
            retries=RetriesConfig(model_error=0),
        )
        executor = CommandExecutor(agent, RunnerConfig(), root=root, gateway=f"{log.url}/v1")
        await executor.start()
        stack.push_async_callback(executor.close)
        execution = AttemptRunner(store, gateway, executor, Verifier(lambda result: 1.0))
        runner = RunnerConfig(concurrency=concurrency)
        tasks = [
            NewRollout(id=f"{n}", run=RUN, group="g", index=n, task=_task(n), timeout=timeout)
            for n in range(rollouts)
        ]
        begun = time.time()
        await store.enqueue(tasks)
        stop = asyncio.Event()
        working = asyncio.create_task(Worker(RUN, execution, runner, name="check").run(stop))
        await store.settled("g")
        seconds = time.time() - begun
        stop.set()
        await working
        ended = await store.rollouts(RUN)
        traces = [await store.trace(row.id) for row in ended]
        calls = [call for trace in traces if trace for call in trace.transitions]
        fixed = "a + b" in (folder / "repository" / "calc.py").read_text()
        version = await version_of(program, folder)
        return Report(
            harness=name,
            program=program,
            version=version,
            tested=preset.was_tested(version),
            rollouts=rollouts,
            attributed=sum(map(_attributed, filter(None, traces))),
            fixed=fixed * sum(row.failure is None for row in ended),
            seconds=round(seconds, 2),
            served=len(model.served),
            recorded=len(calls),
            exact=_exact(calls, model),
            roles={role: sum(call.role == role for call in calls) for role in _roles(calls)},
            reached=sorted(set(proxy.refused)),
            failures=[row.failure.message for row in ended if row.failure],
            calls=list(_checked(log.seen, calls, begun)),
        )


def _task(number: int) -> dict[str, Json]:
    return {"input": f"{PROMPT} (ticket-{number:03d})"}


def _attributed(trace: Trace) -> int:
    own = f"ticket-{int(trace.rollout.id):03d}"
    marks = (set(MARK.findall(msgspec.json.encode(c.messages).decode())) for c in trace.transitions)
    return sum(found == {own} for found in marks)


def _make_repository(folder: Path) -> None:
    folder.mkdir()
    for name, text in BUG.items():
        (folder / name).write_text(text)
    author = ["-c", "user.name=agentrl", "-c", "user.email=agentrl@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


def _roles(calls: list[Transition]) -> list[str]:
    return sorted({call.role for call in calls})


def _exact(calls: list[Transition], model: ScriptedModel) -> int:
    """Recorded calls whose prompt, completion and log-probs are those that were served."""
    served = {tuple(one.tokens): one for one in model.served}
    found = ((call, served.get(tuple(call.completion))) for call in calls)
    return sum(
        one is not None
        and list(call.prompt) == one.prompt
        and [round(float(p), 4) for p in call.logprobs] == one.logprobs
        for call, one in found
    )


def _checked(
    seen: list[SeenRequest], calls: list[Transition], begun: float
) -> Iterator[CheckedCall]:
    """The requests in the order of their arrival. An answered one with a prompt is a call, and the
    recorded calls began in the same order."""
    roles = iter(call.role for call in sorted(calls, key=lambda call: call.started))
    for one in seen:
        body = one.body
        asks = {"messages", "input", "contents"} & body.keys() and "count" not in one.path
        tools = body.get("tools") or []
        yield CheckedCall(
            path=f"{one.method} {one.path}",
            status=one.status,
            size=len(one.raw),
            seconds=round(one.at - begun, 2),
            role=next(roles, "") if asks and one.status == 200 else "",
            stream=bool(body.get("stream")) or "stream" in one.path,
            tools=sum(len(tool.get("functionDeclarations") or (0,)) for tool in tools),
            fields=sorted(body),
            error=one.error[:300],
        )
