"""SAGE's roles are paid by what they did, and its questions answer themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.core.types import RolloutState
from agentrl.store import open_store
from tests.examples.parts import modules, train_once

Parts = dict[str, ModuleType]
NAMES = ("agent", "board", "policy", "tasks", "verifier")


@pytest.fixture(scope="module")
def sage() -> Iterator[Parts]:
    with modules("sage", *NAMES) as parts:
        yield parts


def test_walks_are_walked(sage: Parts) -> None:
    board = sage["board"]
    assert board.answer(*board.parse("east east north : h 8")) == "b 1"
    assert board.answer(*board.parse("south west south : a 1")) == "h 7"
    assert board.step(*board.parse("west north : c 4")) == (["north"], (1, 3))
    assert board.parse("dance : c 4") is None
    assert board.parse("east : i 4") is None
    assert board.parse("east : c 9") is None
    assert board.parse("east : c") is None
    assert board.parse("east : c 4 4") is None
    assert board.parse("east") is None
    assert board.parse(": c 4") is None
    assert board.parse("east " * board.MAX_MOVES + ": c 4") is not None
    assert board.parse("east " * (board.MAX_MOVES + 1) + ": c 4") is None


def test_heldout_walks_are_longer_than_seeds(sage: Parts) -> None:
    tasks, parse = sage["tasks"], sage["board"].parse
    assert all(len(parse(task["input"]["seed"])[0]) == 1 for task in tasks.train)
    assert all(len(parse(task["input"]["question"])[0]) >= 3 for task in tasks.heldout)


def test_demonstrations_are_what_the_roles_are_asked(sage: Parts) -> None:
    policy, dice = sage["policy"], random.Random(0)
    for role in ("challenger", "planner", "solver", "critic"):
        for walk in sage["tasks"].walks("demo", 20, range(1, 6)):
            conversation = getattr(policy, role)(walk, dice)
            system, _, said = conversation
            assert system["content"] == sage["agent"].PROMPTS[role]
            formed = sage["verifier"].well_formed(role, said["content"])
            assert formed or policy.NO_MOVE in said["content"]
            words = " ".join(message["content"] for message in conversation).split()
            assert set(words) <= set(policy.WORDS)


@pytest.mark.parametrize(
    ("role", "said", "formed"),
    [
        ("challenger", "east : c 4", True),
        ("challenger", "east : here", False),
        ("planner", "east : d 4", True),
        ("planner", ": d 4", True),
        ("planner", "east : here", True),
        ("planner", "dance : d 4", False),
        ("planner", "d 4", False),
        ("solver", "d 4", True),
        ("solver", "d", False),
        ("critic", "7", True),
        ("critic", "10", False),
    ],
)
def test_what_has_the_form_of_a_role(sage: Parts, role: str, said: str, formed: bool) -> None:
    assert sage["verifier"].well_formed(role, said) == formed


@pytest.mark.parametrize("quality", ["8", "2"])
async def test_roles_are_paid_by_what_they_did(run_example: Any, sage: Parts, quality: str) -> None:
    board = sage["board"]
    role_of = {prompt: role for role, prompt in sage["agent"].PROMPTS.items()}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        system, asked = (message["content"] for message in body["messages"])
        role = role_of[system]
        if role == "challenger":
            return {"content": f"west {asked}"}
        if role == "critic":
            return {"content": quality if asked.startswith("question") else "3"}
        question = asked.partition(" -> ")[0]
        if role == "planner":
            return {"content": board.written(*board.step(*board.parse(question)))}
        return {"content": board.answer(*board.parse(question))}

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


async def test_one_step_is_trained(tiny_model_dir: Path, tmp_path: Path) -> None:
    """What the tiny model says is noise, so the gates stay closed; everything around it is as in
    any training."""
    await train_once("sage", tiny_model_dir, tmp_path, "runner.processes=1", "agent.timeout=300")
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rollouts = await store.rollouts("sage", step=0)
        assert {rollout.state for rollout in rollouts} == {RolloutState.SUCCEEDED}
        (row,) = [row for row in await store.steps("sage") if row.committed]
    assert row.metrics["reward/transition:sage/challenger/mean"] == 0.0
    assert row.metrics["reward/transition:sage/critic/mean"] == 0.0
