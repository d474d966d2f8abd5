"""Build the frozen model: its system message names the relation that it knows. It resolves a step
of a question along this relation and repeats everything else."""

from __future__ import annotations

import random
from pathlib import Path

from world import CHAINS, CITIES, PEOPLE, RELATIONS, ask, step

from agentrl.tiny import Conversation, imitator, word_tokenizer

DEMONSTRATIONS = 8000
WORDS = [*PEOPLE, *CITIES, *RELATIONS, "of", ";"]


def build(directory: Path, seed: int) -> float:
    """Write model, tokenizer and chat template into `directory`. Returns the last loss."""
    rng = random.Random(seed)
    return imitator(
        directory,
        [demonstrate(rng) for _ in range(DEMONSTRATIONS)],
        tokenizer=word_tokenizer(WORDS, ("system", "user", "assistant")),
        seed=seed,
        steps=500,
        batch=64,
        lr=4e-3,
    )


def demonstrate(rng: random.Random) -> Conversation:
    """One call: only the question, as in the first round, or also earlier messages, of which the
    last is closest to an answer."""
    chain = rng.choice(CHAINS)
    steps = [ask(chain, rng.choice(RELATIONS[chain[0]][0]))]
    for relation in chain:
        steps.append(step(relation, steps[-1]))
    heard = sorted(rng.choices(range(len(steps)), k=rng.randrange(len(RELATIONS) + 1)))
    known = [steps[0], *(steps[place] for place in heard)]
    relation = rng.choice(list(RELATIONS))
    return [
        {"role": "system", "content": relation},
        {"role": "user", "content": " ; ".join(known)},
        {"role": "assistant", "content": step(relation, known[-1])},
    ]
