"""What a verifier is given, and what it may return."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import AgentError
from agentrl.runners.verifiers import Verifier, VerifierError, rewards
from agentrl.types import Reward


async def verify_async(result: str) -> float:
    return float(result == "x")


@pytest.mark.parametrize(
    "function",
    [
        lambda task, result: task["answer"] == result,
        lambda result, task: task["answer"] == result,
        lambda task, result, trace: trace is None,
        lambda task, result, tolerance=0.1: 1,
        lambda *, result: 1.0,
        lambda **given: len(given) == 3,
        verify_async,
        lambda result: verify_async(result),
    ],
)
async def test_it_is_given_what_it_declares(function: Any) -> None:
    task = {"input": "q", "answer": "x"}
    assert await Verifier(function)(task=task, result="x", trace=None) == [Reward(value=1.0)]


def test_trace_is_made_only_for_those_who_want_it() -> None:
    assert Verifier(lambda task, trace: 1).wants_trace
    assert not Verifier(lambda task, result: 1).wants_trace


def test_named_rewards() -> None:
    found = rewards({"outcome": True, "format": 0.5})
    assert found == [Reward(value=1.0), Reward(name="format", value=0.5)]


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), {}, {"a": None}, [1]])
def test_what_is_not_a_reward(value: Any) -> None:
    with pytest.raises(VerifierError, match="the verifier returned"):
        rewards(value)


@pytest.mark.parametrize("function", [lambda task, answer: 1, lambda: 1, 17, lambda task, /: 1])
def test_what_is_not_a_verifier(function: Any) -> None:
    with pytest.raises(AgentError, match=r"the verifier (has the parameters|is a)"):
        Verifier(function)
