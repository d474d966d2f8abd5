"""What several plug-ins need."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any


def held_out(many: int, split: str) -> list[int]:
    """The indices of a split, where the package has only one set: one of five is held out."""
    return [i for i in range(many) if (i % 5 == min(4, many - 1)) == (split == "heldout")]


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a model's tool call. Those that are no JSON object become one that no tool
    takes, so that the model is told, as of any other call that fails."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict):
            return found
    return {"not_a_json_object": text}


@contextmanager
def some_key() -> Iterator[None]:
    """For packages that make a client when they are imported, and never call it."""
    had = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = had or "none"
    try:
        yield
    finally:
        if not had:
            del os.environ["OPENAI_API_KEY"]


class OfThisRollout:
    """Stands for an object that each rollout has of its own, where a package keeps one."""

    def __init__(self) -> None:
        self._own: ContextVar[Any] = ContextVar("own")

    def set_own(self, value: Any) -> None:
        self._own.set(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own.get(), name)


def question_in(given: Any) -> str:
    """The question of an input, which is a text, or messages if there is a system prompt."""
    return str(given if isinstance(given, str) else given[-1]["content"])
