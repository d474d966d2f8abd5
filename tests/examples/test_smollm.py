"""The agents of examples/smollm, their tasks, verifiers and demonstrations. `make smollm` trains
the real model; here a tiny one takes its place."""

from __future__ import annotations

import json
import re
from os.path import normpath
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.core.config import load
from tests.examples.parts import EXAMPLES, modules, train_once

CALCULATOR = "smollm/calculator"


@pytest.fixture
def prices() -> Any:
    with modules("smollm", "tasks", "verifier") as own:
        yield own


@pytest.fixture
def calculator() -> Any:
    pytest.importorskip("langchain")
    with modules(CALCULATOR, "tasks", "verifier", "agent", "demonstrations") as own:
        yield own


def test_no_thing_of_a_heldout_list_is_in_training_or_in_the_prompt(
    prices: dict[str, ModuleType],
) -> None:
    tasks = prices["tasks"]
    train, heldout = (
        {word for task in some for word in re.findall(r"(\w+):", task["input"])}
        for some in (tasks.train, tasks.heldout)
    )
    assert not train & heldout
    assert not any(thing in (EXAMPLES / "smollm/agent.py").read_text() for thing in heldout)


def test_only_the_asked_price_alone_is_right(prices: dict[str, ModuleType]) -> None:
    verify = prices["verifier"].verify
    for task in prices["tasks"].train:
        listed = dict(re.findall(r"(\w+): (\d+) dollars", task["input"]))
        asked = re.search(r"does the (\w+) cost", task["input"])[1]  # type: ignore[index]
        answers = {
            name: verify(task, f"The {name} costs {listed[name]} dollars.") for name in listed
        }
        assert answers == {name: float(name == asked) for name in listed}
        assert verify(task, " ".join(listed.values())) == 0


def test_a_product_is_asked_for_once_and_read_with_commas(
    calculator: dict[str, ModuleType],
) -> None:
    tasks, verify = calculator["tasks"], calculator["verifier"].verify
    every = tasks.train + tasks.heldout
    assert len({task["id"] for task in every}) == len(every) == 192
    task = {"input": "What is 43 times 75?", "answer": 3225}
    assert verify(task, "43 times 75 is 3,225.") == 1
    assert [verify(task, reply) for reply in ("3.225 or 32251", "32 3225", "not 3225")] == [0] * 3


def test_demonstrations_call_the_agents_tool_and_three_of_ten_are_right(
    calculator: dict[str, ModuleType],
) -> None:
    shown, tasks = calculator["demonstrations"], calculator["tasks"]
    right = 0
    for task, one in zip(tasks.train, shown.conversations, strict=True):
        question, call, result, answer = one["messages"]
        function = call["tool_calls"][0]["function"]
        assert one["tools"][0]["function"]["name"] == function["name"] == "multiply"
        found = calculator["agent"].multiply.invoke(json.loads(function["arguments"]))
        assert result["content"] == answer["content"] == found
        assert question["content"] == task["input"]
        right += calculator["verifier"].verify(task, answer["content"])
    assert 0.2 < right / len(shown.conversations) < 0.4


def test_the_run_files_name_the_model_that_make_fetches() -> None:
    makefile = (EXAMPLES.parent / "Makefile").read_text()
    assert "SMOLLM := examples/smollm/model\n" in makefile
    for folder in ("smollm", CALCULATOR):
        config = load(EXAMPLES / folder / "run.toml")
        assert normpath(config.path(config.policy.model)) == str(EXAMPLES / "smollm/model")


async def test_the_calculator_is_warmed_up_and_trained(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("langchain")
    few = ["warmup.steps=1", "warmup.batch=2", "policy.lora.rank=2"]
    await train_once(CALCULATOR, tiny_model_dir, tmp_path / "run", *few)
    assert (tmp_path / "run/warmup/adapter_config.json").is_file()
