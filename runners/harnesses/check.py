"""Runs a harness against a scripted model, and reports its requests and whether capture works."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from agentrl.config import AgentConfig, PolicyConfig, RunConfig, RunnerConfig
from agentrl.config.agents import WorkspaceConfig
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.upstream import Upstream
from agentrl.runners.harnesses.preset import load_preset, version_of
from agentrl.runners.harnesses.scripted import BUG, PROMPT, ScriptedModel
from agentrl.runners.main import attempt_runner
from agentrl.runners.worker import Worker
from agentrl.runners.workspace.folders import Workspace
from agentrl.store import open_store
from agentrl.types import Json, NewRollout, PolicyVersion, Rollout, Transition

RUN = "check"
MARK = re.compile(r"ticket-\d+")  # unique mark in the prompt of each rollout


@dataclass(slots=True)
class SeenRequest:
    """A request of the harness and the status of its response."""

    at: float  # unix seconds
    path: str  # method and path, with the query
    size: int  # bytes
    body: dict[str, Json]  # empty if it is not a JSON object
    status: int = 0
    error: str = ""  # response body of a refusal
    role: str = ""  # of the recorded call, if any

    @property
    def asks(self) -> bool:
        """Whether it is a successful model call."""
        prompt = {"messages", "input", "contents"} & self.body.keys()
        return bool(prompt) and self.status == 200 and "count" not in self.path

    @property
    def tools(self) -> int:
        offered = self.body.get("tools") or ()
        return sum(len(tool.get("functionDeclarations") or (tool,)) for tool in offered)


class RequestLog(Feature):
    """Records all requests to a gateway, as its `watch` middleware."""

    def __init__(self) -> None:
        self.seen: list[SeenRequest] = []

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        app.middlewares.append(self._watch)

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        raw, body = await request.read(), {}
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            body = msgspec.json.decode(raw, type=dict)
        path = f"{request.method} {request.path_qs}"
        one = SeenRequest(time.time(), path, len(raw), body)
        self.seen.append(one)
        answer = await handler(request)
        one.status = answer.status
        if answer.status >= 400 and isinstance(answer, web.Response):
            one.error = answer.text or ""
        return answer


@dataclass
class Report:
    """The result of a check."""

    harness: str
    program: str
    version: str
    tested: bool  # the preset was tested with this version
    seconds: float
    begun: float  # unix seconds
    answers: list[Transition]  # as served by the scripted model
    rollouts: list[Rollout]
    calls: list[Transition]  # as recorded by the gateway
    seen: list[SeenRequest]

    @property
    def served(self) -> int:
        return len(self.answers)

    @property
    def exact(self) -> int:
        """Number of calls recorded with the served tokens and log-probs, in the right rollout."""
        served = {tuple(one.completion): one for one in self.answers}
        numbers = {row.attempt: f"ticket-{row.index:03d}" for row in self.rollouts}
        return sum(
            (one := served.get(tuple(call.completion))) is not None
            and (call.prompt, call.logprobs) == (one.prompt, one.logprobs)
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
        """Yield a sentence for each problem; none for a harness that can be trained."""
        if not self.served:
            yield f"{self.harness} made no successful model call"
        for one in self.refused[:3]:
            yield f"{one.path} was refused: {one.error[:300]}"
        for failed in [row.failure for row in self.rollouts if row.failure][:3]:
            yield failed.message
        if self.exact < self.served:
            yield f"{self.exact} of {self.served} calls were recorded exactly"
        if any(row.failure is None and row.reward() != 1 for row in self.rollouts):
            yield "its tools did not apply the model's fix of the bug"
        if not self.tested:
            yield f"its preset was not tested with version {self.version or '?'}"


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
    """Run rollouts of the harness `name`, in each of which the scripted model fixes a bug.

    Raises ConfigError if the harness is not installed."""
    preset = load_preset(name, root)
    program, model, log = preset.find_program(program), ScriptedModel(), RequestLog()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tables: Any = {"workspace": WorkspaceConfig(source="task.files", folder=folder)}
        config = RunConfig(
            agent=AgentConfig(harness=name, command=[program], env=dict(env or {})),
            policy=PolicyConfig(model="m", unsupported_roles="as_sent"),
            runner=RunnerConfig(concurrency=concurrency),
            **tables,
        )
        version = await version_of(program, Path(folder))
        async with open_store(f"sqlite:///{folder}/store.db") as store, model.serving() as url:
            await store.open_run(RUN, {})
            served = PolicyVersion(run=RUN, policy="policy", version=0, base_url=url, model="m")
            await store.publish(served)
            started = attempt_runner(store, RUN, config, root, RUN, None, _is_fixed, [log])
            async with started as execution:
                worker, stop = Worker(RUN, execution, config.runner, name=RUN), asyncio.Event()
                begun = time.time()
                await store.enqueue(_queue(rollouts, timeout))
                working = asyncio.create_task(worker.run(stop))
                settled = asyncio.create_task(store.settled("g"))
                await asyncio.wait((settled, working), return_when=asyncio.FIRST_COMPLETED)
                settled.cancel()
                seconds = time.time() - begun
                stop.set()
                await working
            ended = await store.rollouts(RUN)
            traces = [await store.trace(row.id) for row in ended]
    calls = [call for trace in traces if trace for call in trace.transitions]
    roles = iter(call.role for call in sorted(calls, key=lambda call: call.started))
    for one in log.seen:  # in the order of the calls
        one.role = next(roles, "") if one.asks else ""
    known = (name, program, version, preset.was_tested(version), seconds, begun)
    return Report(*known, answers=model.served, rollouts=ended, calls=calls, seen=log.seen)


def _queue(rollouts: int, timeout: float) -> list[NewRollout]:
    tasks = [{"input": f"{PROMPT} (ticket-{n:03d})", "files": BUG} for n in range(rollouts)]
    return [
        NewRollout(id=f"{n}", run=RUN, group="g", index=n, task=task, timeout=timeout)
        for n, task in enumerate(tasks)
    ]


def _is_fixed(workspace: Workspace) -> float:
    return float("a + b" in (workspace.path / "calc.py").read_text())
