"""SAGE's roles are paid by what they did, and its questions answer themselves."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.examples.parts import modules

Parts = dict[str, ModuleType]
NAMES = ("agent", "lists", "policy", "tasks", "verifier")


@pytest.fixture(scope="module")
def sage() -> Iterator[Parts]:
    with modules("sage", *NAMES) as parts:
        yield parts


def test_programs_are_run(sage: Parts) -> None:
    lists = sage["lists"]
    run = lists.answer(*lists.parse("reverse rotate swap: Oslo Lima Cairo Delhi"))
    assert run == "Lima Cairo Oslo Delhi"
    assert lists.step(["rotate", "swap"], ["Oslo", "Lima"]) == (["swap"], ["Lima", "Oslo"])
    assert lists.parse("shuffle: Oslo Lima Cairo") is None
    assert lists.parse("reverse: Oslo Rome Lima") is None
    assert lists.parse("Oslo Lima Cairo") is None
    assert lists.parse(": Oslo Lima Cairo") is None
    assert lists.parse("swap: Oslo Lima") is None
    assert lists.parse("swap: Oslo Oslo Lima") is None
    assert lists.parse("swap swap swap swap: Oslo Lima Cairo") is None


def test_heldout_programs_are_no_seeds(sage: Parts) -> None:
    tasks, parse = sage["tasks"], sage["lists"].parse
    assert all(len(parse(task["input"]["seed"])[0]) == 1 for task in tasks.train)
    assert all(len(parse(task["input"]["question"])[0]) > 1 for task in tasks.heldout)


def test_demonstrations_are_what_the_roles_are_asked(sage: Parts) -> None:
    policy, dice = sage["policy"], random.Random(0)
    for role in ("challenger", "planner", "solver", "critic"):
        for question in sage["tasks"].programs("demo", 20, range(1, 4)):
            system, _, said = getattr(policy, role)(question, dice)
            assert system["content"] == sage["agent"].PROMPTS[role]
            formed = sage["verifier"].well_formed(role, said["content"])
            assert formed or "shuffle" in said["content"]


@pytest.mark.parametrize("quality", ["8", "2"])
async def test_roles_are_paid_by_what_they_did(run_example: Any, sage: Parts, quality: str) -> None:
    lists = sage["lists"]
    role_of = {prompt: role for role, prompt in sage["agent"].PROMPTS.items()}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        system, asked = (message["content"] for message in body["messages"])
        role = role_of[system]
        if role == "challenger":
            return {"content": re.sub("^", "rotate ", asked)}
        if role == "critic":
            return {"content": quality if asked.startswith("question") else "3"}
        question = asked.partition(" -> ")[0]
        if role == "planner":
            return {"content": lists.written(*lists.step(*lists.parse(question)))}
        return {"content": lists.answer(*lists.parse(question))}

    for trace in await run_example("sage", answer):
        roles = {call.id: call.role for call in trace.transitions}
        paid = [
            (roles[row.target], row.value) for row in trace.rollout.rewards if row.name == "sage"
        ]
        if quality == "2":  # the gate is closed: nothing is answered
            assert paid == [("challenger", pytest.approx((2 / 9 + 1) / 2)), ("critic", 1.0)]
            assert trace.rollout.reward() == 0.0
            continue
        assert trace.rollout.reward() == 1.0
        assert dict(paid) == {
            "challenger": pytest.approx((8 / 9 + 0 + 1) / 3),
            "critic": 1.0,
            "planner": pytest.approx(0.9 / 3 + 0.1),
            "solver": pytest.approx(0.2 / 3 + 0.7 + 0.1),
        }
        assert len(paid) == 8
