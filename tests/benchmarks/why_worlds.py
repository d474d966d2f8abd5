"""Tasks, agents and verifiers of the runs of `tests.benchmarks.why`: what a random model of 0.1 M
parameters learns, or cannot learn, in seconds."""

from __future__ import annotations

import asyncio
import json
import os
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

Agent = Callable[[str], Awaitable[str]]
Verifier = Callable[[dict[str, Any], str], float | dict[str, float]]
Task = dict[str, Any]
COLOURS = ("red", "blue")


def bucket(text: str, salt: str = "") -> int:
    """0 to 99."""
    return zlib.crc32(f"{salt}/{text}".encode()) % 100


# -- tasks
def words(n: int, seed: str, **more: Any) -> list[Task]:
    """Different inputs, which say nothing."""
    dice = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [{"input": "".join(dice.choices(letters, k=8)), **more} for _ in range(n)]


def colours(n: int, seed: str) -> list[Task]:
    """The first word says which answer is right."""
    return [{"input": f"{COLOURS[i % 2]} {task['input']}"} for i, task in enumerate(words(n, seed))]


# -- agents
async def ask(messages: Sequence[dict[str, str]], url: str = "") -> dict[str, Any]:
    url = (url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions"
    async with httpx.AsyncClient(verify=False, timeout=60.0) as client:
        answer = await client.post(url, json={"model": "policy", "messages": list(messages)})
    if answer.is_error:
        raise ValueError(answer.text)
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def once(task: str) -> str:
    choice = await ask([{"role": "user", "content": task}])
    return str(choice["message"]["content"] or "")


async def twice(task: str) -> str:
    """The second call reads the first answer."""
    first = await once(task)
    choice = await ask([{"role": "user", "content": f"{task} {first}"}])
    return first[:1] + str(choice["message"]["content"] or "")[:1]


async def only_whole(task: str) -> str:
    """Nothing of an answer that was cut off."""
    choice = await ask([{"role": "user", "content": task}])
    whole = choice["finish_reason"] != "length"
    return str(choice["message"]["content"] or "") if whole else ""


async def marked_if_whole(task: str) -> str:
    choice = await ask([{"role": "user", "content": task}])
    return ("+" if choice["finish_reason"] != "length" else "-") + str(
        choice["message"]["content"] or ""
    )


def sometimes(share: float, other: Callable[[str], str]) -> Agent:
    """Does something else than to ask its model, in this share of its rollouts."""
    dice = random.Random(share)

    async def agent(task: str) -> str:
        return other(task) if dice.random() < share else await once(task)

    return agent


def slow(share: float, seconds: float) -> Agent:
    dice = random.Random(share)

    async def agent(task: str) -> str:
        await asyncio.sleep(seconds * (dice.random() < share))
        return await once(task)

    return agent


def fails(task: str) -> str:
    raise RuntimeError("the tool's server is gone")


def from_elsewhere(task: str) -> str:
    """As from a model at an address of the agent's own."""
    return "abcdefgh"[bucket(task) % 8]


# -- verifiers
def first_in(share: int, salt: str = "", at: int = 0) -> Verifier:
    """1 for answers whose first character is among this share of all."""
    return lambda task, result: float(
        bool(result[at:]) and bucket(result[at : at + 1], salt) < share
    )


def graded(salt: str = "") -> Verifier:
    """The share of letters of a half."""
    return lambda task, result: sum(bucket(x, salt) < 50 for x in result) / max(len(result), 1)


def by_colour(salt: str = "") -> Verifier:
    def verify(task: dict[str, Any], result: str) -> float:
        half = bucket(result[:1], salt) < 50
        return float(bool(result) and half == task["input"].startswith(COLOURS[0]))

    return verify


def by_word(salt: str = "") -> Verifier:
    """Which answers are right follows from nothing that can be learned of other inputs."""

    def verify(task: dict[str, Any], result: str) -> float:
        right = bucket(task["input"], salt) < 50
        return float(bool(result) and (bucket(result[:1], salt) < 50) == right)

    return verify


def task_alone(share: int) -> Verifier:
    return lambda task, result: float(bucket(task["input"]) < share)


def flipped(verify: Verifier, share: float) -> Verifier:
    dice = random.Random(share)

    def noisy(task: dict[str, Any], result: str) -> float:
        value = verify(task, result)
        assert isinstance(value, float)
        return 1.0 - value if dice.random() < share else value

    return noisy


def shaken(verify: Verifier, sd: float, slope: float = 1.0) -> Verifier:
    dice = random.Random(sd)

    def noisy(task: dict[str, Any], result: str) -> float:
        value = verify(task, result)
        assert isinstance(value, float)
        return slope * value + dice.gauss(0.0, sd)

    return noisy


def seldom(verify: Verifier, share: int, other: str) -> Verifier:
    """No outcome for this share of the answers, but another reward."""

    def verifier(task: dict[str, Any], result: str) -> dict[str, float]:
        value = verify(task, result)
        assert isinstance(value, float)
        return {other: 1.0} if bucket(result[-1:], "seldom") < share else {"outcome": value}

    return verifier


def with_proxy(true: Verifier, proxy: Verifier) -> Verifier:
    def verify(task: dict[str, Any], result: str) -> dict[str, float]:
        outcome, other = true(task, result), proxy(task, result)
        assert isinstance(outcome, float)
        assert isinstance(other, float)
        return {"outcome": outcome, "proxy": other}

    return verify


def strict_held_out(true: Verifier, loophole: Verifier) -> Verifier:
    """Held-out tasks have a verifier without the loophole."""
    return lambda task, result: (true if task.get("strict") else loophole)(task, result)


def against(verify: Verifier) -> Verifier:
    def other(task: dict[str, Any], result: str) -> float:
        value = verify(task, result)
        assert isinstance(value, float)
        return 1.0 - value

    return other


def write(path: Path, tasks: Sequence[Task]) -> str:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return str(path)
