"""What is true of every executor, whatever it runs agents in."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agentrl.core.types import ErrorKind, RolloutState
from agentrl.runners import executors
from agentrl.runners.gateway import upstream
from tests.runners.executors.conftest import PYTHON, settings

OUTSIDE = ("pool", "command", "container", "kubernetes")  # of the runner's own process
KINDS = ("async", "threads", *OUTSIDE)
KEPT = ("pool", "command", "container")  # what a pod leaves behind is Kubernetes' business
MB = 2**20


def marked(kind: str, *marks: Any) -> Any:
    return pytest.param(kind, marks=marks)


each = pytest.mark.parametrize("kind", list(map(marked, KINDS)))
outside = pytest.mark.parametrize("kind", list(map(marked, OUTSIDE)))


def said(failure: Any) -> str:
    return f"{failure.message}\n{failure.traceback}"


@each
async def test_success(bench: Any, make: Any, kind: str) -> None:
    executor = await make(kind)
    (rollout,) = await bench.run(executor, {"input": {"do": "answer", "text": "é\n'\""}})
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    assert rollout.result == {"said": "é\n'\"", "n": [1, 2.5, None]}
    assert rollout.reward() == 1.0
    trace = await bench.store.trace(rollout.id)
    assert [(span.name, span.kind) for span in trace.spans] == [("attempt", "agent")]


@each
async def test_a_model_call_belongs_to_its_attempt(bench: Any, make: Any, kind: str) -> None:
    executor = await make(kind)
    tasks = [{"input": {"do": "ask", "text": name}} for name in ("a", "b")]
    rollouts = await bench.run(executor, *tasks)
    assert [rollout.result for rollout in rollouts] == ["echo a", "echo b"]
    for rollout, text in zip(rollouts, ("a", "b"), strict=True):
        (call,) = (await bench.store.trace(rollout.id)).transitions
        assert call.messages[0]["content"] == text


SHAPES = {
    "number": 7,
    "truth": True,
    "keys": {"1": 0.5, "inner": [1, [2]]},
    "model": [{"n": 7, "at": [1, 2]}],
    "text": "?",
}
NO_SHAPES = {
    "object": "the agent's result['steps'][1] is of type 'object', which has no JSON form",
    "infinite": "the agent's result[1] is inf, which JSON does not have",
    "large": "the agent's result['n'] is an integer of more than 64 bits",
}


@pytest.mark.parametrize("kind", list(map(marked, PYTHON)))
async def test_a_verifier_sees_the_same_json_in_every_executor(
    bench: Any, make: Any, kind: str
) -> None:
    executor, seen = await make(kind), list[Any]()

    def verify(task: Any, result: Any) -> float:
        seen.append((result, type(result)))
        return 1.0

    tasks = [{"input": {"do": "shape", "name": name}} for name in (*SHAPES, *NO_SHAPES)]
    settings = {"verifier": verify, "concurrency": 1}
    rollouts = await bench.run(executor, *tasks, **settings)
    assert seen == [(value, type(value)) for value in SHAPES.values()]
    fine, failed = rollouts[: len(SHAPES)], rollouts[len(SHAPES) :]
    assert [rollout.result for rollout in fine] == [*SHAPES.values()]
    for rollout, problem in zip(failed, NO_SHAPES.values(), strict=True):
        assert rollout.failure.kind is ErrorKind.AGENT
        assert problem in rollout.failure.message


@each
async def test_exception(bench: Any, make: Any, kind: str) -> None:
    executor = await make(kind)
    (rollout,) = await bench.run(executor, {"input": {"do": "fail"}})
    assert rollout.failure.kind is ErrorKind.AGENT
    assert "ValueError: no luck" in rollout.failure.message
    assert "in fail" in rollout.failure.traceback
    assert (rollout.rewards, rollout.attempts) == ([], 1)


ESCAPES = ("SystemExit", "GeneratorExit", "CancelledError", "Odd")


@each
async def test_whatever_an_agent_raises_is_its_failure_alone(
    bench: Any, make: Any, kind: str
) -> None:
    executor = await make(kind)
    places = ["agent", "thread", *["task"] * (kind != "async")]  # whose loop is that of this test
    escapes = [
        {"do": "escape", "name": name, "where": where} for name in ESCAPES for where in places
    ]
    tasks = [{"input": doing} for doing in [*escapes, {"do": "answer", "text": "x"}]]
    *ended, fine = await bench.run(executor, *tasks)
    for rollout, escape in zip(ended, escapes, strict=True):
        assert (rollout.failure.kind, rollout.attempts) == (ErrorKind.AGENT, 1), rollout.failure
        if kind in PYTHON:
            assert rollout.failure.message.startswith(escape["name"])
    assert fine.state is RolloutState.SUCCEEDED, fine.failure


@outside
async def test_a_process_that_ends_is_the_agents_failure_alone(
    bench: Any, make: Any, kind: str
) -> None:
    executor = await make(kind)
    doings = ({"do": "leave"}, {"do": "answer", "text": "x"}, {"do": "leave"})
    ended, fine, again = await bench.run(executor, *({"input": doing} for doing in doings))
    for rollout in (ended, again):
        assert rollout.failure.kind is ErrorKind.AGENT
        assert "exit status 3" in rollout.failure.message
    assert fine.state is RolloutState.SUCCEEDED, fine.failure


@each
async def test_timeout(bench: Any, make: Any, hanging: Any, kind: str) -> None:
    executor = await make(kind)
    hanging.input["daemon"] = kind in KEPT
    seconds = 2.0 if kind in OUTSIDE else 0.3  # a process has to start before
    (rollout,) = await bench.run(executor, {"input": hanging.input}, timeout=seconds)
    assert rollout.failure.kind is ErrorKind.TIMEOUT, said(rollout.failure)
    assert f"longer than {seconds:g} s" in rollout.failure.message
    assert rollout.attempts == 1
    heard = ["begun"] if kind in OUTSIDE else ["begun", "cancelled"]
    assert (await hanging.says(len(heard))).split() == heard
    assert await hanging.left() == []


@each
async def test_a_result_has_a_largest_size(bench: Any, make: Any, kind: str) -> None:
    executor = await make(kind)
    tasks = [
        {"input": {"do": "enlarge", "bytes": size}} for size in (executors.MAX_RESULT_BYTES, 9)
    ]
    large, small = await bench.run(executor, *tasks)
    assert large.failure.kind is ErrorKind.AGENT
    assert f"more than {executors.MAX_RESULT_BYTES} bytes" in large.failure.message
    assert (large.result, small.result) == (None, "x" * 9)


@each
async def test_an_agent_is_given_the_input_of_its_task_and_no_answer(
    bench: Any, make: Any, kubernetes: Any, docker: Any, kind: str
) -> None:
    executor = await make(kind)
    answer, shown = (f"secret-{secrets.token_hex(16)}" for _ in range(2))
    look = {"do": "look", "memory": kind in OUTSIDE, "shown": shown}
    (rollout,) = await bench.run(executor, {"input": look, "answer": answer})
    assert rollout.result == [shown], rollout.failure
    assert rollout.task["answer"] == answer
    if docker.exists():
        assert answer not in docker.read_text()


@outside
async def test_memory_limit(bench: Any, make: Any, kind: str) -> None:
    executor = await make(kind, memory_mb=300)
    tasks = [{"input": {"do": "eat", "bytes": size * MB}} for size in (400, 1)]
    large, small = await bench.run(executor, *tasks)
    assert large.failure.kind is ErrorKind.AGENT
    assert "MemoryError" in said(large.failure)
    assert small.result == MB, small.failure


@each
async def test_a_model_failure_is_not_the_agents(bench: Any, make: Any, kind: str) -> None:
    async def broken(request: Any, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "scripted"}}, status=500)

    executor = await make(kind)
    bench.model.then(*[broken] * upstream.MAX_TRIES)
    task = {"input": {"do": "ask", "text": "x"}}
    (rollout,) = await bench.run(executor, task, max_attempts=1, error_reward=-1.0)
    assert rollout.failure.kind is ErrorKind.MODEL
    assert rollout.rewards == []


@each
async def test_an_attempt_that_is_stopped_leaves_nothing(
    bench: Any, make: Any, hanging: Any, kind: str
) -> None:
    executor = await make(kind)
    hanging.input["daemon"] = kind in KEPT
    (name,) = await bench.enqueue({"input": hanging.input}, timeout=60.0)
    stop = asyncio.Event()
    running = asyncio.create_task(bench.worker(executor, lease=60.0, drain=0.0).run(stop))
    assert await hanging.says() == "begun"
    stop.set()
    await running
    assert await hanging.left() == []
    (attempt,) = await bench.store.claim(1, runner="other", lease=1.0, run="test")
    assert (attempt.rollout.id, attempt.fence) == (name, 2)


@each
async def test_a_stop_lets_what_is_running_finish(
    bench: Any, make: Any, hanging: Any, kind: str
) -> None:
    executor = await make(kind)
    await bench.enqueue({"input": hanging.input | {"do": "wait", "until": str(hanging.until)}})
    stop = asyncio.Event()
    worker = bench.worker(executor, lease=60.0, drain=60.0)
    running = asyncio.create_task(worker.run(stop))
    assert await hanging.says() == "begun"
    stop.set()
    await bench.enqueue({"input": {"do": "answer", "text": "not claimed any more"}})
    await asyncio.to_thread(hanging.until.write_text, "finished")
    await running
    finished, waiting = await bench.store.rollouts("test")
    assert (finished.result, finished.attempts) == ("finished", 1)
    assert waiting.state is RolloutState.QUEUED


@pytest.mark.parametrize(
    "kind",  # threads are of the runner's process as async agents are, and containers are commands
    [marked(kind, *[pytest.mark.slow] * (kind in ("threads", "container"))) for kind in KINDS],
)
async def test_a_killed_runner_loses_no_rollout_and_leaves_nothing(
    bench: Any, docker: Any, kubernetes: Any, hanging: Any, runner: Any, kind: str
) -> None:
    config = settings(kind, lease=0.5, concurrency=1)
    await bench.store.open_run("test", msgspec.to_builtins(config))
    await bench.move(bench.model)
    hanging.input |= {"daemon": kind in KEPT, "once": True}
    (name,) = await bench.enqueue({"input": hanging.input}, timeout=60.0)
    first = await runner()
    assert await hanging.says() == "begun"
    first.kill()
    await first.wait()
    if kind != "kubernetes":  # there the runner of the next attempt ends it
        assert await hanging.left() == []
    await runner()
    assert await bench.store.settled(f"g-{name}", timeout=60)
    assert await hanging.left() == []
    (rollout,) = await bench.store.rollouts("test")
    assert (rollout.result, rollout.attempts) == ("done", 2), rollout.failure
