"""Build the policy: a tiny Llama that prefers larger shares.

No weights are downloaded. It imitates players who choose an offer with a probability proportional
to its value to themselves, and who agree more often if the offer leaves them more. They ignore the
other player's values. The result is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path

from game import amounts, describe, read
from tasks import train

from agentrl.runners.games import Game, View
from agentrl.tiny import Conversation, imitator, word_tokenizer

DEMONSTRATIONS = 6000
STEPS = 800  # of imitation
WHOLE = 10  # value of the pool for each player
SEEN = ["P0", "P1", "after", "offers", "worth", "Left:"]
SAID = ["Agree", "Offer:", "Book:", "Hat:", "Basketball:"]
NUMBERS = [f"{number}{mark}" for number in range(WHOLE + 1) for mark in (",", "")]
WORDS = [*SEEN, *SAID, *NUMBERS]  # a number together with its comma


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    imitator(
        directory,
        [demonstrate(rng) for _ in range(DEMONSTRATIONS)],
        tokenizer=word_tokenizer(WORDS),
        seed=seed,
        steps=STEPS,
        batch=32,
    )


def demonstrate(rng: random.Random) -> Conversation:
    """A random turn of a game between two such players."""
    game = Game("bargaining", train[0]["input"]["parameters"])
    state, turns = game.start(), []
    while not state.is_terminal():
        if state.is_chance_node():
            state.apply_action(rng.choice(state.legal_actions()))
            continue
        view = game.view(state, state.current_player())
        move = chosen(view, rng)
        turns.append([*describe(view), {"role": "assistant", "content": move}])
        state.apply_action(view.legal[move])
    return rng.choice(turns)


def chosen(view: View, rng: random.Random) -> str:
    deal = read(view)
    if deal.offers and rng.random() < deal.worth(deal.left()) / WHOLE:
        return "Agree"
    offers = [move for move in view.legal if move != "Agree"]
    return rng.choices(offers, [deal.worth(amounts(move)) for move in offers])[0]
