"""Builds the model that plays all four roles: fluent in each, and good at none.

It imitates a challenger that mostly asks for one or two operations, a planner and a solver that
often skip one, and a critic that is right most of the time.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import PROMPTS
from lists import OPERATIONS, WORDS, answer, parse, step, written
from tasks import programs

from agentrl.algorithms.sft import Conversation
from agentrl.algorithms.tiny import imitator

DEMONSTRATIONS = 4000
VALID, PLANNED, SOLVED, FAIR = 0.8, 0.5, 0.5, 0.9  # shares of what is as it should be


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    dice = random.Random(seed)
    roles = (challenger, planner, solver, critic)
    questions = programs(f"demonstrations/{seed}", DEMONSTRATIONS, range(1, 4))
    shown = [roles[number % 4](question, dice) for number, question in enumerate(questions)]
    imitator(directory, shown, seed=seed, steps=600)


def challenger(seed: str, dice: random.Random) -> Conversation:
    """Other words and operations, one more at the most; or one that does not exist."""
    operations, words = parse(seed) or ([], [])
    count = min(len(operations) + dice.choice((0, 0, 1)), 3)
    names = dice.choices(list(OPERATIONS), k=count)
    if dice.random() > VALID:
        names[-1] = "shuffle"
    return turn("challenger", seed, written(names, dice.sample(WORDS, len(words))))


def planner(question: str, dice: random.Random) -> Conversation:
    return turn("planner", question, plan(question, dice))


def solver(question: str, dice: random.Random) -> Conversation:
    operations, words = parse(question) or ([], [])
    right = answer(operations, words) if dice.random() < SOLVED else answer(operations[:-1], words)
    known = question if dice.random() < 0.3 else f"{question} -> {plan(question, dice)}"
    return turn("solver", known, right)


def critic(question: str, dice: random.Random) -> Conversation:
    if dice.random() < 0.5:
        good = dice.random() < 0.5
        asked = question if good else f"shuffle {question}"
        return turn("critic", f"question {asked}", rated(good, dice))
    said = plan(question, dice)
    good = said == written(*step(*(parse(question) or ([], []))))
    return turn("critic", f"plan {question} -> {said}", rated(good, dice))


def plan(question: str, dice: random.Random) -> str:
    """The first step done, or only struck out."""
    operations, words = parse(question) or ([], [])
    right = dice.random() < PLANNED
    return written(*step(operations, words)) if right else written(operations[1:], words)


def rated(good: bool, dice: random.Random) -> str:
    return dice.choice("789") if good == (dice.random() < FAIR) else dice.choice("012")


def turn(role: str, asked: str, said: str) -> Conversation:
    return [
        {"role": "system", "content": PROMPTS[role]},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": said},
    ]
