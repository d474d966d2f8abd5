"""What the sections of the store benchmark write: rollouts and model calls of realistic size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from agentrl.types import NewRollout, Transition, float32, int32

PROMPT, COMPLETION = 256, 128  # tokens
CHARACTERS = 4  # of text per token
WORDS = "the agent looks at the table and asks for the next row of the staff database "
NUMBERS = itertools.count()


def rollouts(name: str, n: int, group: int = 4) -> list[NewRollout]:
    """`n` rollouts of run `run` in groups of `group`."""
    return [
        NewRollout(
            id=f"{name}/{i}",
            run="run",
            group=f"{name}/{i // group}",
            index=i % group,
            task={"input": text(40), "answer": str(i)},
        )
        for i in range(n)
    ]


def calls(attempt: str, n: int) -> Iterator[Transition]:
    """`n` calls of an attempt that share no prefix, with the text the tokens stand for."""
    for index in range(n):
        number = next(NUMBERS)
        yield Transition(
            id=f"{attempt}-{index}",
            attempt=attempt,
            index=index,
            prompt=int32(range(number, number + PROMPT)),
            completion=int32(range(COMPLETION)),
            logprobs=float32([-0.25] * COMPLETION),
            version=1,
            messages=[{"role": "user", "content": f"{number} {text(PROMPT)}"}],
            answer={"role": "assistant", "content": text(COMPLETION)},
        )


def text(tokens: int) -> str:
    """Text of about that many tokens."""
    size = tokens * CHARACTERS
    return (WORDS * (size // len(WORDS) + 1))[:size]
