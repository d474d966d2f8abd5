"""A search in process: what it finds, what it spends, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.gepa_search import gepa_search
from agentrl.algorithms.prompt_search import (
    Candidate,
    Reflection,
    Search,
    SearchEnd,
    TaskResult,
    answers,
    apo_search,
    prompt_texts,
)
from agentrl.core.config import resolve
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.types import PromptText
from examples.orders import world
from tests.benchmarks.prompts import CONFIG, SEEDS, TEXTS, InProcess, blind_search, measure, run

ALGORITHMS = [gepa_search, apo_search]
TASKS = 28


def search(backend: InProcess, **more: Any) -> Search:
    return Search(replace(CONFIG, **more), TEXTS, backend, TASKS, random_seed=backend.seed)


def ended(algorithm: Callable[[Search], None], found: Search) -> str:
    with pytest.raises(SearchEnd) as end:
        algorithm(found)
    return str(end.value)


class Answering(InProcess):
    """The reflector says what it is told to."""

    def __init__(self, *said: str, tokens: int = 0) -> None:
        super().__init__(0)
        self.said, self.spent = said, tokens

    def ask(self, number: int, question: str) -> Reflection:
        self.asked += 1
        answer = self.said[min(number, len(self.said)) - 1]
        if not answer:
            return super().ask(number, question)
        base = {"id": str(number), "run": "run", "step": 0, "question": question}
        return Reflection(answer=answer, completion_tokens=self.spent, **base)


class Lossy(InProcess):
    """No candidate but the seed has a score of the first task that it plays."""

    def play(
        self, batches: Sequence[tuple[Candidate, Sequence[int]]], *, traces: bool
    ) -> list[list[TaskResult]]:
        found = super().play(batches, traces=traces)
        for rows, (candidate, _) in zip(found, batches, strict=True):
            if candidate.parents:
                rows[0] = rows[0]._replace(score=math.nan)
        return found


def test_what_the_searches_reach() -> None:
    found = measure()
    assert found.keys() == {"gepa", "apo", "blind", "rewrite_over_read"}
    assert found["gepa"] >= 0.95
    assert found["gepa"] - max(found["apo"], found["blind"]) >= 0.25


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, blind_search])
@pytest.mark.parametrize("budget", [57, 100])
def test_the_budget_is_never_exceeded(algorithm: Any, budget: int) -> None:
    for seed in SEEDS[:3]:
        backend = InProcess(seed)
        found = search(backend, budget=budget)
        ended(algorithm, found)
        assert budget - 24 <= found.rollouts <= budget


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_repeated_search_is_the_same(algorithm: Any) -> None:
    (_, first), (_, second) = run(algorithm, 3), run(algorithm, 3)
    assert first.candidates == second.candidates
    assert first.metrics == second.metrics


def test_it_stops_when_perfect() -> None:
    found = search(InProcess(0), perfect_score=0.2)
    assert "perfect" in ended(gepa_search, found)
    assert found.rollouts < 60
    assert found.best.state == "accepted"


def test_candidates_have_parents_states_and_reflections() -> None:
    _, backend = run(gepa_search, 0)
    seed, *others = backend.candidates.values()
    assert (seed.parents, seed.state, seed.reflection) == ([], "accepted", None)
    assert {one.state for one in others} == {"accepted", "rejected"}
    for one in others:
        (parent,) = one.parents
        before = backend.candidates[parent].texts
        changed = [a for a, b in zip(one.texts, before, strict=True) if a != b]
        assert len(changed) == 1
        assert one.reflection is not None
    last = backend.metrics[-1]
    assert last["prompts/val"] > 0.9
    assert {"prompts/rollouts", "prompts/length/extractor"} <= last.keys()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Sure!", "no text between lines"),
        ("```\n\n```", "no text between lines"),
        (f"```\n{'x' * 5000}\n```", "5000 characters"),
        ("```\nSay 2031-07-09.\n```", "the answer of a held-out task, '2031-07-09'"),
    ],
)
def test_useless_answers_end_the_search_and_make_no_candidate(
    algorithm: Any, said: str, why: str
) -> None:
    backend = Answering(said)
    found = search(backend)
    found.answers = {"2031-07-09", "DE"}
    with pytest.raises(AgentRLError, match=why) as error:
        algorithm(found)
    assert "larger model" in str(error.value)
    assert list(backend.candidates) == [found.candidate(found.seed_texts).id]


def test_one_useless_answer_costs_only_the_parents_rollouts() -> None:
    found = search(Answering("?", "", "?", ""))
    ended(gepa_search, found)
    assert found.scores[found.best.id] > 0.5


def test_tokens_of_reflections_are_counted() -> None:
    backend = Answering("```\nx y\n```", tokens=900)
    found = search(backend)
    assert "rollouts is spent" in ended(gepa_search, found)
    assert found.tokens == 900 * backend.asked > 0


def test_a_missing_score_neither_helps_nor_harms() -> None:
    backend = Lossy(0)
    found = search(backend)
    seed = found.seed_texts
    ((first, *_),) = found.evaluate([(seed, found.validation)])
    child = found.propose(seed, "extractor", "rule iso is not kept.")
    ((same, *_),) = found.evaluate([(child, found.validation)])
    assert same.score == first.score


def test_nothing_is_scored_where_everything_is_missing() -> None:
    class Broken(InProcess):
        def play(self, batches: Any, *, traces: bool) -> list[list[TaskResult]]:
            return [
                [TaskResult(math.nan, failure="role 'x': not found")] * len(t) for _, t in batches
            ]

    with pytest.raises(AgentRLError, match="role 'x': not found"):
        gepa_search(search(Broken(0)))


def test_a_component_without_a_call_is_named() -> None:
    found = search(InProcess(0))
    found.seed = [*TEXTS, replace(TEXTS[0], component="critic", role="critic")]
    with pytest.raises(ConfigError, match=r"components\.critic: no call .* role 'critic'"):
        gepa_search(found)


def test_answers_are_what_only_held_out_tasks_say() -> None:
    tasks = [{"id": "1", "input": "a", "expected": {"label": "positive", "n": 4711}}]
    heldout = [tasks[0] | {"id": "2", "input": "b", "x": [{"n": 815.5, "y": None}, "positive"]}]
    assert answers(tasks, heldout) == {"815.5"}


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import agentrl.algorithm_process, agentrl.algorithms.prompts\n"
        "import agentrl.algorithms.prompts, agentrl.algorithms.prompt_search\n"
        "import agentrl.cli.models, agentrl.algorithms.prompt_search\n"
        "import agentrl.runners.gateway.features, agentrl.runners.main"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_scripted_task_can_be_solved() -> None:
    best = dict(world.SEED)
    for role, sentence in world.RULES.values():
        best[role] += f" {sentence}"
    tasks = world.make(20, "x")
    for task in tasks:
        said = world.formatter(best["formatter"], world.extractor(best["extractor"], task["input"]))
        assert set(world.checks(task, said).values()) == {1.0}


def test_texts_of_a_run_file(tmp_path: Path) -> None:
    def texts(**components: Any) -> list[PromptText]:
        prompts = {"reflector": "policy", "components": components}
        return prompt_texts(resolve({"root": str(tmp_path), "prompts": prompts}, source="test"))

    for name, text in (("a", "Be brief.\n"), ("b", "Be brief. Be kind."), ("empty", "\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    tool = {"file": "b.txt", "role": "a", "tool": "look"}
    own = {"file": "b.txt", "insert": True}
    found = texts(a="a.txt", look=tool, own=own)
    assert [(one.role, one.seed, one.text, one.tool) for one in found] == [
        ("a", "Be brief.", "Be brief.", ""),
        ("a", "Be brief. Be kind.", "Be brief. Be kind.", "look"),
        ("own", "", "Be brief. Be kind.", ""),
    ]
    assert len(texts(a="a.txt", b="a.txt")) == 2  # two roles may have one text
    for components, why in (
        ({"a": "a.txt", "b": {"file": "b.txt", "role": "a"}}, "one text contains the other"),
        ({"a": "none.txt"}, r"components\.a: there is no file"),
        ({"empty": "empty.txt"}, r"empty\.txt is empty"),
    ):
        with pytest.raises(ConfigError, match=why):
            texts(**components)
