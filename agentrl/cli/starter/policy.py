"""Builds a tiny model that answers in the right form, mostly wrongly; remove it for a real one."""

import json
import random
from pathlib import Path

from agentrl.tiny import imitator

TASKS = [json.loads(line) for line in Path(__file__).with_name("tasks.jsonl").open()]


def build(directory: Path, seed: int) -> None:
    """Write the model and its tokenizer into `directory`."""
    dice = random.Random(seed)
    shown = [demonstrate(dice.choice(TASKS), dice) for _ in range(500)]
    imitator(directory, shown, seed=seed, steps=150)


def demonstrate(task: dict[str, str], dice: random.Random) -> list[dict[str, str]]:
    answer = task["answer"] if dice.random() < 0.3 else str(dice.randrange(2, 11))
    return [{"role": "user", "content": task["input"]}, {"role": "assistant", "content": answer}]
