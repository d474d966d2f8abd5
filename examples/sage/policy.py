"""Builds the model that plays all four roles: each with the right format and many mistakes.

It imitates a challenger that mostly asks for one or two moves, a planner that often does not say
where the first move leads, a solver that often forgets the last one, and a critic that is right
most of the time.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import PROMPTS
from board import COLUMNS, HERE, LONGEST, MOVES, ROWS, Walk, answer, step, vague, written
from tasks import anywhere, walks

from agentrl.tiny import Conversation, imitator, word_tokenizer

DEMONSTRATIONS = 16_000
VALID, PLANNED, SOLVED, FAIR = 0.8, 0.4, 0.3, 0.95  # shares of what is as it should be
NO_MOVE = "dance"
OTHER = [NO_MOVE, ":", "->", HERE, "question", "plan", *"0123456789"]
WORDS = [*" ".join(PROMPTS.values()).split(), *MOVES, *COLUMNS, *ROWS, *OTHER]


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    dice = random.Random(seed)
    roles = (challenger, planner, solver, critic)
    shown = walks(f"demonstrations/{seed}", DEMONSTRATIONS, range(1, LONGEST + 1))
    imitator(
        directory,
        [roles[number % 4](walk, dice) for number, walk in enumerate(shown)],
        tokenizer=word_tokenizer(list(dict.fromkeys(WORDS)), ("system", "user", "assistant")),
        seed=seed,
        steps=1500,
        batch=64,
        lr=4e-3,
    )


def challenger(seed: Walk, dice: random.Random) -> Conversation:
    """A walk from another square, up to two moves longer; sometimes with a move that does not
    exist."""
    count = min(len(seed[0]) + dice.choice((0, 0, 0, 1, 1, 2)), LONGEST)
    moves = dice.choices(list(MOVES), k=count)
    if dice.random() > VALID:
        moves[-1] = NO_MOVE
    return turn("challenger", written(*seed), written(moves, anywhere(dice)))


def planner(walk: Walk, dice: random.Random) -> Conversation:
    return turn("planner", written(*walk), plan(walk, dice))


def solver(walk: Walk, dice: random.Random) -> Conversation:
    moves, start = walk
    said = answer(moves if dice.random() < SOLVED else moves[:-1], start)
    question, planned = written(*walk), plan(walk, dice)
    return turn("solver", question if vague(planned) else f"{question} -> {planned}", said)


def critic(walk: Walk, dice: random.Random) -> Conversation:
    question = written(*walk)
    if dice.random() < 0.5:
        good = dice.random() < 0.5
        asked = question if good else f"{NO_MOVE} {question}"
        return turn("critic", f"question {asked}", rated(good, dice))
    planned = plan(walk, dice)
    return turn("critic", f"plan {question} -> {planned}", rated(not vague(planned), dice))


def plan(walk: Walk, dice: random.Random) -> str:
    """The walk after its first move; often without the square that this leads to."""
    moves, start = step(*walk)
    return written(moves, start if dice.random() < PLANNED else None)


def rated(good: bool, dice: random.Random) -> str:
    return dice.choice("789") if good == (dice.random() < FAIR) else dice.choice("012")


def turn(role: str, asked: str, said: str) -> Conversation:
    return [
        {"role": "system", "content": PROMPTS[role]},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": said},
    ]
