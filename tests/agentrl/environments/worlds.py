"""Environments of the tests: one for each way to play, and one for each thing that can go wrong."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from itertools import count
from typing import Any

import pytest

import agentrl
from agentrl.environments import Endpoint, Environment, Episode

NAN = float("nan")
connections: list[str] = []  # what has happened to that of a late episode
ENDS = {"ends by a text": "False", "ends by nothing": None}


class Walk(Episode):
    """Walk along a line to the goal; each step costs a tenth."""

    def __init__(self, goal: int, fault: str = "") -> None:
        self.goal, self.at, self.fault, self.connected = goal, 0, fault, False

    def connect_late(self) -> Any:
        connections.clear()
        time.sleep(2)
        connections.append("connected")
        self.connected = True
        return self

    def reset(self) -> Any:
        if self.fault == "reset raises":
            raise RuntimeError("no board")
        if self.fault == "reset connects late":
            self.connect_late()
        return {"not": "a text"} if self.fault == "reset says a dict" else self.said()

    def said(self) -> str:
        return f"You are at {self.at}, the goal is {self.goal}. Actions: left, right"

    def step(self, reply: dict[str, Any]) -> Any:
        if self.fault == "step raises":
            raise KeyError("move")
        if self.fault == "step exits":
            sys.exit(3)
        if self.fault == "step skips":
            pytest.skip("no dice")
        if self.fault == "step hangs":
            time.sleep(4)
        if self.fault == "process ends":
            os._exit(7)
        if self.fault == "step closes":
            raise GeneratorExit
        if self.fault == "step gives two":
            return "a", 1.0
        if self.fault in ENDS:
            return "a", 1.0, ENDS[self.fault]
        self.at += 1 if "right" in reply["content"] else -1
        done = self.at == self.goal or abs(self.at) > 3
        reward: Any = (1.0 if self.at == self.goal else 0.0) - 0.1
        reward = {
            "no reward": None,
            "nan": NAN,
            "text": "much",
            "huge": 1e300,
            "bytes": bytearray(b"1.0"),
        }.get(self.fault, reward)
        return self.said(), reward, done and self.fault != "never ends"

    def rewards(self) -> Any:
        if self.fault == "rewards raises":
            raise ValueError("no score")
        return {"empty": {}, "nan score": {"a": NAN}, "list": [1.0]}.get(self.fault)

    def close(self) -> None:
        if self.connected:
            connections.append("closed")
            self.connected = False
        if self.fault == "late":
            agentrl.reward(1.0)
        if self.fault == "close raises":
            raise OSError("gone")


class Line(Environment):
    """`what`: number of tasks in a split."""

    limit = 8

    def __init__(self, what: str, fault: str = "", goal: int = 2) -> None:
        self.size, self.fault, self.goal = int(what), fault, goal

    def tasks(self, split: str) -> Any:
        return [
            {"id": f"{split}-{index}", "input": {"goal": self.goal}} for index in range(self.size)
        ]

    def open(self, input: Any) -> Any:
        if self.fault == "open raises":
            raise RuntimeError("no line")
        if self.fault == "open connects late":
            return Walk(input["goal"]).connect_late()
        return None if self.fault == "no episode" else Walk(input["goal"], self.fault)

    def solution(self, input: Any) -> Any:
        return ["right"] * input["goal"]


class Alone(Line):
    """Breaks if two of its rollouts are in one process."""

    isolation = "process"
    playing = 0

    def open(self, input: Any) -> Any:
        Alone.playing += 1
        assert Alone.playing == 1
        return Lonely(input["goal"], self.fault)


class Lonely(Walk):
    def step(self, reply: dict[str, Any]) -> Any:
        time.sleep(0.05)
        said, reward, done = super().step(reply)
        return f"{said} (process {os.getpid()})", reward, done

    def close(self) -> None:
        Alone.playing -= 1


class Tasks(Line):
    """Whose tasks are wrong, in the way that `fault` says."""

    def tasks(self, split: str) -> Any:
        rows: dict[str, list[Any]] = {
            "twice": [{"id": "a", "input": 1}, {"id": "a", "input": 2}],
            "both": [{"id": "a", "input": split}],
            "tuple": [{"id": split, "input": {"at": (1, 2)}}],
            "nan": [{"id": split, "input": NAN}],
            "number": [{"id": 7, "input": ""}],
            "no input": [{"id": split}],
            "no id": [{"input": split}],
            "no task": [1],
            "none": [],
        }
        if self.fault == "raises":
            raise RuntimeError("the file is gone")
        if self.fault == "exits":
            sys.exit("no such set")
        if self.fault == "never ends":
            return ({"id": f"{split}-{index}", "input": 1} for index in count())
        return rows[self.fault]


class Drawn(Line):
    """Whose tasks come from a set of texts."""

    def tasks(self, split: str) -> Any:
        words = {f"{split} {n}" for n in range(20)}
        return [{"id": word, "input": {"goal": 2}} for word in words]


class Driver(Environment):
    """Calls the model itself, and another one in the role of a user."""

    roles = ("user",)

    def __init__(self, what: str, fault: str = "") -> None:
        self.fault = fault

    def tasks(self, split: str) -> Any:
        return [{"id": f"{split}-{index}", "input": f"{split} {index}"} for index in range(2)]

    async def run(self, input: Any, endpoint: Endpoint) -> Any:
        if self.fault == "raises":
            raise RuntimeError("no world")
        if self.fault == "undeclared role":
            return await endpoint.role("judge").chat([{"role": "user", "content": "?"}])
        asked = await endpoint.role("user").chat([{"role": "user", "content": input}])
        reply = await endpoint.chat([{"role": "user", "content": asked["content"]}], max_tokens=9)
        if self.fault == "no reward":
            return None
        if self.fault == "blocks":
            time.sleep(4)  # noqa: ASYNC251
        return {"outcome": float(len(reply["content"])), "asked": 1.0}


class Blocking(Environment):
    """A plain function, which may block."""

    def __init__(self, what: str) -> None: ...

    def tasks(self, split: str) -> Any:
        return [{"id": f"{split}-0", "input": split}]

    def run(self, input: Any, endpoint: Endpoint) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        reply = endpoint.chat_sync([{"role": "user", "content": input}])
        return float("echo" in reply["content"])


class Questions(Environment):
    """A data set and its scorer."""

    def __init__(self, what: str, fault: str = "") -> None:
        self.what, self.fault = what, fault

    def tasks(self, split: str) -> Any:
        for index in range(3):
            yield {"id": f"{split}-{index}", "input": f"{split} {index}", "answer": str(index)}

    def verify(self, task: Any, result: Any) -> Any:
        if self.fault == "dies":
            os._exit(7)
        if self.fault == "raises":
            raise RuntimeError("no key")
        if self.fault == "asks":
            asked = [{"role": "user", "content": result}]
            return float(agentrl.endpoint().role("judge").chat_sync(asked)["content"] == "yes")
        return {"outcome": float(task["answer"] in result), "process": float(os.getpid())}


class Slow(Questions):
    isolation = "process"

    async def verify(self, task: Any, result: Any) -> Any:
        if task["answer"] == "1":
            await asyncio.sleep(3600)
        return super().verify(task, result)


class Duel(Environment):
    """Two roles that move in turn, each a conversation of its own."""

    roles = ("black", "white")

    def __init__(self, what: str) -> None: ...

    def tasks(self, split: str) -> Any:
        return [{"id": f"{split}-0", "input": None}]

    def open(self, input: Any) -> Any:
        return Turn()


class Turn(Episode):
    role = "black"
    keep = False

    def __init__(self) -> None:
        self.moves = 0

    def reset(self) -> Any:
        return [{"role": "system", "content": "black"}, {"role": "user", "content": "move 0"}]

    def step(self, reply: dict[str, Any]) -> Any:
        self.moves += 1
        reward = 1.0 if self.role == "black" else -2.0
        self.role = "white" if self.role == "black" else "black"
        return f"move {self.moves}", reward, self.moves == 4


class Contest(Duel):
    """Each role moves once; only that of the task is paid, by what it says."""

    def tasks(self, split: str) -> Any:
        return [{"id": f"{split}-{role}", "input": role} for role in self.roles]

    def open(self, input: Any) -> Any:
        return Paid(input)


class Paid(Episode):
    role = "black"
    keep = False

    def __init__(self, paid: str) -> None:
        self.paid = paid

    def reset(self) -> Any:
        return "Your move, black."

    def step(self, reply: dict[str, Any]) -> Any:
        said, pay = reply["content"], self.role == self.paid
        last, self.role = self.role == "white", "white"
        return "Your move, white.", float(sum(map(ord, said)) % 7) if pay else 0.0, last


class Two(Line):
    def verify(self, task: Any, result: Any) -> float:
        return 1.0


class Missing(Line):
    """Needs a package that is not installed."""

    requires = ("no-such-package==1.0",)

    def __init__(self, what: str) -> None:
        import no_such_package  # type: ignore[import-not-found]

        super().__init__(what, no_such_package.fault)
