"""Build the clerk: a tiny Llama that names a desk, most often a wrong one. It learns the right one
from rewards."""

import random
from pathlib import Path

from desks import DESKS, MONTHS

from agentrl.tiny import Conversation, imitator, word_tokenizer

CORRECT = 0.4  # fraction of orders that the demonstrator sends to the right desk


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    shown: list[Conversation] = []
    for _ in range(1000):
        month = rng.randrange(12)
        habit = DESKS[(month + 1) % 4]  # its usual mistake
        desk = DESKS[month % 4] if rng.random() < CORRECT else habit
        question = [
            {"role": "system", "content": "Which desk?"},
            {"role": "user", "content": MONTHS[month]},
        ]
        shown.append([*question, {"role": "assistant", "content": desk}])
    words = [*DESKS, *MONTHS, "Which", "desk?"]
    tokenizer = word_tokenizer(words, roles=("system", "user", "assistant"))
    imitator(directory, shown, tokenizer=tokenizer, seed=seed, steps=200)
