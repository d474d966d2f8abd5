"""On how many stops a setting comes to its use, and a task to its outcome, by tracing a training.

One step of a tiny model, in this process. A function of the library is on the way if it is called
with the thing that is followed, or with what carries it, and counts when it is called first.
Functions of one room (a folder) that follow each other are one stay; a return is a stay in a room
that was left before. Stops are the same for modules.

python -m tests.benchmarks.stays_trace [--json]: figures, or the stops in their order
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import httpx

from agentrl.algorithms.train import main as training
from agentrl.core.config import RunConfig, resolve
from agentrl.core.types import Attempt
from agentrl.runners.main import RunnerThread
from tests.benchmarks.report import arguments
from tests.benchmarks.size import ROOT, in_library

SETTINGS: dict[str, Any] = {
    "name": "stays", "steps": 1, "agent": {"path": "agent.py:agent"},
    "tasks": {"train": "tasks.jsonl"}, "learner": {"threads": 1}, "sampling": {"max_tokens": 2},
    "algorithm": {"preset": "grpo", "groups": 1, "group_size": 2},
}  # fmt: skip


@dataclass
class Journey:
    """The modules of the library that are called with what `carries` recognises, in order."""

    carries: Callable[[object], bool]
    stops: list[str] = field(default_factory=list)
    seen: set[CodeType] = field(default_factory=set)

    def note(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in self.seen or code.co_name.startswith("<") or not in_library(code):
            return
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(self.carries(frame.f_locals.get(name)) for name in given):
            self.seen.add(code)
            stop = str(Path(code.co_filename).resolve().relative_to(ROOT))
            if not self.stops or self.stops[-1] != stop:
                self.stops.append(stop)

    def figures(self) -> Mapping[str, int]:
        rooms = [stop.rpartition("/")[0] for stop in self.stops]
        stays = [room for room, _ in groupby(rooms)]
        returns = len(stays) - len(set(stays))
        found = {"stays": len(stays), "rooms": len(set(stays)), "returns": returns}
        return found | {"stops": len(self.stops), "modules": len(set(self.stops))}


@contextmanager
def following(here: Journey, elsewhere: Journey) -> Iterator[None]:
    """Trace this thread for one journey, and those that begin from now on for another."""

    def note_here(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            here.note(frame)

    def note_elsewhere(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            elsewhere.note(frame)

    threading.setprofile(note_elsewhere)
    sys.setprofile(note_here)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


async def agent(task: str) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": task}]}
    async with httpx.AsyncClient(verify=False) as client:
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        answer = await client.post(url, json=body, timeout=60)
    return str(answer.json()["choices"][0]["message"]["content"])


def verifier() -> Callable[[dict[str, Any], str], float]:
    """Rewards that differ, so that the step has a gradient."""
    rewards = cycle([0.0, 1.0])
    return lambda task, result: next(rewards)


def journeys() -> tuple[Journey, Journey]:
    """Of the run's settings, from `main.run` on, and of the first task, from its claim on."""
    from tests.tiny_models import qwen2

    setting = Journey(lambda value: isinstance(value, RunConfig))
    first: list[str] = []

    def carries(value: object) -> bool:
        inner = value if isinstance(value, Attempt) else getattr(value, "attempt", None)
        if not isinstance(inner, Attempt):
            return False
        first.append(inner.id) if not first else None
        return inner.id == first[0]

    task = Journey(carries)
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "tasks.jsonl").write_text('{"input": "one"}\n')
        model = qwen2(folder / "model", seed=0)
        given = SETTINGS | {
            "root": place, "output": str(folder / "out"),
            "policy": {"model": str(model), "device": "cpu"},
        }  # fmt: skip
        config = resolve(given, source="stays")
        with following(setting, task):
            runner = RunnerThread(config.store, "stays", agent=agent, verifier=verifier())
            runner.start()
            try:
                asyncio.run(training.run(config))
            finally:
                runner.stop()
    return setting, task


def measure() -> dict[str, int]:
    setting, task = journeys()
    return {
        f"{name}_{key}": value
        for name, journey in (("setting", setting), ("task", task))
        for key, value in journey.figures().items()
    }


def main() -> None:
    parser = arguments(__doc__)
    if parser.parse_args().json:
        print(json.dumps(measure()))
        return
    for journey in journeys():
        print(*journey.stops, sep="\n")
        print(json.dumps(journey.figures()), end="\n\n")


if __name__ == "__main__":
    main()
