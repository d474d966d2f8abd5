"""Builds the frozen model: it is told which relation it knows, resolves a step of a question along
that relation, and repeats everything else."""

from __future__ import annotations

import random
from pathlib import Path

from world import CHAINS, CITIES, PEOPLE, RELATIONS, ask, step

from agentrl.tiny import Conversation, imitator, word_tokenizer

DEMONSTRATIONS = 8000
WORDS = [*PEOPLE, *CITIES, *RELATIONS, "of", ";"]


def build(directory: Path, seed: int) -> float:
    """Write model, tokenizer and chat template into `directory`. Returns its last loss."""
    dice = random.Random(seed)
    return imitator(
        directory,
        [demonstrate(dice) for _ in range(DEMONSTRATIONS)],
        tokenizer=word_tokenizer(WORDS, ("system", "user", "assistant")),
        seed=seed,
        steps=500,
        batch=64,
        lr=4e-3,
    )


def demonstrate(dice: random.Random) -> Conversation:
    """One call: the question alone, as in the first round, or with earlier messages, the last of
    which is closest to an answer."""
    chain = dice.choice(CHAINS)
    steps = [ask(chain, dice.choice(RELATIONS[chain[0]][0]))]
    for relation in chain:
        steps.append(step(relation, steps[-1]))
    heard = sorted(dice.choices(range(len(steps)), k=dice.randrange(len(RELATIONS) + 1)))
    known = [steps[0], *(steps[place] for place in heard)]
    relation = dice.choice(list(RELATIONS))
    return [
        {"role": "system", "content": relation},
        {"role": "user", "content": " ; ".join(known)},
        {"role": "assistant", "content": step(relation, known[-1])},
    ]
