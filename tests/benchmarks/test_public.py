"""What the public benchmark calls right, and what it says of a reward that rose alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import load
from tests.benchmarks.public import teachers
from tests.benchmarks.public.__main__ import Results
from tests.benchmarks.public.figures import interval, summary, table
from tests.benchmarks.public.measures import calls
from tests.benchmarks.public.tasks import TASKS
from tests.benchmarks.public.trained import RUNS

NEEDLES = (
    "Ann likes tea. Bob likes tennis. Ann-Marie likes chess. \n"
    "Who likes tennis? Reply only with a name."
)
SUM = "State the final answer to the following arithmetic problem: 28 - 90 ="
SORTED = "Sort. 1, 2\n\nNow, sort these words in descending order (using ASCII): ant, bee, Cat\n"
PRODUCT = (
    "Solve the following multiplication: 2 * 3 * 4. Give only the result as your final answer."
)
LETTERS = 'How many times does the letter "a" appear in the text: "A banana"?'
FAMILY = "Ann is married to Bob. How is Ann related to Bob? Answer with a single word."
CUPS = (
    "Ball starts: [X] [1] [2]\nShuffle 1/2: swapped cups 0 and 1.\nShuffle 2/2: swapped cups 1"
    " and 2.\nCups: [0] [1] [2]  (Guess NOW!)"
)


@pytest.mark.parametrize(
    ("task", "question", "reply", "strict", "lenient"),
    [
        ("needle-haystack", NEEDLES, "Bob", True, True),
        ("needle-haystack", NEEDLES, "The one who likes tennis is Bob.", True, True),
        ("needle-haystack", NEEDLES, "Ann or Bob", False, True),
        ("needle-haystack", NEEDLES, "Ann", False, False),
        ("chain-sum", SUM, "-62", True, True),
        ("chain-sum", SUM, "28 - 90 = -62.", True, True),
        ("chain-sum", SUM, "-62 -61 -60", False, True),
        ("chain-sum", SUM, "62", False, False),
        ("products", PRODUCT, "<answer>24</answer>", True, True),
        ("products", PRODUCT, "2 * 3 = 6, * 4 = 24", False, True),
        ("word-sorting", SORTED, "bee, ant, Cat", True, True),
        ("word-sorting", SORTED, "Sorted: bee, ant, Cat", False, True),
        ("word-sorting", SORTED, "bee, Cat, ant", False, False),
        ("letter-counting", LETTERS, "4", True, True),
        ("letter-counting", LETTERS, "1 2 3 4 5", False, True),
        ("family-relationships", FAMILY, "Wife.", True, True),
        ("family-relationships", FAMILY, "wife, mother, son", False, True),
        ("family-relationships", FAMILY, "husband", False, False),
        ("three-cards", CUPS, "[2]", True, True),
        ("three-cards", CUPS, "[0] [1] [2]", False, True),
        ("three-cards", CUPS, "[1]", False, False),
    ],
)
def test_what_is_right(task: str, question: str, reply: str, strict: bool, lenient: bool) -> None:
    row = {"answer": "wife"}
    assert TASKS[task].judge(row, [(question, reply)]) == (strict, lenient)
    assert TASKS[task].judge(row, []) == (False, False)


@pytest.mark.parametrize("name", TASKS)
def test_a_run_file_is_pinned_and_has_a_teacher(name: str) -> None:
    config = load(RUNS / f"{name}.toml")
    assert config.environment.startswith(f"{TASKS[name].plugin}:")
    assert (config.policy.lora.rank, config.algorithm.lr, config.algorithm.groups) == (16, 5e-4, 4)
    assert bool(config.warmup.data) == bool(teacher := TASKS[name].teacher)
    assert not teacher or callable(getattr(teachers, teacher))


POWER = [{"f.of": {"formula": ["x**3", "x^3"], "n": [10], "unit": ["m", ""]}}]


def said(**given: Any) -> str:
    return json.dumps([{"name": "f_of", "arguments": json.dumps(given)}])


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (said(formula="x ** 3", n=10), (True, True)),
        (said(formula="x^3", n=10.0, unit="M"), (True, True)),
        (said(formula="x*3", n=10), (False, True)),
        (said(formula="x**3"), (False, False)),
        (said(formula="x**3", n=10, more=1), (False, False)),
        (said(formula="x**3", n="10"), (False, False)),
        ("f_of(formula='x**3', n=10)", (False, False)),
    ],
)
def test_a_call_is_right_with_values_that_are_allowed(reply: str, right: tuple[bool, bool]) -> None:
    assert calls(reply, POWER) == right


def test_a_call_too_many_is_right_leniently() -> None:
    twice = json.dumps(json.loads(said(formula="x**3", n=10)) * 2)
    assert calls(twice, POWER) == (False, True)


def test_a_teacher_is_right_where_the_question_says_what_is() -> None:
    assert teachers.names([{"role": "user", "content": NEEDLES}], []) == "Bob"
    assert teachers.cups([{"role": "user", "content": CUPS}], []) == "[2]"
    assert teachers.products([{"role": "user", "content": PRODUCT}], []) == "<answer>24</answer>"


def run(right: str, reward: float, why: str) -> dict[str, Any]:
    """A run in which nothing was right or rewarded before."""
    before = {"reward": [0.0] * len(right), "strict": "0" * len(right), "lenient": "0" * len(right)}
    after = {"reward": [reward] * len(right), "strict": right, "lenient": right}
    cost = {"cpu_per_step": 2.0, "peak_mb": 1000.0}
    return {"before": before, "after": after, "why": why, "reasons": [], **cost}


def test_a_reward_that_rises_alone_must_be_said() -> None:
    honest, hack = "1" * 150 + "0" * 50, "0" * 200
    rows = {
        ("learned", "train", 1): run(honest, 0.75, "It learned."),
        ("named", "train", 1): run(hack, 0.6, "The scores rose, but they are no evidence."),
        ("silent", "train", 1): run(hack, 0.6, "It learned."),
    }
    found = summary(rows)
    assert {task: row["unsaid"] for task, row in found.items()} == {
        "learned": [], "named": [], "silent": [1],
    }  # fmt: skip
    assert "`silent`, seed 1: It learned. UNSAID" in table(found)
    assert found["learned"]["strict_gain"][0] == pytest.approx(0.75)


def test_seeds_are_averaged_before_the_interval() -> None:
    rows = {("a", "train", seed): run("10" * 100, 0.5, "") for seed in (1, 2, 3)}
    assert summary(rows)["a"]["strict_gain"] == interval([1.0, 0.0] * 100)


def test_finished_arms_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Results(file).add(("a", "train", 1), {"why": "It learned."})
    assert Results(file).rows == {("a", "train", 1): {"why": "It learned."}}
    assert json.loads(file.read_text())["seed"] == 1
