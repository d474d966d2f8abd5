"""The domain: programs over a list of words, such as "reverse rotate: Oslo Lima Cairo".

Running a program answers it, so a question that nobody has written before has a known answer.
"""

from __future__ import annotations

from collections.abc import Callable

WORDS = ("Oslo", "Lima", "Cairo", "Delhi", "Porto", "Quito", "Seoul", "Tunis", "Turin", "Vienna")
OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "reverse": lambda words: words[::-1],
    "rotate": lambda words: words[1:] + words[:1],  # the first one to the end
    "swap": lambda words: words[1::-1] + words[2:],  # the first two
}
LONGEST = 3  # operations of a program
LENGTHS = range(3, 5)  # words of a list


def parse(question: str) -> tuple[list[str], list[str]] | None:
    """Operations and words; None if it is no program, or one that is too long or too short."""
    left, colon, right = question.partition(": ")
    operations, words = left.split(), right.split()
    known = set(operations) <= OPERATIONS.keys() and set(words) <= set(WORDS)
    fits = 1 <= len(operations) <= LONGEST and len(words) in LENGTHS and len({*words}) == len(words)
    return (operations, words) if colon and known and fits else None


def step(operations: list[str], words: list[str]) -> tuple[list[str], list[str]]:
    """What is left to do once the first operation is done: a plan for the rest."""
    return operations[1:], OPERATIONS[operations[0]](words)


def answer(operations: list[str], words: list[str]) -> str:
    while operations:
        operations, words = step(operations, words)
    return " ".join(words)


def written(operations: list[str], words: list[str]) -> str:
    return f"{' '.join(operations)}: {' '.join(words)}"
