"""The domain: walks on a chessboard with periodic edges, such as "east east north : c 4".

The program computes the answer, so even an invented question has a known answer.
"""

from __future__ import annotations

from collections.abc import Callable

Square = tuple[int, int]  # column and row, from 0
Walk = tuple[list[str], Square]  # moves and their start

COLUMNS, ROWS = "abcdefgh", "12345678"
SIZE = 8
MOVES: dict[str, Callable[[int, int], Square]] = {
    "east": lambda x, y: ((x + 1) % SIZE, y),
    "west": lambda x, y: ((x - 1) % SIZE, y),
    "north": lambda x, y: (x, (y + 1) % SIZE),
    "south": lambda x, y: (x, (y - 1) % SIZE),
}
HERE = "here"  # a square that is not named
MAX_MOVES = 5  # most moves of a walk


def parse(question: str) -> Walk | None:
    """The moves and the start of a walk; None if the text is not a walk or is too long."""
    left, _, right = question.partition(" : ")
    moves, start = left.split(), square(right)
    known = 1 <= len(moves) <= MAX_MOVES and set(moves) <= MOVES.keys()
    return (moves, start) if known and start is not None else None


def square(text: str) -> Square | None:
    column, _, row = text.partition(" ")
    found = COLUMNS.find(column), ROWS.find(row)
    return found if len(column) == len(row) == 1 and min(found) >= 0 else None


def step(moves: list[str], start: Square) -> Walk:
    """The rest of the walk after its first move: the right plan."""
    return moves[1:], MOVES[moves[0]](*start)


def answer(moves: list[str], start: Square) -> str:
    while moves:
        moves, start = step(moves, start)
    return named(start)


def written(moves: list[str], start: Square | None) -> str:
    return " ".join([*moves, ":", HERE if start is None else named(start)])


def named(found: Square) -> str:
    return f"{COLUMNS[found[0]]} {ROWS[found[1]]}"


def vague(plan: str) -> bool:
    """Whether the plan does not name the square after the first move."""
    return plan.endswith(HERE)
