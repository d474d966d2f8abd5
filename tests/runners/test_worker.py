"""From queue to outcome: how attempts end, whatever the agent, the model or the verifier does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import web

import agentrl
from agentrl.core.types import ErrorKind, Outcome, RolloutState
from agentrl.runners import main as module
from agentrl.runners.executors import ExecutionResult
from agentrl.runners.gateway import upstream
from agentrl.store import open_store
from agentrl.store.base import Store
from tests.runners.conftest import RUN

TASK = {"input": "question", "answer": "secret"}


@dataclass
class Clock:
    """The store's: real time, set forward by `ahead` seconds."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}", clock=clock) as store:
        await store.open_run(RUN, {})
        yield store


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as client:
        yield client


@pytest.fixture
def ask(http: httpx.AsyncClient) -> Any:
    """An agent that asks the model once and answers what it said."""

    async def ask(text: str) -> Any:
        body = {"model": "gpt", "messages": [{"role": "user", "content": text}]}
        url = os.environ["OPENAI_BASE_URL"]
        answer = await http.post(f"{url}/chat/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["message"]["content"]

    return ask


async def fail(request: web.Request, body: Any) -> web.Response:
    return web.json_response({"error": {"message": "scripted"}}, status=500)


async def test_success(bench: Any, ask: Any) -> None:
    def verify(task: Any, result: str, trace: Any) -> dict[str, float]:
        assert task == TASK
        assert {span.name for span in trace.spans} == {"attempt", "POST"}
        return {"outcome": 1.0, "calls": len(trace.transitions)}

    (rollout,) = await bench.run(ask, TASK, verifier=verify)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    assert rollout.result == "echo question"
    assert (rollout.reward(), rollout.reward("calls")) == (1.0, 1.0)
    trace = await bench.store.trace(rollout.id)
    spans = {span.name: span for span in trace.spans}
    assert spans["POST"].parent == spans["attempt"].id
    assert trace.transitions[0].span == spans["POST"].id
    assert trace.attempt == trace.transitions[0].attempt


async def test_a_result_that_json_cannot_say_costs_its_own_rollout_only(bench: Any) -> None:
    class Mute:
        def __str__(self) -> str:
            raise KeyError("no text")

    answers = {"long": 10**5000, "mute": Mute(), "ok": 1}
    tasks = [{"input": name} for name in answers]
    long, mute, fine = await bench.run(lambda name: answers[name], *tasks)
    assert "more than 64 bits" in long.failure.message
    assert "of type 'Mute', which has no JSON form" in mute.failure.message
    assert (fine.result, fine.failure) == (1, None)


async def test_a_reward_that_no_store_keeps_is_the_mistake_of_who_gave_it(bench: Any) -> None:
    (rollout,) = await bench.run(lambda text: text, TASK, verifier=lambda task: {"score": -1e16})
    assert rollout.failure.kind is ErrorKind.VERIFIER
    assert "'score' of the verifier is -1e+16: it must be between" in rollout.failure.message
    (rollout,) = await bench.run(lambda text: agentrl.reward(1e16, scope="rollout"), TASK)
    assert rollout.failure.kind is ErrorKind.AGENT
    assert rollout.failure.message.startswith("ValueError: Reward 'process' of the agent is 1e+16")


async def test_reward_names_that_no_database_stores(bench: Any) -> None:
    rollouts = await bench.run(
        lambda text: agentrl.reward(0.5, "\ud83d", scope="rollout"),
        *[TASK] * 3,
        verifier=lambda task, result: {"outcome": 1.0, "a\udc00\0": 2.0},
    )
    for rollout in rollouts:
        assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
        assert {row.name for row in rollout.rewards} == {"outcome", "?", "a??"}


async def test_an_outcome_that_the_store_refuses_costs_itself_only(bench: Any) -> None:
    await bench.enqueue(*[TASK] * 3, max_attempts=1)
    attempts = await bench.store.claim(3, runner="test", lease=60.0, run="test")
    results = ["a", "\ud83d", "b"]
    outcomes = [
        Outcome(attempt=attempt.id, fence=attempt.fence, result=result)
        for attempt, result in zip(attempts, results, strict=True)
    ]
    worker = bench.worker(lambda text: text)
    await asyncio.gather(*(worker._end(outcome) for outcome in outcomes))
    first, odd, last = await bench.store.rollouts("test")
    assert (first.result, last.result) == ("a", "b")
    assert odd.failure.kind is ErrorKind.AGENT
    assert "cannot be encoded as JSON" in odd.failure.message


def no_luck(text: str) -> None:
    raise ValueError("no luck")


async def test_agent_raises_and_that_has_a_price(bench: Any) -> None:
    (rollout,) = await bench.run(no_luck, TASK, error_reward=-1.0)
    assert rollout.state is RolloutState.FAILED
    assert rollout.failure.kind is ErrorKind.AGENT
    assert rollout.reward() == -1.0
    assert rollout.failure.message == "ValueError: no luck"


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_lease_lost_for_a_while_ends_the_attempt(
    bench: Any, ask: Any, clock: Any, swallows: bool
) -> None:
    """The clock is set forward while the model answers and back before the agent ends: the refused
    call is not the agent's failure, and the rollout is played again. max_attempts: for a store that
    has looked at the lease meanwhile, and ended it."""

    async def leap(request: web.Request, body: Any) -> None:
        clock.ahead = 3600.0

    async def agent(text: str) -> Any:
        try:
            return await ask(text)
        except httpx.HTTPStatusError:
            clock.ahead = 0.0
            if not swallows:
                raise
            return "no answer"

    bench.model.then(*[leap] * 3)
    (rollout,) = await bench.run(agent, TASK, max_attempts=9, error_reward=-1.0)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    assert (rollout.result, rollout.reward()) == ("echo question", 1.0)
    assert len((await bench.store.trace(rollout.id)).transitions) == 1


async def test_task_without_input(bench: Any) -> None:
    (rollout,) = await bench.run(no_luck, {"question": "q"})
    assert rollout.failure.kind is ErrorKind.AGENT
    assert "has no 'input'" in rollout.failure.message


async def test_a_hung_thread_is_abandoned_and_its_later_calls_refused(bench: Any) -> None:
    late, answered = threading.Event(), threading.Event()
    answers = []

    def hang(text: str) -> None:
        late.wait(20)
        url = os.environ["OPENAI_BASE_URL"]
        answers.append(httpx.post(f"{url}/chat/completions", json={"messages": []}))
        answered.set()

    (rollout,) = await bench.run(hang, TASK, timeout=0.05)
    assert rollout.failure.kind is ErrorKind.TIMEOUT
    late.set()
    assert await asyncio.to_thread(answered.wait, 20)
    assert answers[0].status_code == 403
    assert bench.model.requests == []


async def test_verifier_returns_no_reward(bench: Any) -> None:
    values = {"None": None, "nan": float("nan"), "inf": float("inf"), "'x'": "x"}
    tasks = [{"input": says} for says in values]
    verify = lambda task, result: values[task["input"]]  # noqa: E731
    rollouts = await bench.run(lambda text: "kept", *tasks, verifier=verify)
    for says, rollout in zip(values, rollouts, strict=True):
        assert rollout.state is RolloutState.FAILED, says
        assert rollout.failure.kind is ErrorKind.VERIFIER, says
        assert says in rollout.failure.message
        assert (rollout.result, rollout.rewards) == ("kept", []), says


async def test_verifier_raises_or_hangs(bench: Any) -> None:
    def broken(task: Any) -> float:
        return float(task["nothing"])

    async def hang(task: Any) -> None:
        await asyncio.Event().wait()

    (raised,) = await bench.run(lambda text: "", TASK, verifier=broken)
    assert raised.failure.kind is ErrorKind.VERIFIER
    assert "KeyError: 'nothing'" in raised.failure.message
    assert "in broken" in raised.failure.traceback
    (hung,) = await bench.run(lambda text: "", TASK, verifier=hang, timeout=0.05)
    assert hung.failure.kind is ErrorKind.VERIFIER
    assert "longer than 0.05 s" in hung.failure.message


async def test_what_blocks_the_event_loop_past_its_time_ran_out_of_time(bench: Any) -> None:
    def agent(text: str) -> str:
        return "in time"

    async def late_agent(text: str) -> str:
        time.sleep(1.3)  # noqa: ASYNC251
        return "late"

    async def late(result: Any) -> float:
        time.sleep(1.3)  # noqa: ASYNC251
        return 1.0

    async def later(result: Any) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"outcome": await late(result)}

    for verify in (late, later):
        (judged,) = await bench.run(agent, TASK, verifier=verify, timeout=1.0)
        assert (judged.state, judged.failure.kind) == (RolloutState.FAILED, ErrorKind.VERIFIER)
        assert "the verifier ran longer than 1 s" in judged.failure.message
        assert judged.rewards == []
    (played,) = await bench.run(late_agent, TASK, timeout=1.0)
    assert (played.state, played.failure.kind) == (RolloutState.FAILED, ErrorKind.TIMEOUT)
    assert (played.result, played.rewards) == (None, [])


async def test_model_failure_is_tried_again_and_never_a_reward(bench: Any, ask: Any) -> None:
    bench.model.then(*[fail] * upstream.MAX_TRIES * 2)
    (rollout,) = await bench.run(ask, TASK, error_reward=-1.0, max_attempts=2)
    assert rollout.state is RolloutState.FAILED
    assert rollout.failure.kind is ErrorKind.MODEL
    assert "answered 500" in rollout.failure.message
    assert rollout.attempts == 2
    assert rollout.rewards == []


async def test_model_failure_counts_even_if_the_agent_swallows_it(bench: Any, ask: Any) -> None:
    async def swallow(text: str) -> str:
        try:
            return str(await ask(text))
        except httpx.HTTPError:
            return "sorry"

    bench.model.then(*[fail] * upstream.MAX_TRIES)
    (rollout,) = await bench.run(swallow, TASK)
    assert rollout.state is RolloutState.SUCCEEDED
    assert rollout.result == "echo question"
    assert rollout.attempts == 2


@pytest.mark.parametrize(
    ("settings", "attempts"),
    [({}, 1), ({"retry": ["agent_error"], "max_attempts": 2}, 2), ({"retry": ["agent_error"]}, 3)],
)
async def test_how_often_a_failure_is_tried_again_is_a_setting(
    bench: Any, settings: dict[str, Any], attempts: int
) -> None:
    (rollout,) = await bench.run(no_luck, TASK, error_reward=-1.0, **settings)
    assert (rollout.failure.kind, rollout.attempts) == (ErrorKind.AGENT, attempts)
    assert rollout.reward() == -1.0  # of the last attempt


async def test_a_timeout_and_a_verifier_error_are_tried_again_if_asked_for(bench: Any) -> None:
    async def hang(text: str) -> None:
        await asyncio.Event().wait()

    def broken(task: Any) -> float:
        return float("nan")

    retry = ["timeout", "verifier_error"]
    (late,) = await bench.run(hang, TASK, retry=retry, timeout=0.05, max_attempts=2)
    (unscored,) = await bench.run(lambda text: "", TASK, retry=retry, verifier=broken)
    assert (late.failure.kind, late.attempts) == (ErrorKind.TIMEOUT, 2)
    assert (unscored.failure.kind, unscored.attempts) == (ErrorKind.VERIFIER, 3)
    assert late.rewards == unscored.rewards == []


async def test_timeout_while_the_model_is_away_is_the_models_failure(bench: Any, ask: Any) -> None:
    await bench.model.stop()
    (rollout,) = await bench.run(ask, TASK, timeout=0.1, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.MODEL
    assert "unreachable" in rollout.failure.message


async def test_slots_are_filled_and_never_exceeded(bench: Any) -> None:
    state = SimpleNamespace(running=0, most=0)

    async def agent(text: str) -> None:
        state.running += 1
        state.most = max(state.most, state.running)
        await asyncio.sleep(0)
        state.running -= 1

    rollouts = await bench.run(agent, *[TASK] * 40, concurrency=4)
    assert {rollout.state for rollout in rollouts} == {RolloutState.SUCCEEDED}
    assert state.most == 4


async def test_stop_gives_back_what_is_unfinished(bench: Any) -> None:
    started, stop = asyncio.Event(), asyncio.Event()

    async def hang(text: str) -> None:
        started.set()
        await asyncio.Event().wait()

    (name,) = await bench.enqueue(TASK, timeout=60.0)
    running = asyncio.create_task(bench.worker(hang, lease=60.0, drain=0.0).run(stop))
    await started.wait()
    stop.set()
    await running
    (attempt,) = await bench.store.claim(1, runner="other", lease=1.0, run="test")
    assert attempt.rollout.id == name
    assert attempt.fence == 2


async def test_what_is_given_back_has_ended(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started, stop, finish, order = asyncio.Event(), asyncio.Event(), bench.store.finish, []

    async def hang(text: str) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            order.append("ended")

    async def give_back(outcomes: Any) -> Any:
        order.append("given back")
        return await finish(outcomes)

    monkeypatch.setattr(bench.store, "finish", give_back)
    await bench.enqueue(TASK, timeout=60.0)
    running = asyncio.create_task(bench.worker(hang, lease=60.0, drain=0.0).run(stop))
    await started.wait()
    stop.set()
    await running
    assert order == ["ended", "given back"]


async def test_an_attempt_keeps_its_lease_until_its_outcome_is_stored(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, finish, heartbeat = asyncio.Event(), bench.store.finish, bench.store.heartbeat
    home, beats = asyncio.get_running_loop(), []

    async def late(outcomes: Any) -> Any:
        beats.clear()
        await kept.wait()
        return await finish(outcomes)

    async def beat(attempts: Any, *, lease: float) -> Any:
        beats.append(await heartbeat(attempts, lease=lease))
        if len(beats) == 3:
            home.call_soon_threadsafe(kept.set)
        return beats[-1]

    monkeypatch.setattr(bench.store, "finish", late)
    monkeypatch.setattr(bench.store, "heartbeat", beat)
    (rollout,) = await bench.run(lambda text: "done", TASK, lease=0.3)
    assert (rollout.result, rollout.attempts) == ("done", 1)


async def test_an_attempt_that_lost_its_lease_is_stopped_and_not_written(bench: Any) -> None:
    started, stopped, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hang(text: str) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    (name,) = await bench.enqueue(TASK)
    running = asyncio.create_task(bench.worker(hang, lease=0.3).run(stop))
    await started.wait()
    await bench.store.cancel([name])
    await stopped.wait()
    stop.set()
    await running
    (rollout,) = await bench.store.rollouts("test")
    assert rollout.state is RolloutState.CANCELLED


async def test_an_agent_that_blocks_the_loop_keeps_its_lease(bench: Any) -> None:
    async def block(text: str) -> str:
        threading.Event().wait(0.6)  # three leases long, without ever yielding to the loop
        return "done"

    (rollout,) = await bench.run(block, TASK, lease=0.2)
    assert rollout.result == "done"
    assert rollout.attempts == 1


async def test_an_agent_that_blocks_the_loop_for_ever_is_reported(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_GRACE", 0.05)
    reported, release = [], threading.Event()

    async def block(text: str) -> None:
        release.wait(10)

    def on_blocked(rollout: str) -> None:
        reported.append(rollout)
        release.set()

    (name,) = await bench.enqueue(TASK, timeout=0.05, max_attempts=1)
    worker = bench.worker(block, lease=0.2)
    worker.on_blocked = on_blocked
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    assert await bench.store.settled(f"g-{name}", timeout=30.0)
    stop.set()
    await running
    assert set(reported) == {name}


async def test_an_agent_that_does_not_heed_its_cancellation_is_left_behind(bench: Any) -> None:
    release = asyncio.Event()

    async def stubborn(text: str) -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    (rollout,) = await bench.run(stubborn, TASK, timeout=0.05)
    assert rollout.failure.kind is ErrorKind.TIMEOUT
    release.set()


async def test_a_policy_server_that_hangs_is_not_the_agents_fault(bench: Any, ask: Any) -> None:
    async def hang(request: web.Request, body: Any) -> None:
        await asyncio.Event().wait()

    bench.model.then(hang)
    (rollout,) = await bench.run(ask, TASK, timeout=2.0, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.MODEL
    assert "the model had not answered for" in rollout.failure.message


async def test_an_agent_that_asks_for_ever_runs_out_of_time_itself(bench: Any, ask: Any) -> None:
    async def slow(request: web.Request, body: Any) -> None:
        await asyncio.sleep(0.1)

    async def tireless(text: str) -> None:
        while True:
            await ask(text)

    bench.model.then(*[slow] * 1000)
    (rollout,) = await bench.run(tireless, TASK, timeout=1.0, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.TIMEOUT


async def test_an_agent_that_raises_that_its_time_is_up_ran_out_of_time(
    bench: Any, ask: Any
) -> None:
    async def agent(text: str) -> None:
        (active,) = bench.gateway.attempts.active()
        active.deadline = time.monotonic()  # before the executor looks
        await ask(text)

    (rollout,) = await bench.run(agent, TASK, timeout=60.0, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.TIMEOUT


async def test_a_worker_does_not_outlive_its_gateway(
    bench: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # the thread's own report

    async def broken(run: str) -> Any:
        raise KeyError("not an error of the store")

    async def work() -> None:
        try:
            await bench.worker(ask).run(asyncio.Event())
        finally:
            ended.set()

    working = asyncio.create_task(work())
    await bench.store.wait(0, timeout=1.0)
    bench.gateway.router.store = SimpleNamespace(wait=bench.store.wait, policies=broken)
    await bench.move(bench.model, version=4)
    await asyncio.wait_for(ended.wait(), 10)
    with pytest.raises(RuntimeError, match="the gateway has ended"):
        await working


RAISED: dict[str, BaseException] = {
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit(),
    "CancelledError": asyncio.CancelledError(),
    "Failed": pytest.fail.Exception("wrong"),
    "Skipped": pytest.skip.Exception("later"),
}


@pytest.mark.parametrize("kind", ["sync", "async", "number"])
async def test_whatever_a_verifier_raises_is_its_failure_and_runs_no_agent_again(
    bench: Any, kind: str
) -> None:
    ran = list[str]()

    class Number:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __float__(self) -> float:
            raise self.error

    async def waiting(task: Any) -> float:
        raise RAISED[task["input"]]

    def plain(task: Any) -> Any:
        if kind == "number":
            return Number(RAISED[task["input"]])
        raise RAISED[task["input"]]

    verifier = waiting if kind == "async" else plain
    how = {"retry": ["agent_error", "verifier_error"], "max_attempts": 2, "verifier": verifier}
    names = [name for name in RAISED for _ in range(2)]
    tasks = [{"input": name} for name in names]
    rollouts = await bench.run(lambda name: ran.append(name), *tasks, **how)
    for name, rollout in zip(names, rollouts, strict=True):
        assert (rollout.failure.kind, rollout.attempts) == (ErrorKind.VERIFIER, 2), name
        assert rollout.failure.message.startswith(name)
        assert rollout.rewards == [], name
    assert sorted(ran) == sorted(names)  # only the verifier was repeated


async def test_a_verifier_that_works_again_judges_the_same_answer(bench: Any) -> None:
    answers, judged = iter(["wrong", "right"]), list[str]()

    def verify(result: str) -> float:
        judged.append(result)
        if len(judged) == 1:
            raise SystemExit("the grader's server is away")
        return float(result == "right")

    (rollout,) = await bench.run(
        lambda text: next(answers), TASK, verifier=verify,
        retry=["verifier_error"],
    )  # fmt: skip
    assert judged == ["wrong", "wrong"]
    assert (rollout.result, rollout.reward(), rollout.attempts) == ("wrong", 0.0, 2)


async def test_whatever_an_executor_raises_costs_one_attempt(bench: Any) -> None:
    errors = RAISED | {"RuntimeError": RuntimeError("a bug")}

    class Odd:
        sealed, limit = False, None

        async def start(self) -> None: ...

        async def close(self) -> None: ...

        async def run(self, active: Any) -> ExecutionResult:
            if active.attempt.fence == 1:
                raise errors[active.attempt.rollout.task["input"]]
            return ExecutionResult(result="fine", needs_no_call=True)

    rollouts = await bench.run(Odd(), *({"input": name} for name in errors))
    for name, rollout in zip(errors, rollouts, strict=True):
        assert rollout.state is RolloutState.SUCCEEDED, name
        assert (rollout.result, rollout.attempts) == ("fine", 2), name


async def test_what_a_late_request_claims_is_run(bench: Any) -> None:
    """Over HTTP a request may come after its repeat was answered that there is nothing."""
    claim, given = bench.store.claim, list[Any]()

    async def first_is_late(n: int, **more: Any) -> Any:
        given.append(more)
        if len(given) == 1:
            await asyncio.sleep(more["timeout"])
            return []
        if len(given) == 2:  # the first one, whose answer nobody reads
            await claim(n, **given[0])
        return await claim(n, **more)

    await bench.enqueue({"input": "x"})
    bench.store.claim = first_is_late
    stop = asyncio.Event()
    running = asyncio.create_task(bench.worker(lambda text: text, lease=60.0).run(stop))
    assert await bench.store.settled("g-r0", timeout=10.0)
    stop.set()
    await running
