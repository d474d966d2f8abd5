"""What a verifier is given, and what it may return."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.core.config import resolve
from agentrl.core.errors import AgentError, ConfigError
from agentrl.core.types import Reward, Scope
from agentrl.runners.scoring import Verifier, VerifierError, as_rewards, load


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
    found = as_rewards({"outcome": True, "format": 0.5})
    assert found == [Reward(value=1.0), Reward(name="format", value=0.5)]


def test_rows_are_taken_as_they_are() -> None:
    step = Reward(value=1, name="step", scope=Scope.TRANSITION, target="t")
    assert as_rewards(step) == [step]
    assert as_rewards([step, Reward(value=True)]) == [step, Reward(value=1.0)]
    assert as_rewards((Reward(value=2, scope="role", target="critic"),)) == [  # type: ignore[arg-type]
        Reward(value=2.0, scope=Scope.ROLE, target="critic")
    ]


NAN, ROLE = float("nan"), Scope.ROLE
WRONG_ROWS = [
    Reward(value=NAN),
    [Reward(value=1), 1],
    Reward(value=1, scope=ROLE),
    Reward(value=1, target="x"),
    Reward(value=1, scope=ROLE, target=7),  # type: ignore[arg-type]
    Reward(value=1, scope="token"),  # type: ignore[arg-type]
    Reward(value="1"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", NAN, float("inf"), {}, [], {"a": None}, [1], *WRONG_ROWS),
        *(np.array([0.5]), {"a": np.array([1, 2])}, 10**400, {1: 0.5, "1": 0.6}),
        *(bytearray(b"1"), memoryview(b"1"), np.array("1"), np.array("1", dtype=object)),
        *(np.datetime64(1, "s"), Decimal("nan"), np.float32("nan"), {"outcome": 1, "a": None}),
    ],
)
def test_what_is_not_a_reward(value: Any) -> None:
    with pytest.raises(VerifierError, match="the verifier returned"):
        as_rewards(value)


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.array(0.5), Decimal("0.5"), Fraction(1, 2), np.bool_(False) + 0.5]
)
def test_numbers_of_other_classes_are_rewards(value: Any) -> None:
    assert as_rewards(value) == [Reward(value=0.5)]


@pytest.mark.parametrize("function", [lambda task, answer: 1, lambda: 1, 17, lambda task, /: 1])
def test_what_is_not_a_verifier(function: Any) -> None:
    with pytest.raises(AgentError, match=r"the verifier (has the parameters|is a)"):
        Verifier(function)


REWARDS = """
def short(result):
    return 1.0 / len(result)

async def steps(trace):
    return {"calls": len(trace.transitions)}
"""


async def test_further_rewards_have_the_names_of_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "further_rewards.py").write_text(REWARDS)
    sources = {"brevity": "further_rewards.py:short"}
    verifier = load(lambda task: task["answer"] == "x", sources, tmp_path)
    assert not verifier.wants_trace
    assert await verifier(task={"answer": "x"}, result="four", trace=None) == [
        Reward(value=1.0),
        Reward(name="brevity", value=0.25),
    ]
    assert load("", {"steps": "further_rewards.py:steps"}, tmp_path).wants_trace


@pytest.mark.parametrize(
    ("path", "sources", "message"),
    [
        ("", {}, "verifier.path is missing"),
        (len, {"outcome": "x.py:y"}, "are both set"),
        (len, {"brevity": "missing.py:short"}, "verifier.rewards.brevity = 'missing.py:short'"),
        (len, {"brevity": "brevity"}, "verifier.rewards.brevity = 'brevity'"),
    ],
)
def test_rewards_that_cannot_be_loaded(path: Any, sources: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(path, sources, Path())


@pytest.mark.parametrize(
    "returned",
    [1.5, {"outcome": -0.1, "format": 1}, Reward(2.0), [Reward(7.0, scope=Scope.ROLE, target="a")]],
)
async def test_an_outcome_outside_of_its_range_is_no_reward(returned: Any) -> None:
    verifier = Verifier(lambda result: returned, range=(0.0, 1.0))
    with pytest.raises(VerifierError, match=r"the outcome .*, and verifier\.range is 0 to 1"):
        await verifier(task={}, result="", trace=None)


async def test_other_rewards_have_no_range() -> None:
    rows = {"outcome": 1, "length": 300}
    assert await Verifier(lambda result: rows, range=(0, 1))(task={}, result="", trace=None)
    with pytest.raises(ConfigError, match=r"verifier\.range = \[1\.0, 0\.0\]: write the lowest"):
        resolve({"name": "r", "verifier": {"range": [1, 0]}}, source="run.toml")


async def test_a_second_verifier_scores_a_sample_and_costs_no_rollout() -> None:
    def first(result: str) -> float:
        return 1.0

    def second(result: str) -> float:
        if result == "3":
            raise ValueError("no number")
        return 0.0

    verifier = Verifier(first, audit=second)
    rows = [await verifier(task={}, result=str(n), trace=None) for n in range(64)]
    assert all(row[0].value == 1.0 for row in rows)
    sampled = [row[1] for row in rows if len(row) > 1]
    assert 6 <= len(sampled) <= 28
    assert {(row.name, row.value) for row in sampled} == {("audit", 0.0)}
    again = [await verifier(task={}, result=str(n), trace=None) for n in range(64)]
    assert again == rows


async def test_a_slow_second_verifier_costs_no_rollout(caplog: pytest.LogCaptureFixture) -> None:
    async def waits(result: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    verifier = Verifier(lambda result: 1.0, audit=waits)
    given = [{"task": {}, "result": str(n), "trace": None, "workspace": None} for n in range(16)]
    assert [await verifier.audited(one, 0.01) for one in given] == [[]] * 16
    assert "verifier.audit raised TimeoutError" in caplog.text
    huge = Verifier(lambda result: 1.0, audit=lambda result: 1e300)
    assert [await huge.audited(one) for one in given] == [[]] * 16
