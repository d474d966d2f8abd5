"""A scripted OpenAI-compatible model server, and a gateway and a worker in front of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.core.config import AgentConfig, RunConfig, RunnerConfig
from agentrl.core.types import Attempt, NewRollout, PolicyVersion, Rollout, Sampling, Transition
from agentrl.runners import main
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors import Executor
from agentrl.runners.executors.command import environment
from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent
from agentrl.runners.gateway import upstream
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import Worker, run_features
from agentrl.runners.scoring import Verifier
from agentrl.runners.workspace.sources import WorkspaceSource
from agentrl.store import open_store
from agentrl.store.base import Store

RUN = "test"
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
Body = dict[str, Any]
Handler = Callable[[web.Request, Body], Awaitable[web.StreamResponse | None]]


def ids(text: str) -> list[int]:
    """The fake tokenizer: one token a byte."""
    return list(text.encode())


def echo(body: Body) -> dict[str, Any]:
    """Answers with the last thing said; calls the first tool on the user's text, once."""
    messages = body.get("messages") or [{"role": "user", "content": body.get("prompt", "")}]
    last = messages[-1]
    if body.get("tools") and last["role"] == "user":
        name = body["tools"][0]["function"]["name"]
        function = {"name": name, "arguments": json.dumps({"text": last["content"]})}
        call = {"id": f"call-{len(messages)}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": f"echo {last['content']}"}


@dataclass
class FakeModel:
    """Behaves like the policy server; `script` answers the next calls instead of it."""

    answer: Callable[[Body], dict[str, Any]] = echo
    knows_tokens: bool = True
    max_length: int | None = None
    version: str | None = "7"
    spans: list[list[int]] = field(default_factory=list)  # versions of a call, by first token
    requests: list[Body] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    script: deque[Handler] = field(default_factory=deque)
    server: TestServer | None = None

    @property
    def base_url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}/v1"

    async def start(self, port: int | None = None) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_post("/v1/completions", self.handle)
        app.router.add_post("/tokenize", self.handle)
        self.server = TestServer(app, host="127.0.0.1", port=port)
        await self.server.start_server(shutdown_timeout=0.0)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()

    def then(self, *handlers: Handler) -> None:
        self.script.extend(handlers)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "x-agentrl-probe" in request.headers:
            if request.content_type != "application/json":  # vLLM reads no other
                return web.json_response(
                    {"error": {"message": "Unsupported Media Type"}}, status=400
                )
            return self.tokenize(body)
        self.requests.append(body)
        self.headers.append(request.headers)
        if self.script:
            scripted = await self.script.popleft()(request, body)
            if scripted is not None:
                return scripted
        if request.path == "/tokenize":
            return self.tokenize(body)
        headers = {} if self.version is None else {"x-policy-version": self.version}
        if body.get("stream"):
            return await self.stream(request, body, headers)
        return web.json_response(self.whole(body, request.path), headers=headers)

    def tokenize(self, body: Body) -> web.Response:
        size = {"count": len(ids(json.dumps(body["messages"]))), "max_model_len": self.max_length}
        return web.json_response(size)

    def whole(self, body: Body, path: str) -> Body:
        message = self.answer(body)
        text = message["content"] or json.dumps(message["tool_calls"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        chat = path.endswith("chat/completions")
        choices = []
        for index in range(body.get("n") or 1):
            said = {"message": message} if chat else {"text": text}
            choice = {"index": index, "finish_reason": finish, "logprobs": None} | said
            choice |= {"agentrl_spans": self.spans} if self.spans else {}
            choices.append(choice | self.tokens(text, body, chat))
        answer: Body = {"id": "c", "object": "chat.completion", "created": 1}
        answer |= {"model": body["model"], "choices": choices}
        answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return answer | self.prompt(body)

    def prompt(self, body: Body) -> Body:
        if not (self.knows_tokens and body.get("return_token_ids")):
            return {}
        said = body.get("messages") or body.get("prompt")
        return {"prompt_token_ids": ids(json.dumps(said))}

    def tokens(self, text: str, body: Body, chat: bool = True) -> Body:
        found: Body = {}
        if body.get("logprobs"):
            values = [-0.5] * len(ids(text))
            content = [
                {"token": "?", "logprob": v, "bytes": None, "top_logprobs": []} for v in values
            ]
            found["logprobs"] = {"content": content} if chat else {"token_logprobs": values}
        if self.knows_tokens and body.get("return_token_ids"):
            found["token_ids"] = ids(text)
        return found

    async def stream(
        self, request: web.Request, body: Body, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers | {"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in [*self.chunks(body), *self.usage(body)]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def usage(self, body: Body) -> list[Body]:
        if not (body.get("stream_options") or {}).get("include_usage"):
            return []
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return [{"id": "c", "model": body["model"], "choices": [], "usage": usage}]

    def chunks(self, body: Body) -> list[Body]:
        message = self.answer(body)
        base: Body = {"id": "c", "object": "chat.completion.chunk", "created": 1}
        base["model"] = body["model"]

        def chunk(delta: Body, finish: str | None = None, **extra: Any) -> Body:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return base | {"choices": [choice | extra]}

        events = [chunk({"role": "assistant", "content": ""}) | self.prompt(body)]
        thought, said = message.get("reasoning_content") or "", message["content"] or ""
        events += [chunk({"reasoning_content": letter}) for letter in thought]
        events += [chunk({"content": letter}, **self.tokens(letter, body)) for letter in said]
        for position, call in enumerate(message.get("tool_calls") or ()):
            whole, function = json.dumps(message["tool_calls"]), call["function"]
            first = {"name": function["name"], "arguments": ""}
            head = {"index": position, "id": call["id"], "type": "function", "function": first}
            events.append(chunk({"tool_calls": [head]}, **self.tokens(whole, body)))
            for letter in function["arguments"]:
                part = {"index": position, "function": {"arguments": letter}}
                events.append(chunk({"tool_calls": [part]}))
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        spans = {"agentrl_spans": self.spans} if self.spans else {}
        return [*events, chunk({}, finish, **spans)]


@dataclass
class Bench:
    """A store with one run, the fake model as its policy, and a gateway."""

    store: Store
    model: FakeModel
    gateway: Gateway
    count: int = 0

    async def enqueue(self, *tasks: Body, **settings: Any) -> list[str]:
        """Queue one rollout a task; returns their ids."""
        made = []
        for task in tasks:
            name = f"r{self.count}"
            self.count += 1
            values = {"sampling": Sampling(temperature=0.7, max_tokens=64), "timeout": 20.0}
            made.append(
                NewRollout(
                    id=name, run=RUN, group=f"g-{name}", index=0, task=task, **values | settings
                )
            )
        await self.store.enqueue(made)
        return [rollout.id for rollout in made]

    async def attempt(self, **settings: Any) -> Attempt:
        """One attempt, claimed; not registered."""
        await self.enqueue({"input": "x"}, **settings)
        (attempt,) = await self.store.claim(1, runner="test", lease=60.0, run=RUN)
        return attempt

    async def move(self, model: FakeModel, version: int = 3) -> None:
        """From now on the policy is served by `model`."""
        await self.store.publish(
            PolicyVersion(
                run=RUN, policy="policy", version=version, base_url=model.base_url, model="tiny"
            )
        )

    def worker(
        self,
        agent: object,
        verifier: Callable[..., Any] = lambda task, result: 1.0,
        *,
        error_reward: float | None = None,
        retry: Sequence[str] = (),
        calls_optional: bool = True,  # an agent of a test is often one line
        limits: AgentConfig = AgentConfig(),  # noqa: B008 - frozen
        workspaces: WorkspaceSource | None = None,
        **config: Any,
    ) -> Worker:
        """`agent` is an agent, or a started executor."""
        executor = agent if isinstance(agent, Executor) else InProcessExecutor(as_agent(agent))
        fields = {"error_reward": error_reward, "retry": list(retry)}
        limits = msgspec.structs.replace(limits, calls_optional=calls_optional, **fields)
        checks = Verifier(verifier)
        execution = AttemptRunner(self.store, self.gateway, executor, checks, limits, workspaces)
        return Worker(RUN, execution, RunnerConfig(**config), name="test")

    async def run(self, agent: object, *tasks: Body, **settings: Any) -> list[Rollout]:
        """Run the agent on the tasks to the end; the rollouts in the order of the tasks."""
        queue = {
            key: settings.pop(key)
            for key in ("timeout", "max_attempts", "branch", "seats", "candidate")
            if key in settings
        }
        names = await self.enqueue(*tasks, **queue)
        stop = asyncio.Event()
        running = asyncio.create_task(self.worker(agent, **settings).run(stop))
        try:
            for name in names:
                waiting = asyncio.create_task(self.store.settled(f"g-{name}", timeout=30.0))
                await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                assert await waiting
        finally:
            stop.set()
            await running
        found = {rollout.id: rollout for rollout in await self.store.rollouts(RUN)}
        return [found[name] for name in names]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repetitions follow at once, and so does the end of a worker."""
    monkeypatch.setattr(upstream, "FIRST_RETRY_PAUSE", 0.001)
    monkeypatch.setattr(upstream, "MAX_RETRY_PAUSE", 0.01)
    monkeypatch.setattr(main, "CLAIM_TIMEOUT", 0.02)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run(RUN, {})
        yield store


@pytest.fixture
async def runner(store: Store) -> AsyncIterator[Start]:
    """Starts runner processes; none is left behind."""
    started = []

    async def start(
        run: str = RUN, url: str = store.url, **more: Any
    ) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "agentrl", "runner", "start", "--store", url, "--run", run]
        started.append(await asyncio.create_subprocess_exec(*command, **more))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    model = FakeModel()
    await model.start()
    yield model
    await model.stop()


@pytest.fixture
async def bench(store: Store, model: FakeModel) -> AsyncIterator[Bench]:
    gateway = Gateway(store, RUN, features=run_features(store, RunConfig()))
    bench = Bench(store, model, gateway)
    await bench.move(model)
    gateway.start()
    with environment(gateway.base_url):
        yield bench
    await asyncio.to_thread(gateway.close)


@pytest.fixture
async def active(bench: Bench) -> ActiveAttempt:
    """An attempt whose calls the gateway answers."""
    return bench.gateway.register(await bench.attempt())


async def rows(bench: Bench, active: ActiveAttempt) -> list[Transition]:
    """The calls that are stored of an attempt."""
    trace = await bench.store.trace(active.attempt.rollout.id)
    assert trace is not None
    return list(trace.transitions)
