"""Replies that show the form of an answer, for `agentrl demonstrate --script`. They are right where
the question alone says what is right, because replies that ignore it would teach to ignore it;
else they are guesses with words of the question."""

from __future__ import annotations

import re
import zlib
from random import Random
from typing import Any

from tests.benchmarks.public.tasks import TASKS

Messages = list[dict[str, Any]]


def right(name: str, messages: Messages) -> str:
    task = TASKS[name]
    return task.form.format(task.truth(str(messages[-1]["content"]), {}))


def cups(messages: Messages, tools: Any) -> str:
    return right("three-cards", messages)


def names(messages: Messages, tools: Any) -> str:
    return right("needle-haystack", messages)


def words(messages: Messages, tools: Any) -> str:
    return right("word-sorting", messages)


def products(messages: Messages, tools: Any) -> str:
    return right("products", messages)


KIN = "mother father wife husband son daughter brother sister grandmother grandfather"


def relations(messages: Messages, tools: Any) -> str:
    return question_and_dice(messages)[1].choice(KIN.split())


def functions(messages: Messages, tools: Any) -> dict[str, Any]:
    """A call of any function, with words and numbers of the request as arguments."""
    question, dice = question_and_dice(messages)
    function = dice.choice(tools)["function"]
    fields = function["parameters"]["properties"]
    needed = function["parameters"].get("required", [])
    arguments = {name: value_of(fields[name], question, dice) for name in needed if name in fields}
    return {"tool_calls": [{"name": function["name"], "arguments": arguments}]}


def value_of(field: dict[str, Any], question: str, dice: Random) -> Any:
    kind = field.get("type")
    if kind == "array":
        return [value_of(field.get("items", {}), question, dice)]
    if kind == "object":
        return {}
    if kind == "boolean":
        return dice.random() < 0.5
    if kind in ("integer", "number"):
        return int(dice.choice(re.findall(r"\d{1,6}", question) or ["1"]))
    return dice.choice(field.get("enum") or re.findall(r"\w+", question) or [""])


def question_and_dice(messages: Messages) -> tuple[str, Random]:
    """The last message, and dice that are the same for the same question."""
    question = str(messages[-1]["content"])
    return question, Random(zlib.crc32(question.encode()))
