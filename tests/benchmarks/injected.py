"""Faults in the places where a rollout is prepared, played and judged: does any become a reward?

`python -m tests.benchmarks.injected --json` plays a rollout for each fault in each place of

- the plug-ins whose interpreters are in `.environments` (`make test-environments` makes them): the
  faults are inside of the packages that they play (`tests/environments/injected`)
- an environment of turns, one that plays itself and one that verifies, written by a user
- verifiers, sync and async, and one beside them
- judges' answers

Executors, containers and workspaces have the same faults in their own tests.

Each rollout must have failed, with a cause that names the fault, or, of a judge, the reward must be
missing. `became_a_reward` counts those with a number, `unnamed` failures without a cause."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.algorithms.judges import questions
from agentrl.algorithms.judges.table import PointwiseJudge, PrincipleJudge
from agentrl.environments import hosted
from agentrl.environments.reference import Named
from agentrl.environments.scripted import stage
from tests.environments.injected.__main__ import PLAYED

ROOT = Path(__file__).parents[2]
Ends = dict[str, dict[str, Any]]
FAULTS = ("exception", "time-out", "hang", "lost sandbox", "exit", "no reward", "nan", "text",
          "digits", "out of range", "list", "nothing")  # fmt: skip
TIMEOUT = 3.0  # seconds of a rollout
# A user's file: `fault(place)` does what the variable says there.
FILE = """
import asyncio, math, os, sys, time
from agentrl.environments import Environment, Episode

VALUES = {"no reward": None, "nan": math.nan, "text": "good", "digits": "1.0", "out of range": 7.0,
          "list": [1.0], "nothing": {}}

def fault(place, value=1.0):
    here, _, kind = os.environ.get("INJECTED_FAULT", "").partition(":")
    if here != place: return value
    if kind == "exception": raise RuntimeError("broken")
    if kind == "time-out": raise TimeoutError("no answer")
    if kind == "hang": time.sleep(6)
    if kind == "lost sandbox": raise ConnectionResetError("sandbox sb-1 is gone")
    if kind == "exit": sys.exit(3)
    return VALUES.get(kind, value)

class Game(Episode):
    def reset(self):
        said = fault("reset", "begin")
        return said if isinstance(said, str) and said == "begin" else None
    def step(self, reply): return "", fault("step"), True
    def rewards(self):
        # None is the sum of the steps' rewards, as a plug-in may mean
        return fault("rewards", None)
    def close(self): fault("close")

class Turns(Environment):
    def tasks(self, split): return [{"id": split, "input": 1}]
    def open(self, input):
        fault("open")
        return Game()

class Itself(Environment):
    def tasks(self, split): return [{"id": split, "input": 1}]
    async def run(self, input, endpoint):
        if os.environ.get("INJECTED_FAULT", "") in ("before:hang", "run:hang"):
            await asyncio.sleep(6)
        fault("before")
        await endpoint.chat([{"role": "user", "content": "x"}])
        return fault("run")

class Judging(Environment):
    def tasks(self, split): return [{"id": split, "input": "x"}]
    def verify(self, task, result): return fault("verify")

def verify(task, result): return fault("verifier")
async def verify_async(result):
    if os.environ.get("INJECTED_FAULT", "") == "verifier async:hang": await asyncio.sleep(6)
    return fault("verifier async")
def beside(result): return fault("beside")
"""


def cases() -> Iterator[tuple[str, str, tuple[str, ...], dict[str, Any]]]:
    """Name, class of the environment, places, and tables of the run file."""
    yield "turns", "Turns", ("open", "reset", "step", "close"), {}
    yield "itself", "Itself", ("before", "run"), {}
    yield "judging", "Judging", ("verify",), {}
    ways = (("verifier", "verify", {}), ("verifier async", "verify_async", {}))
    for place, name, rewards in (*ways, ("beside", "verify", {"beside": "file.py:beside"})):
        verifier = {"path": f"file.py:{name}", "rewards": rewards, "range": [-1.0, 1.0]}
        yield f"verifiers/{place}", "Judging", (place,), {"verifier": verifier}


# What is no fault in a place: values where none is read, and "None", the sum of the rewards.
MEANT = {(place, kind) for place in ("open", "close", "before") for kind in FAULTS[5:]}
MEANT.add(("beside", "out of range"))  # only the outcome has a range
# The end of a process by a verifier is in the tests of the executors, in processes of their own.
MEANT |= {(place, "exit") for place in ("verifier", "verifier async", "beside")}


async def own(folder: Path) -> Ends:
    """What became of the rollouts of a user's environments and verifiers."""
    (folder / "file.py").write_text(textwrap.dedent(FILE))
    found: Ends = {}
    for name, class_, places, tables in cases():
        named = Named.read(f"file.py:{class_}:x", {}, folder)
        known = {"verifier": {"path": named.part("verifier"), "range": [-1.0, 1.0]}} | tables
        task = hosted.tasks(named, "train")[0]
        async with stage(named, timeout=TIMEOUT, **known) as on:
            for fault in [("", ""), *((place, kind) for place in places for kind in FAULTS)]:
                if fault in MEANT:
                    continue
                os.environ["INJECTED_FAULT"] = ":".join(fault)
                done = await on.play(task, _said)
                found[f"{name}/{' '.join(fault)}"] = {
                    "outcome": done.outcome, "problem": done.problem
                }  # fmt: skip
    return found


async def _said(role: str, messages: list[Any], tools: list[Any]) -> Any:
    return {"role": "assistant", "content": "x"}


def judged() -> Ends:
    """What became of judges' answers: a verdict is one only in the form that was asked for."""
    point, principles = PointwiseJudge(upstream="j"), PrincipleJudge(upstream="j", principles=["a"])
    asked = {
        "score": (
            questions.pointwise(point, []),
            ("11", "-1", "NaN", '"9"', "true", "null", "5.5"),
        ),
        "verdicts": (questions.principles(principles, []), ('{"1": 1}', '{"1": "maybe"}', "[]")),
    }
    found: Ends = {}
    for key, (question, values) in asked.items():
        texts = [f'{{"reason": "r", "{key}": {value}}}' for value in values]
        for text in (*texts, "", "timeout", "[1]", f'{{"{key}":'):
            outcome, problem = None, ""
            try:
                outcome = next(iter(question.read(text).values()))
            except ValueError as error:
                problem = str(error)
            found[f"judges/{key} {text}"] = {"outcome": outcome, "problem": problem}
    return found


def plugin(name: str) -> Ends | None:
    """What became of the rollouts of a plug-in, or None without its interpreter."""
    python = ROOT / f".environments/{name}/bin/python"
    if not (python.parents[1] / ".installed").is_file():
        return None
    command = [str(python), "-m", "tests.environments.injected", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    with suppress(ValueError):
        found: Ends = json.loads(done.stdout.strip().rpartition("\n")[2])
        return {f"{name}/{key}": ended for key, ended in found.items()}
    raise RuntimeError(f"{name}: {done.stderr[-2000:]}")


def measure(names: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ends = asyncio.run(own(Path(folder))) | judged()
    absent = []
    for name in names:
        if (found := plugin(name)) is None:
            absent.append(name)
        else:
            ends |= found
    clean = {key: ended for key, ended in ends.items() if key.rstrip().endswith("/")}
    faults = {key: ended for key, ended in ends.items() if key not in clean}
    numbers = [key for key, ended in faults.items() if ended["outcome"] is not None]
    unnamed = [key for key, ended in faults.items() if not ended["problem"]]
    broken = [key for key, ended in clean.items() if ended["outcome"] is None]
    return {
        "faults": len(faults), "became_a_reward": len(numbers), "unnamed": len(unnamed),
        "clean_failed": len(broken), "which": [*numbers, *unnamed, *broken],
        "by_place": dict(Counter(key.partition("/")[0] for key in faults)), "absent": absent,
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", nargs="*", default=[*PLAYED], help="plug-ins")
    given = options.parse_args()
    found = measure(given.only)
    print(json.dumps(found) if given.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    sys.exit(bool(found["became_a_reward"] or found["unnamed"]))


if __name__ == "__main__":
    main()
