"""An untrained tiny Llama, and demonstrations for the warm-up: people who mostly repeat the words,
sometimes after "sure" and sometimes after "no"."""

import random
from pathlib import Path

import torch
from tasks import WORDS, draw

from agentrl.tiny import Conversation, make_model, word_tokenizer

HABITS = {"": 0.55, "sure ": 0.25, "no ": 0.2}


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer([*WORDS, "sure", "no"])
    make_model(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def demonstrations() -> list[dict[str, Conversation]]:
    rng = random.Random(0)
    shown = []
    for task in draw(10, 3000, heldout=False):
        (habit,) = rng.choices([*HABITS], [*HABITS.values()])
        user = {"role": "user", "content": task["input"]}
        shown.append({"messages": [user, {"role": "assistant", "content": habit + task["input"]}]})
    return shown
