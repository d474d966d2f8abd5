"""Prompts of two to four words, for training and held out."""

import random

WORDS = [f"w{letter}" for letter in "abcdefghij"]
Task = dict[str, str]


def is_heldout(words: list[str]) -> bool:
    return sum((i + 3) * 31 * (WORDS.index(word) + 1) for i, word in enumerate(words)) % 5 == 0


def draw(seed: int, count: int, *, heldout: bool) -> list[Task]:
    rng, found = random.Random(seed), list[Task]()
    while len(found) < count:
        words = rng.sample(WORDS, rng.randint(2, 4))
        if is_heldout(words) == heldout:
            found.append({"id": f"{seed}-{len(found)}", "input": " ".join(words)})
    return found


train = draw(11, 400, heldout=False)
heldout = draw(12, 80, heldout=True)
