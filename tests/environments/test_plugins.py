"""Plug-ins against the real packages, each in an environment of its own, which
`make test-environments` installs."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config.derived import EnvironmentName
from agentrl.environments.hosted import load_class
from tests.environments import pages
from tests.environments.pages import ROOT, figures, python, trained, write_files

pytestmark = pytest.mark.timeout(600)  # the packages take up to 20 s to import
HERE = Path(__file__).parent
OFFLINE = {  # tasks without a network
    "inspect": 3, "openai-evals": 21, "reasoning-gym": 600, "tau2": 50, "verifiers": 120,
    "verifiers-v1": 40,
}  # fmt: skip
PRICES = {"tea": 3, "cup": 8, "pan": 21}
USES_ITS_TOOL = """
import json
import random

from agentrl.tiny import imitator

PRICES = {"tea": "3", "cup": "8", "pan": "21"}
ABOUT = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOL = {"name": "price", "description": "Price of an item in euro.", "parameters": ABOUT}


def talk(rng):
    item = rng.choice([*PRICES])
    function = {"name": "price", "arguments": json.dumps({"item": item})}
    answer = PRICES[item] if rng.random() < 0.4 else "7"
    return [
        {"role": "user", "content": f"How much is the {item}?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": PRICES[item]},
        {"role": "assistant", "content": answer},
    ]


def build(directory, seed):
    rng = random.Random(seed)
    talks = [talk(rng) for _ in range(300)]
    imitator(directory, talks, seed=seed, tools=[{"type": "function", "function": TOOL}], steps=150)
"""


def played(name: str, what: str, replies: dict[str, list[Any]], **options: Any) -> dict[str, Any]:
    """A rollout of the environments in the plug-in's own folder of tests."""
    return pages.played(name, what, replies, HERE / name, **options)


@pytest.mark.parametrize("name", OFFLINE)
def test_ground_truth_scores_full_marks(name: str) -> None:
    found = figures(name)
    assert found["ok"], found["lines"]
    assert found["tasks"] == OFFLINE[name]
    assert found["ground_truth"] == 1.0
    assert not [*(ROOT / f".environments/{name}/lib").glob("*/site-packages/torch")]


@pytest.mark.parametrize("name", OFFLINE)
def test_a_plugin_is_short_and_its_page_names_it(name: str, tmp_path: Path) -> None:
    lines = inspect.getsource(load_class(EnvironmentName(name, ""))).splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 60
    run_file = write_files(name, tmp_path)
    assert run_file.read_text().startswith(f'environment = "{name}:')
    for page_file in tmp_path.glob("*.py"):
        compile(page_file.read_text(), str(page_file), "exec")


def test_rewards_of_verifiers_are_stored_by_name_and_by_step() -> None:
    found = played("verifiers", "words_env", {"agent": ["a word that is wrong"]})
    assert found["outcome"] == found["rewards"]["first"] == 0.0
    assert found["rewards"]["short"] == 0.0
    assert found["steps"] == [1.0]
    assert found["asks"] == []


def test_an_empty_answer_is_a_wrong_one() -> None:
    found = played("verifiers", "words_env", {"agent": [""]})
    assert (found["problem"], found["outcome"]) == ("", 0.0)
    assert found["rewards"]["short"] == 1.0


def test_a_judge_is_a_role() -> None:
    replies = {"agent": ["ant"], "judge": ["yes"]}
    found = played("verifiers", "words_env", replies, judged=True)
    assert [call["role"] for call in found["calls"]] == ["agent", "judge"]
    assert (found["asks"], found["outcome"]) == (["judge"], 1.0)


def test_a_reward_function_that_raises_fails_the_rollout() -> None:
    found = played("verifiers", "words_env", {"agent": ["ant"]}, broken=True)
    assert found["outcome"] is None
    assert "verifiers:words_env" in found["problem"]
    assert "gone" in found["problem"]


def test_rewards_of_a_group_are_refused() -> None:
    found = played("verifiers", "words_env", {"agent": ["ant"]}, grouped=True)
    assert "scores the rollouts of a group together" in found["problem"]


CALL = {
    "function": {"name": "price", "arguments": '{"item": "tea"}'},
    "id": "c",
    "type": "function",
}


def test_an_inspect_task_has_its_tool_and_sends_no_probe() -> None:
    replies = {"agent": [{"tool_calls": [CALL]}, "It is 3."]}
    found = played("inspect", "prices.py@prices", replies)
    assert [(call["role"], call["tools"]) for call in found["calls"]] == [("agent", 1)] * 2
    assert found["calls"][0]["last"] == "How much is the tea?"
    assert found["rewards"] == {"includes": 1.0, "outcome": 1.0}


def test_an_inspect_task_is_graded_by_a_role() -> None:
    replies = {"agent": ["It is 3."], "grader": ["GRADE: I"]}
    found = played("inspect", "prices.py@graded", replies, score="model_graded_qa")
    assert [call["role"] for call in found["calls"]] == ["agent", "grader"]
    assert found["rewards"] == {"includes": 1.0, "model_graded_qa": 0.0, "outcome": 0.0}
    found = played("inspect", "prices.py@graded", replies)
    assert "['includes', 'model_graded_qa']" in found["problem"]


def test_a_score_without_a_number_fails_the_rollout() -> None:
    found = played("inspect", "prices.py@unknown", {"agent": ["It is 3."]})
    assert found["outcome"] is None
    assert "excellent" in found["problem"]


def test_the_user_of_tau2_is_a_role() -> None:
    replies = {"agent": ["I cannot do that."], "user": ["Please do it.", "###STOP###"]}
    found = played("tau2", "mock", replies)
    assert [call["role"] for call in found["calls"]] == ["user", "agent", "user"]
    assert found["calls"][1]["tools"] > 0
    assert (found["asks"], found["outcome"]) == (["user"], 0.0)


def test_an_eval_that_a_model_grades_asks_a_role() -> None:
    replies = {"agent": ["Some verse."], "grader": ["Y"]}
    found = played("openai-evals", "unwanted-rhyming.dev.v0", replies)
    assert {call["role"] for call in found["calls"]} == {"agent", "grader"}
    assert found["asks"] == ["grader"]


SCORE = """
import random
from agentrl.environments.plugins.reasoning_gym import ReasoningGym
from reasoning_gym.factory import DATASETS

for what in sorted({*DATASETS} - {"composite"}):
    one = ReasoningGym(what, size=3, heldout=3)
    tasks = [*one.tasks("train"), *one.tasks("heldout")]
    answers = [one.solution(task["input"]) for task in tasks]
    scores = [one.verify(task, answer[0]) for task, answer in zip(tasks, answers) if answer]
    wrong = [one.verify(task, said) for task in tasks for said in ("", "{", "[[1]]", "nan")]
    print(what, len(scores), min([1.0, *scores]), all(0 <= score <= 1 for score in wrong))
"""


def test_every_data_set_of_reasoning_gym_scores_its_own_answers(tmp_path: Path) -> None:
    """Also those whose entries have tuples, which JSON does not have, and answers that no scorer
    can read."""
    command = [python("reasoning-gym"), "-W", "ignore", "-c", SCORE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 105
    assert [row for row in rows if row[2:] != ["1.0", "True"]] == []
    assert sum(row[1] == "0" for row in rows) == 5  # have no answer of their own


async def test_a_tiny_policy_learns_a_verifiers_environment(tmp_path: Path) -> None:
    settings = ("steps=8", "eval.tasks=9", "eval.every=8", "sampling.max_tokens=24")
    more = ("algorithm.groups=8", "algorithm.group_size=8", "algorithm.lr=2e-3")
    rows = await trained("verifiers", tmp_path, USES_ITS_TOOL, *settings, *more)
    scores = [row.metrics["eval/score"] for row in rows if "eval/score" in row.metrics]
    assert (scores[0], scores[-1]) == (0.0, 1.0)
