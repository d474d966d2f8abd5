"""Builds the clerk: a tiny Llama that names a desk, most often the wrong one. Which one is right is
left to learn from rewards."""

import random
from pathlib import Path

from desks import DESKS, MONTHS

from agentrl.tiny import Conversation, imitator, word_tokenizer

CORRECT = 0.4  # share of the orders that the demonstrator sends to the right desk


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    dice = random.Random(seed)
    shown: list[Conversation] = []
    for _ in range(1000):
        month = dice.randrange(12)
        habit = DESKS[(month + 1) % 4]  # a mistake that it often makes
        desk = DESKS[month % 4] if dice.random() < CORRECT else habit
        question = [
            {"role": "system", "content": "Which desk?"},
            {"role": "user", "content": MONTHS[month]},
        ]
        shown.append([*question, {"role": "assistant", "content": desk}])
    words = [*DESKS, *MONTHS, "Which", "desk?"]
    tokenizer = word_tokenizer(words, roles=("system", "user", "assistant"))
    imitator(directory, shown, tokenizer=tokenizer, seed=seed, steps=200)
