"""Builds the model that the run trains: a tiny Llama that makes offers in their form, any.

No weights are downloaded. It imitates players who offer whatever is legal, and agree to three
offers out of ten whatever they are. The result is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path

from game import describe
from tasks import train

from agentrl.algorithms.sft import Conversation
from agentrl.algorithms.tiny import imitator, word_tokenizer
from agentrl.runners.games import Game, View

DEMONSTRATIONS = 3000
STEPS = 300  # of imitation
AGREES = 0.3
SEEN = ["You", "are", "P0", "P1", "Pool:", "My", "values:", "offers:"]
SAID = ["Agree", "Offer:", "Book:", "Hat:", "Basketball:"]
NUMBERS = [f"{number}{mark}" for number in range(11) for mark in (",", "")]
WORDS = [*SEEN, *SAID, *NUMBERS]  # a number together with its comma


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    dice = random.Random(seed)
    imitator(
        directory,
        [demonstrate(dice) for _ in range(DEMONSTRATIONS)],
        tokenizer=word_tokenizer(WORDS),
        seed=seed,
        steps=STEPS,
        batch=32,
    )


def demonstrate(dice: random.Random) -> Conversation:
    """One turn of a game in which nobody minds what is offered."""
    game = Game("bargaining", train[0]["input"]["parameters"])
    state, turns = game.start(), []
    while not state.is_terminal():
        if state.is_chance_node():
            state.apply_action(dice.choice(state.legal_actions()))
            continue
        view = game.view(state, state.current_player())
        move = chosen(view, dice)
        turns.append([*describe(view), {"role": "assistant", "content": move}])
        state.apply_action(view.legal[move])
    return dice.choice(turns)


def chosen(view: View, dice: random.Random) -> str:
    if "Agree" in view.legal and dice.random() < AGREES:
        return "Agree"
    return dice.choice([move for move in view.legal if move != "Agree"])
