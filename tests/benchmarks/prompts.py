"""Prompt searches on scripted models, in this process, and what a candidate costs the gateway.

    python -m tests.benchmarks.prompts --json [--quick | --only stored] [--seeds 0 1]

gepa, apo, blind: mean test score of ten seeds at 200 rollouts.
rewrite_over_read: the time to put a candidate into a call over the time to read the call. The rest,
which plays whole runs for some 20 minutes and is left out by --quick, is in `prompts_commands`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.gepa_search import gepa_search
from agentrl.algorithms.prompt_search import (
    Candidate,
    Reflection,
    Search,
    SearchEnd,
    TaskResult,
    apo_search,
)
from agentrl.core.config.learning import PromptsConfig
from agentrl.core.types import PromptText
from agentrl.runners.apis.base import CHAT
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.features import apply_prompts
from agentrl.runners.gateway.request import read_request
from examples.orders import world
from tests.benchmarks import prompts_commands

SEEDS = range(10)
PARTS = ("quick", "stored", "alternate")
TESTS = world.make(200, "test")
TEXTS = [PromptText(component=r, role=r, seed=t, text=t) for r, t in world.SEED.items()]
CONFIG = PromptsConfig(components=dict.fromkeys(world.SEED, ""), reflector="r", budget=200)


def play(task: dict[str, Any], texts: dict[str, str]) -> TaskResult:
    said = {"extractor": world.extractor(texts["extractor"], task["input"])}
    said["formatter"] = world.formatter(texts["formatter"], said["extractor"])
    kept = world.checks(task, said["formatter"])
    read = {"extractor": task["input"], "formatter": said["extractor"]}
    outcome, examples = fmean(kept.values()), {}
    for role, answer in said.items():
        note = world.feedback(role, kept, answer)
        feedback = f"outcome = {outcome:g}; clean = {note == 'fine.':d}: {note}"
        own = {"Read": json.dumps(read[role]), "Said": answer, "Feedback": feedback}
        examples[role] = own
    return TaskResult(outcome, examples)


def score(texts: dict[str, str]) -> float:
    return fmean(play(task, texts).score for task in TESTS)


class InProcess:
    """A backend whose agent and reflector are functions."""

    def __init__(self, seed: int) -> None:
        self.seed, self.asked = seed, 0
        self.tasks = world.make(16, f"train{seed}") + world.make(12, f"val{seed}")
        self.metrics: list[dict[str, float]] = []
        self.candidates: dict[str, Candidate] = {}

    def play(
        self, batches: Sequence[tuple[Candidate, Sequence[int]]], *, traces: bool
    ) -> list[list[TaskResult]]:
        return [
            [play(self.tasks[task], {t.component: t.text for t in candidate.texts}) for task in own]
            for candidate, own in batches
        ]

    def ask(self, number: int, question: str) -> Reflection:
        self.asked += 1
        answer = world.reflect(question, self.seed)
        return Reflection(id=str(number), run="run", step=0, question=question, answer=answer)

    def put(self, candidates: Sequence[Candidate]) -> None:
        self.candidates |= {candidate.id: candidate for candidate in candidates}

    def end_iteration(self, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)


def blind_search(search: Search) -> None:
    """Hill climbing with the same edits and without feedback."""
    dice, best = random.Random(search.random_seed), search.seed_texts
    search.evaluate([(best, search.validation)])
    while True:
        role = dice.choice(list(best))
        rules = [rule for rule, (who, _) in world.RULES.items() if who == role]
        text = world.mutated(best[role], rules, dice.random() < 0.3, dice)
        new = best | {role: text}
        search.evaluate([(new, search.validation)])
        if search.scores[search.candidate(new).id] >= search.scores[search.candidate(best).id]:
            best = new


def run(algorithm: Callable[[Search], None], seed: int, **more: Any) -> tuple[float, InProcess]:
    """The test score of what a search finds."""
    backend = InProcess(seed)
    settings = msgspec.structs.replace(CONFIG, **more)
    search = Search(settings, TEXTS, backend, len(backend.tasks), random_seed=seed)
    try:
        algorithm(search)
    except SearchEnd:
        search.end_iteration()
    assert search.rollouts <= settings.budget
    return score({text.component: text.text for text in search.best.texts}), backend


def rewrite_over_read() -> float:
    system = {"role": "system", "content": "Extract the fields of the order.\n" + "x" * 4000}
    messages = [system, *({"role": "user", "content": "y" * 2000} for _ in range(20))]
    raw = msgspec.json.encode({"model": "m", "messages": messages})
    prompt = replace(TEXTS[0], text="Extract them all.")

    def best(prompts: list[PromptText], times: int = 300) -> float:
        took = []
        for _ in range(times):
            call = read_request(CHAT, raw, ConversationMemory(), 0)
            started = time.perf_counter()
            apply_prompts(call, "extractor", prompts)
            msgspec.json.encode(call.fields)
            took.append(time.perf_counter() - started)
        return min(took)

    read = []
    for _ in range(300):
        started = time.perf_counter()
        read_request(CHAT, raw, ConversationMemory(), 0)
        read.append(time.perf_counter() - started)
    return (best([prompt]) - best([])) / min(read)


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, float]:
    algorithms = {"gepa": gepa_search, "apo": apo_search, "blind": blind_search}
    found = {name: [run(search, seed) for seed in seeds] for name, search in algorithms.items()}
    scores = {name: fmean(value for value, _ in rows) for name, rows in found.items()}
    return scores | {
        "rewrite_over_read": rewrite_over_read(),
    }


def candidates(seed: int) -> list[str]:
    """Those of the search in process, in order."""
    return list(run(gepa_search, seed)[1].candidates)


def main() -> None:
    parser = argparse.ArgumentParser(description="searches of prompts on scripted models")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--quick", action="store_true", help="as --only quick")
    parts.add_argument("--only", choices=PARTS, help="one part, not all three")
    parser.add_argument("--seeds", type=int, nargs="+", help="of each part, instead of its own")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    only, found = "quick" if given.quick else given.only, dict[str, float]()
    if only in (None, "quick"):
        found |= measure(given.seeds or SEEDS)
    if only in (None, "stored"):
        found["stored"] = prompts_commands.stored(given.seeds or SEEDS, candidates)
    if only in (None, "alternate"):
        found |= prompts_commands.in_turns(given.seeds or prompts_commands.SEEDS)
    values = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps(values) if given.json else values)


if __name__ == "__main__":
    main()
