"""Checks a harness: runs it against a scripted model, and reports its requests and whether
recording works.

The scripted model server records exactly which tokens it has served. Every harness gets the same
script: run the test, fix `calc.py`, report success.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from agentrl.core.config import AgentConfig, PolicyConfig, RunConfig, RunnerConfig
from agentrl.core.config.agents import WorkspaceConfig
from agentrl.core.http import listen
from agentrl.core.types import Json, NewRollout, PolicyVersion, Rollout, Transition, float32, int32
from agentrl.runners.apis.base import CHAT
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway import recorded
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.request import read_request
from agentrl.runners.gateway.upstream import Upstream
from agentrl.runners.harness import load_preset, version_of
from agentrl.runners.main import Worker, attempt_runner
from agentrl.runners.workspace.folders import Workspace
from agentrl.store import open_store

BUG = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": (
        "import unittest\n\nimport calc\n\n\nclass AddTest(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(calc.add(2, 3), 5)\n"
    ),
}
PROMPT = "The unit test test_calc.py in this repository fails. Fix calc.py so that it passes."
COMMANDS = (
    "python3 -m unittest -q test_calc",
    # The printed text signals to mini-swe-agent that the task is complete.
    "sed -i 's/a - b/a + b/' calc.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
EDIT = """calc.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""  # for harnesses that parse edits from the answer
SHELL = re.compile("bash|shell|exec|command", re.IGNORECASE)


class ScriptedModel:
    """Serves chat completions with one token id per four bytes and random log-probs."""

    def __init__(self) -> None:
        self.served: list[Transition] = []
        self._random = random.Random(0)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve inside the block; yields the URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner, url = await listen(app, "127.0.0.1", 0)
        try:
            yield f"{url}/v1"
        finally:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        raw, number = await request.read(), len(self.served)
        call = read_request(CHAT, raw, ConversationMemory(), number)
        message = answer({"messages": call.messages, "tools": call.tools}, f"call_{number}")
        tokens = _tokens(message) + int32([number])  # the number makes equal answers different
        prompt = _tokens([call.messages, call.tools])
        logprobs = float32([-self._random.random() for _ in tokens])
        finish = "tool_calls" if "tool_calls" in message else "stop"
        arrays: Any = {"prompt": prompt, "completion": tokens, "logprobs": logprobs}
        row = Transition(str(number), "", number, **arrays, finish=finish, answer=message)
        self.served.append(row)
        if not call.stream:
            return web.Response(body=recorded.whole([row], call), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for event in recorded.stream([row], call):
            await response.write(event)
        return response


def _tokens(value: Json) -> array[int]:
    """Encode a value as few tokens, so that no harness summarizes the conversation."""
    text = json.dumps(value).encode()
    return int32(memoryview(text.ljust(-(-len(text) // 4) * 4)).cast("i"))


def answer(body: dict[str, Any], id: str) -> dict[str, Any]:
    """Return the script's next message for a conversation."""
    tools = [tool["function"] for tool in body.get("tools") or ()]
    commands_sent = sum(bool(message.get("tool_calls")) for message in body["messages"])
    shell = next((tool for tool in tools if SHELL.search(tool["name"]) and _command(tool)), None)
    if shell is None or commands_sent >= len(COMMANDS):
        text = "The test passes now." if shell else "There is no shell."
        return {"role": "assistant", "content": text if tools else EDIT}
    arguments = json.dumps(_arguments(shell, COMMANDS[commands_sent]))
    function = {"name": shell["name"], "arguments": arguments}
    call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _command(tool: dict[str, Any]) -> str | None:
    """Return the name of a tool's argument for the shell command; None if it has none."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return next((name for name in ("command", "cmd") if name in properties), None)


def _arguments(tool: dict[str, Any], command: str) -> dict[str, Json]:
    """Return the arguments of a call: the command, and dummy values for other required ones."""
    schema, fill = tool["parameters"], {"boolean": False, "integer": 1, "number": 1, "array": []}
    kinds = {name: about.get("type") for name, about in schema["properties"].items()}
    arguments = {name: fill.get(str(kinds.get(name)), ".") for name in schema.get("required") or ()}
    name = str(_command(tool))
    return arguments | {name: ["bash", "-c", command] if kinds[name] == "array" else command}


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
    role: str = ""  # role of the recorded call, if any

    @property
    def asks(self) -> bool:
        """Whether the request is a successful model call."""
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
        seen_request = SeenRequest(time.time(), path, len(raw), body)
        self.seen.append(seen_request)
        answer = await handler(request)
        seen_request.status = answer.status
        if answer.status >= 400 and isinstance(answer, web.Response):
            seen_request.error = answer.text or ""
        return answer


@dataclass
class Report:
    """The result of a check."""

    harness: str
    program: str
    version: str
    tested: bool  # whether the preset was tested with this version
    seconds: float
    begun: float  # unix seconds
    answers: list[Transition]  # answers of the scripted model
    rollouts: list[Rollout]
    calls: list[Transition]  # calls that the gateway recorded
    seen: list[SeenRequest]

    @property
    def served(self) -> int:
        return len(self.answers)

    @property
    def exact(self) -> int:
        """Number of calls recorded with the served tokens and log-probs, in the right rollout."""
        served = {tuple(answer.completion): answer for answer in self.answers}
        numbers = {row.attempt: f"ticket-{row.index:03d}" for row in self.rollouts}
        return sum(
            (answer := served.get(tuple(call.completion))) is not None
            and (call.prompt, call.logprobs) == (answer.prompt, answer.logprobs)
            and set(MARK.findall(str(call.messages))) == {numbers[call.attempt]}
            for call in self.calls
        )

    @property
    def roles(self) -> dict[str, int]:
        """The number of calls of each role."""
        roles = sorted(call.role for call in self.calls)
        return {role: roles.count(role) for role in roles}

    @property
    def refused(self) -> list[SeenRequest]:
        return [request for request in self.seen if request.status >= 400]

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each problem; none for a harness that can be trained."""
        if not self.served:
            yield f"{self.harness} made no successful model call"
        for request in self.refused[:3]:
            yield f"{request.path} was refused: {request.error[:300]}"
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
    rollouts: int = 1,
    concurrency: int = 1,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Report:
    """Run rollouts of the harness `name`, in each of which the scripted model fixes a bug.

    Raises ConfigError if the harness is not installed."""
    preset = load_preset(name, root)
    program, model, log = preset.find_program(), ScriptedModel(), RequestLog()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tables: Any = {"workspace": WorkspaceConfig(source="task.files")}
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
    for request in log.seen:  # in order of the calls
        request.role = next(roles, "") if request.asks else ""
    header = (name, program, version, preset.was_tested(version), seconds, begun)
    return Report(*header, answers=model.served, rollouts=ended, calls=calls, seen=log.seen)


def _queue(rollouts: int, timeout: float) -> list[NewRollout]:
    tasks = [{"input": f"{PROMPT} (ticket-{n:03d})", "files": BUG} for n in range(rollouts)]
    return [
        NewRollout(id=f"{n}", run=RUN, group="g", index=n, task=task, timeout=timeout)
        for n, task in enumerate(tasks)
    ]


def _is_fixed(workspace: Workspace) -> float:
    return float("a + b" in (workspace.path / "calc.py").read_text())
