"""Examples run as users run them: the real runner on the example's own run file, as a process. Only
the policy is scripted, because a tiny model cannot follow instructions."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.core.config import load
from agentrl.core.loading import load_tasks
from agentrl.core.types import NewRollout, PolicyVersion, Trace
from agentrl.store import open_store
from tests import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
Message = dict[str, Any]
Answer = Callable[[Message], Message]  # of a request's body
Run = Callable[..., Any]


class Policy:
    """A policy server whose answers are a function of the request; one token a byte."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        self.server = TestServer(app, host="127.0.0.1")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        message = {"role": "assistant", "content": None} | self.answer(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        known = _known(message["content"] or json.dumps(message.get("tool_calls")))
        prompt = list(json.dumps(body["messages"]).encode())
        about = {"id": "c", "created": 1, "model": body["model"], "prompt_token_ids": prompt}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": finish, "message": message} | known
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            whole = about | {"object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        about["object"] = "chat.completion.chunk"
        for index, called in enumerate(message.get("tool_calls") or ()):
            delta = {"role": "assistant", "tool_calls": [{"index": index} | called]}
            one = {"index": 0, "delta": delta, "finish_reason": None} | known
            await _event(response, about | {"choices": [one]})
        for piece in (message["content"] or "").split(" ") if message["content"] else ():
            delta = {"index": 0, "delta": {"content": piece + " "}, "finish_reason": None}
            await _event(response, about | {"choices": [delta | _known(piece + " ")]})
        last = {"index": 0, "delta": {}, "finish_reason": finish}
        await _event(response, about | {"choices": [last]})
        await response.write(b"data: [DONE]\n\n")
        return response


def _known(text: str) -> Message:
    """The tokens of `text` and their log-probs."""
    logprobs = [{"token": "?", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
    tokens = list(text.encode())
    return {"token_ids": tokens, "logprobs": {"content": logprobs * len(tokens)}}


async def _event(response: web.StreamResponse, event: Message) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
async def run_example(tmp_path: Path) -> AsyncIterator[Run]:
    """`await run_example("name", answer, *overrides)`: the traces of its first two tasks."""
    processes: list[warm.Process] = []

    async def run(name: str, answer: Answer, *overrides: str) -> list[Trace]:
        config = load(EXAMPLES / name / "run.toml", [f"output={tmp_path}", *overrides])
        policy = Policy(answer)
        await policy.server.start_server()
        tasks = _tasks(config.tasks.train, config.root)
        assert not {repr(t) for t in tasks} & {
            repr(t) for t in _tasks(config.tasks.heldout, config.root)
        }
        async with open_store(config.store) as store:
            await store.open_run(name, msgspec.to_builtins(config))
            url = f"http://127.0.0.1:{policy.server.port}/v1"
            for served in config.policies or ("policy",):
                await store.publish(
                    PolicyVersion(run=name, policy=served, version=1, base_url=url, model="m")
                )
            await store.enqueue(
                [
                    NewRollout(id=f"r{i}", run=name, group=f"g{i}", index=0, task=task)
                    for i, task in enumerate(tasks[:2])
                ]
            )
            command = ["-m", "agentrl", "runner", "start", "--store", config.store, "--run", name]
            environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI")}
            runner = await asyncio.to_thread(warm.start, *command, env=environment)
            processes.append(runner)
            ended = asyncio.create_task(asyncio.to_thread(runner.wait))
            for group in ("g0", "g1"):
                settled = asyncio.create_task(store.settled(group, timeout=60))
                await asyncio.wait((ended, settled), return_when=asyncio.FIRST_COMPLETED)
                assert not ended.done(), "the runner has ended; its output says why"
                assert await settled
            runner.terminate()
            assert await ended == 0
            traces = [await store.trace(rollout) for rollout in ("r0", "r1")]
        await policy.server.close()
        assert [trace and trace.rollout.failure for trace in traces] == [None, None]
        return [trace for trace in traces if trace is not None]

    yield run
    for process in processes:
        process.close()


def _tasks(path: str, root: str) -> list[Message]:
    """Read apart from this process: the modules of all examples have the same names."""
    before = dict(sys.modules)
    try:
        return load_tasks(path, Path(root), key="tasks")
    finally:
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
        sys.path[:] = [entry for entry in sys.path if entry != root]
