"""Converts verdicts of packages with their own scorers to rewards. A missing verdict raises an
error and never becomes a number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any


def held_out(count: int, split: str) -> list[int]:
    """The indices of a split, for packages with only one set: every fifth is held out."""
    return [i for i in range(count) if (i % 5 == min(4, count - 1)) == (split == "heldout")]


def digest(question: Any) -> str:
    """A digest of the question, for tasks with only an index as input."""
    return hashlib.blake2b(str(question).encode(), digest_size=8).hexdigest()


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a model's tool call. Anything but a JSON object becomes arguments that no
    tool accepts, so that the model gets an error message, as for any other failed call."""
    with suppress(ValueError, RecursionError):
        if isinstance(decoded := json.loads(text), dict):
            return decoded
    return {"not_a_json_object": text}


@contextmanager
def placeholder_key() -> Iterator[None]:
    """Sets a key for packages that create a client when they are imported, and never use it."""
    had = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = had or "none"
    try:
        yield
    finally:
        if not had:
            del os.environ["OPENAI_API_KEY"]


class PerRollout:
    """Proxy for a package's global object, with an instance for each rollout."""

    def __init__(self) -> None:
        self._instance: ContextVar[Any] = ContextVar("instance")

    def set_instance(self, value: Any) -> None:
        self._instance.set(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance.get(), name)


def question_in(task_input: Any) -> str:
    """The question of an input, which is a text, or messages if there is a system prompt."""
    return str(task_input if isinstance(task_input, str) else task_input[-1]["content"])


VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # Inspect's verdicts
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
SAMPLES = "inspect_ai._eval.task.run"  # logger of the code that runs samples


@contextmanager
def no_timeouts() -> Iterator[None]:
    """Raises RuntimeError at its end if Inspect logged a TimeoutError of a solver or tool, which it
    scores nevertheless."""
    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "timeout error" in record.getMessage():
                messages.append(record.getMessage())

    logger, handler = logging.getLogger(SAMPLES), Kept(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if messages:
        raise RuntimeError("a solver or tool ran out of time (TimeoutError)")


def check_choice(names: list[str], score: str) -> None:
    """Raises ValueError unless `score` selects one of a task's scores."""
    if not names:
        raise ValueError("the task has no scorer, so nothing would be learned from it")
    if len(names) > 1 and not score:
        raise ValueError(f"set environment_options.score to one of its scores: {names}")
    if score and score.partition("/")[0] not in names:
        raise ValueError(f"environment_options.score = {score!r}: it has the scores {names}")


def numbered(names: list[str]) -> list[str]:
    """Names as Inspect writes them into its log: the second of a name ends in 1."""
    unique: list[str] = []
    for name in names:
        count = sum(earlier == name for earlier in names[: len(unique)])
        unique.append(f"{name}{count}" if count else name)
    return unique


def scores(by_scorer: dict[str, Any], score: str) -> dict[str, float]:
    """All scores of a sample as numbers, and the one named `score`, or the only one, as the
    outcome. Raises RuntimeError if it is not clear which one counts."""
    values: dict[str, float] = {}
    for scorer, row in by_scorer.items():
        rows = row.value if isinstance(row.value, dict) else {"": row.value}
        for key, value in rows.items():
            name = f"{scorer}/{key}".rstrip("/")
            values[name] = number(value, name)
    if not values:
        raise RuntimeError("no scorer gave a score")
    if score not in values and (score or len(values) > 1):
        candidates = [name for name in values if name.partition("/")[0] == score] or [*values]
        if score and len(candidates) == 1:
            return values | {"outcome": values[candidates[0]]}
        raise RuntimeError(f"set environment_options.score to one of its scores: {candidates}")
    return values | {"outcome": values[score or next(iter(values))]}


def number(value: Any, name: str) -> float:
    """Convert a score as Inspect does, but raise an error where Inspect would return 0 with a
    warning."""
    if isinstance(value, str):
        if (word := VALUES.get(value, WORDS.get(value.lower()))) is not None:
            return word
        try:
            return float(value)
        except ValueError:
            raise RuntimeError(
                f"the score {name} is {value!r:.80}, which is not a number"
            ) from None
    if not isinstance(value, int | float):
        raise RuntimeError(f"the score {name} is {value!r:.80}, which is not a number")
    return float(value)


def scores_of_episode(episode: Any) -> dict[str, float]:
    """The rewards of an episode. Raises RuntimeError if the episode was not judged: its total
    ignores rewards that were never computed, for example after a time-out, which is not in its list
    of errors."""
    traces = episode.traces
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors:
        raise RuntimeError(errors[0].message)
    if late := [trace for trace in traces if trace.is_timeout]:
        raise RuntimeError(f"it ran out of time ({late[0].stop_condition})")
    if episode.is_timeout or not episode.ok:
        raise RuntimeError("the episode did not end well, and gave no reason")
    if len(traces) != 1:
        raise RuntimeError(f"{len(traces)} agents played; one is supported")
    rewards = traces[0].rewards
    if missing := [name for name, row in rewards.items() if row is None]:
        raise RuntimeError(f"it gave no reward {missing[0]!r}")
    if not rewards:
        raise RuntimeError("it gave no reward: the taskset has no function with @vf.reward")
    return {name: row.value for name, row in rewards.items()} | {"outcome": traces[0].reward}
