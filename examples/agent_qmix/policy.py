"""Builds the frozen model: it does the step of a question for which its notes have the fact, and
passes everything else on."""

from __future__ import annotations

import random
from pathlib import Path

from world import task

from agentrl.algorithms.sft import Conversation
from agentrl.algorithms.tiny import imitator

DEMONSTRATIONS = 3000


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    dice = random.Random(seed)
    imitator(directory, [demonstrate(dice) for _ in range(DEMONSTRATIONS)], seed=seed, steps=400)


def demonstrate(dice: random.Random) -> Conversation:
    """One call: what is known ends with what is nearest to an answer."""
    found = task(dice)
    steps = [found["question"]]
    for _ in range(steps[0].count(" of ")):
        steps.append(solve(steps[-1], found["notes"]))
    reached = dice.randrange(len(steps))
    heard = sorted(dice.choices(range(reached + 1), k=dice.randrange(3)))
    known = [steps[0], *(steps[place] for place in heard), steps[reached]]
    notes = dice.choice(found["notes"])
    return [
        {"role": "system", "content": notes},
        {"role": "user", "content": "; ".join(known)},
        {"role": "assistant", "content": solve(steps[reached], [notes])},
    ]


def solve(question: str, notes: list[str]) -> str:
    """The question with its innermost step done, if the notes allow."""
    *outer, relation, subject = ["", *question.split(" of ")]
    for text in notes:
        name, _, facts = text.partition(": ")
        known = dict(pair.split() for pair in facts.split(", "))
        if name == relation and subject in known:
            return " of ".join([*outer[1:], known[subject]])
    return question
