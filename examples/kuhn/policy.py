"""Build the policy: a tiny Llama that passes and bets, each half of the time.

No weights are downloaded. It imitates a player who chooses legal moves uniformly at random, so it
starts with the exploitability of the uniform policy and learns all strategy from rewards. The
result is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path

from game import CARDS, DONE, GAME, describe

from agentrl.runners.games import Game
from agentrl.tiny import Conversation, imitator, word_tokenizer


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    imitator(
        directory,
        [shown for _ in range(500) for shown in demonstrate(rng)],
        tokenizer=word_tokenizer([*CARDS, *DONE.values()]),
        seed=seed,
        steps=200,
        batch=64,
        lr=3e-3,
    )


def demonstrate(rng: random.Random) -> list[Conversation]:
    """The turns of a game between two random players."""
    game = Game(GAME)
    state, shown = game.start(), []
    while not state.is_terminal():
        if state.is_chance_node():
            state.apply_action(rng.choice(state.legal_actions()))
            continue
        view = game.view(state, state.current_player())
        move = rng.choice(list(view.legal))
        shown.append([*describe(view), {"role": "assistant", "content": move}])
        state.apply_action(view.legal[move])
    return shown
