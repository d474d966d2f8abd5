"""Attempts that ran out of time, calls or tokens: how they end, and what their trace is worth."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI, PermissionDeniedError

from agentrl.core.config import AgentConfig
from agentrl.core.types import ErrorKind, RolloutState

Partial = Literal["score", "zero", "drop"]


async def ask(text: str) -> str:
    async with AsyncOpenAI() as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}]
        )
    return str(answer.choices[0].message.content)


async def endless(text: str) -> None:
    while True:
        text = await ask(text)


async def slow(text: str) -> None:
    await ask(text)
    await asyncio.sleep(60)


def value(rollout: Any) -> float | None:
    return None if math.isnan(rollout.reward()) else rollout.reward()


@pytest.mark.parametrize(("partial", "reward"), [("score", 0.7), ("zero", 0.0), ("drop", None)])
async def test_a_trace_without_an_end_is_worth_what_the_run_file_says(
    bench: Any, partial: Partial, reward: float | None
) -> None:
    limits = AgentConfig(on_truncation=partial, max_calls=1)
    verify = lambda result, trace: 0.7 * len(trace.transitions) * (result is None)  # noqa: E731
    (rollout,) = await bench.run(endless, {"input": "x"}, verifier=verify, limits=limits)
    assert (rollout.state, rollout.failure.kind) == (RolloutState.FAILED, ErrorKind.LIMIT)
    assert value(rollout) == reward
    assert len((await bench.store.trace(rollout.id)).transitions) == 1


async def test_what_an_agent_did_before_its_time_was_up_is_scored(bench: Any) -> None:
    limits = AgentConfig(on_truncation="score")
    (rollout,) = await bench.run(slow, {"input": "x"}, limits=limits, timeout=3.0)
    assert (rollout.state, rollout.failure.kind) == (RolloutState.FAILED, ErrorKind.TIMEOUT)
    assert value(rollout) == 1.0


@pytest.mark.parametrize(
    ("limits", "calls", "says"),
    [
        ({"max_calls": 3}, 3, "more than agent.max_calls = 3 model calls"),
        ({"max_tokens": 14}, 2, "agent.max_tokens = 14 tokens"),  # "echo x" has six
    ],
)
async def test_an_endless_agent_is_ended(
    bench: Any, limits: dict[str, int], calls: int, says: str
) -> None:
    settings = AgentConfig(on_truncation="score", **limits)
    (rollout,) = await bench.run(endless, {"input": "x"}, limits=settings)
    assert (rollout.state, rollout.failure.kind) == (RolloutState.FAILED, ErrorKind.LIMIT)
    assert says in rollout.failure.message
    assert value(rollout) == 1.0
    trace = await bench.store.trace(rollout.id)
    assert len(trace.transitions) == len(bench.model.requests) == calls


@pytest.mark.parametrize("grows", [True, False])
async def test_an_agent_that_asks_until_it_gets_a_form_ends_with_the_reason(
    bench: Any, grows: bool
) -> None:
    """As LangChain's `create_agent` with a `response_format`, whose own limit is 9,999 calls."""

    async def agent(text: str) -> None:
        said: list[Any] = [{"role": "user", "content": text}]
        async with AsyncOpenAI() as client:
            while True:
                answer = await client.chat.completions.create(model="policy", messages=said)
                if grows:
                    said.append({"role": "assistant", "content": answer.choices[0].message.content})

    (rollout,) = await bench.run(agent, {"input": "x"}, limits=AgentConfig(max_calls=4))
    assert rollout.failure.kind is ErrorKind.LIMIT
    message = "more than agent.max_calls = 4 model calls; 3 in a row added nothing to the policy"
    assert message in rollout.failure.message


async def test_an_agent_with_tools_that_makes_many_calls_does_not_loop(bench: Any) -> None:
    async def agent(text: str) -> None:
        said: list[Any] = [{"role": "user", "content": text}]
        async with AsyncOpenAI() as client:
            while True:
                await client.chat.completions.create(model="policy", messages=said)
                said += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]

    (rollout,) = await bench.run(agent, {"input": "x"}, limits=AgentConfig(max_calls=4))
    assert rollout.failure.kind is ErrorKind.LIMIT
    assert "in a row" not in rollout.failure.message


def test_calls_are_limited_by_default() -> None:
    assert AgentConfig().max_calls == 500


async def test_an_agent_may_use_all_its_calls(bench: Any) -> None:
    (rollout,) = await bench.run(ask, {"input": "x"}, limits=AgentConfig(max_calls=1))
    assert rollout.failure is None


async def test_threads_get_a_refusal_that_says_why(bench: Any) -> None:
    refusals = []

    def agent(text: str) -> str:
        try:
            with OpenAI() as client:
                while True:
                    client.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": text}]
                    )
        except PermissionDeniedError as error:
            refusals.append(str(error))
            raise

    (rollout,) = await bench.run(agent, {"input": "x"}, limits=AgentConfig(max_calls=2))
    assert rollout.failure.kind is ErrorKind.LIMIT
    for _ in range(200):
        if refusals:
            break
        await asyncio.sleep(0.01)
    assert "agent.max_calls = 2" in refusals[0]


async def test_without_a_call_there_is_nothing_to_score(bench: Any) -> None:
    async def silent(text: str) -> None:
        await asyncio.sleep(60)

    limits = AgentConfig(on_truncation="score")
    (rollout,) = await bench.run(silent, {"input": "x"}, limits=limits, timeout=0.2)
    assert rollout.failure.kind is ErrorKind.TIMEOUT
    assert value(rollout) is None


async def test_a_verifier_that_needs_a_result_says_so(bench: Any) -> None:
    limits = AgentConfig(on_truncation="score", max_calls=1)
    verify = lambda result: result["answer"]  # noqa: E731
    (rollout,) = await bench.run(endless, {"input": "x"}, verifier=verify, limits=limits)
    assert rollout.failure.kind is ErrorKind.LIMIT
    assert "scoring failed too: TypeError" in rollout.failure.message
    assert value(rollout) is None


async def test_what_is_tried_again_is_not_scored(bench: Any) -> None:
    limits = AgentConfig(on_truncation="zero", max_calls=1)
    how = {"limits": limits, "retry": ["limit"], "max_attempts": 2}
    (rollout,) = await bench.run(endless, {"input": "x"}, **how)
    assert rollout.attempts == 2
    assert rollout.reward() == 0.0
