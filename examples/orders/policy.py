"""Builds the clerk: a tiny Llama that names any desk. Which one is left to learn from rewards."""

import random
from pathlib import Path

from desks import DESKS, MONTHS

from agentrl.algorithms.model.tiny import Conversation, imitator, word_tokenizer


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    dice = random.Random(seed)
    shown: list[Conversation] = [
        [
            {"role": "system", "content": "Which desk?"},
            {"role": "user", "content": dice.choice(MONTHS)},
            {"role": "assistant", "content": dice.choice(DESKS)},
        ]
        for _ in range(1000)
    ]
    words = word_tokenizer(
        [*DESKS, *MONTHS, "Which", "desk?"], roles=("system", "user", "assistant")
    )
    imitator(directory, shown, tokenizer=words, seed=seed, steps=60)
