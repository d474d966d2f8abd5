"""Build the policy: a tiny Llama that knows only the format of a move.

No weights are downloaded. It imitates players who make random legal moves, and learns from rewards
which moves are good. The result is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path

from game import MARKS, describe

from agentrl.runners.games import Game
from agentrl.tiny import Conversation, imitator, word_tokenizer

DEMONSTRATIONS = 10000
STEPS = 800  # of imitation
MOVES = [f"{mark}({row},{column})" for mark in MARKS for row in range(3) for column in range(3)]
WORDS = [*MARKS, "to", "move:", "legal:", *MOVES]


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    imitator(
        directory,
        [demonstrate(rng) for _ in range(DEMONSTRATIONS)],
        tokenizer=word_tokenizer(WORDS),
        seed=seed,
        steps=STEPS,
        batch=64,
    )


def demonstrate(rng: random.Random) -> Conversation:
    """A random legal move in a position of a random game."""
    game = Game("tic_tac_toe")
    positions, state = [], game.start()
    while not state.is_terminal():
        view = game.view(state, state.current_player())
        positions.append(view)
        state.apply_action(rng.choice(list(view.legal.values())))
    view = rng.choice(positions)
    return [*describe(view), {"role": "assistant", "content": rng.choice(list(view.legal))}]
