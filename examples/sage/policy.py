"""Build the model that plays all four roles, each with the right format and many mistakes.

It imitates a challenger that mostly asks for one or two moves, a planner that often does not name
the square after the first move, a solver that often forgets the last move, and a critic that is
mostly right.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import PROMPTS
from board import COLUMNS, HERE, MAX_MOVES, MOVES, ROWS, Walk, answer, step, vague, written
from tasks import anywhere, walks

from agentrl.tiny import Conversation, imitator, word_tokenizer

DEMONSTRATIONS = 16_000
VALID, PLANNED, SOLVED, FAIR = 0.8, 0.4, 0.3, 0.95  # fractions of right demonstrations
NO_MOVE = "dance"
OTHER = [NO_MOVE, ":", "->", HERE, "question", "plan", *"0123456789"]
WORDS = [*" ".join(PROMPTS.values()).split(), *MOVES, *COLUMNS, *ROWS, *OTHER]


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    roles = (challenger, planner, solver, critic)
    shown = walks(f"demonstrations/{seed}", DEMONSTRATIONS, range(1, MAX_MOVES + 1))
    imitator(
        directory,
        [roles[number % 4](walk, rng) for number, walk in enumerate(shown)],
        tokenizer=word_tokenizer(list(dict.fromkeys(WORDS)), ("system", "user", "assistant")),
        seed=seed,
        steps=1500,
        batch=64,
        lr=4e-3,
    )


def challenger(seed: Walk, rng: random.Random) -> Conversation:
    """A walk from another square, up to two moves longer; sometimes with an invalid move."""
    count = min(len(seed[0]) + rng.choice((0, 0, 0, 1, 1, 2)), MAX_MOVES)
    moves = rng.choices(list(MOVES), k=count)
    if rng.random() > VALID:
        moves[-1] = NO_MOVE
    return turn("challenger", written(*seed), written(moves, anywhere(rng)))


def planner(walk: Walk, rng: random.Random) -> Conversation:
    return turn("planner", written(*walk), plan(walk, rng))


def solver(walk: Walk, rng: random.Random) -> Conversation:
    moves, start = walk
    said = answer(moves if rng.random() < SOLVED else moves[:-1], start)
    question, planned = written(*walk), plan(walk, rng)
    return turn("solver", question if vague(planned) else f"{question} -> {planned}", said)


def critic(walk: Walk, rng: random.Random) -> Conversation:
    question = written(*walk)
    if rng.random() < 0.5:
        good = rng.random() < 0.5
        asked = question if good else f"{NO_MOVE} {question}"
        return turn("critic", f"question {asked}", rated(good, rng))
    planned = plan(walk, rng)
    return turn("critic", f"plan {question} -> {planned}", rated(not vague(planned), rng))


def plan(walk: Walk, rng: random.Random) -> str:
    """The walk after its first move, often without the name of the new square."""
    moves, start = step(*walk)
    return written(moves, start if rng.random() < PLANNED else None)


def rated(good: bool, rng: random.Random) -> str:
    return rng.choice("789") if good == (rng.random() < FAIR) else rng.choice("012")


def turn(role: str, asked: str, said: str) -> Conversation:
    return [
        {"role": "system", "content": PROMPTS[role]},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": said},
    ]
