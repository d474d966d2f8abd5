"""Plays a plug-in with a fault in each place, in the interpreter that has its package; prints what
became of each rollout, as one line of JSON.

`python -m tests.environments.injected NAME`"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.core.config.derived import EnvironmentName
from agentrl.environments import hosted
from agentrl.environments.runner import stage
from tests.environments.injected import plugins
from tests.environments.openenv.served import served
from tests.environments.textworld.figures import make_games

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT = 4.0  # seconds of a rollout
LOADING = 120.0  # of the first one, in which packages are imported
SLOW = {
    "verifiers-v1": 30.0,
    "inspect": 30.0,
    "tau2": 15.0,
    "openenv": 15.0,
}  # which start programs, or load for long
EPISODE = ("open", "set-up", "step", "clean-up")
# What these packages make a number of, before any plug-in sees it.
CONVERTED = {
    "verifiers": ("digits", "bytes"),
    "verifiers-v1": ("digits", "bytes", "mapping"),  # which are rewards by name
    "inspect": ("digits", "truth in text", "bytes", "mapping"),  # which has one score
}  # fmt: skip
# Name -> class, what, options, places, and the model's replies, the last again and again.
PLAYED: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...], list[str]]] = {
    "gymnasium": ("Gymnasium", "FrozenLake-v1", {"limit": 4}, EPISODE, ["down"]),
    "minigrid": ("MiniGrid", "MiniGrid-Empty-5x5-v0", {"limit": 4}, EPISODE, ["forward"]),
    "textarena": (
        "TextArena", "FrozenLake-v0", {"limit": 4}, ("open", "set-up", "step", "tool", "scoring"),
        ["[nowhere]"],
    ),
    "pettingzoo": (
        "PettingZoo", "classic.tictactoe_v3", {"opponents": "random"},
        ("open", "set-up", "step", "tool"), ["0", "1", "2", "3", "4", "5", "6", "7", "8"],
    ),
    "reasoning-gym": ("ReasoningGym", "chain_sum", {"size": 5, "heldout": 5}, ("scoring",), ["4"]),
    "verifiers": ("Verifiers", "words_env", {}, ("set-up", "scoring"), ["ant"]),
    "verifiers-v1": (
        "VerifiersV1", "faulty_taskset", {}, ("set-up", "scoring", "clean-up"), ["x"]
    ),
    "inspect": (
        "Inspect", "faulty_tasks.py@faulty", {}, ("set-up", "scoring", "clean-up"), ["x"]
    ),
    "textworld": ("TextWorld", "games", {"limit": 4}, EPISODE, ["look"]),
    "tau2": ("Tau2", "mock", {"max_steps": 6}, ("set-up", "scoring"), ["I am done. ###STOP###"]),
    "bfcl": ("BFCL", "multi_turn_base", {}, ("open", "scoring"), ["Done."]),
    "openenv": ("OpenEnv", "", {"limit": 1}, EPISODE, ["ten signs!"]),
    "openai-evals": ("Evals", "crontab.dev.v0", {}, ("step", "scoring"), ["* * * * *"]),
}  # fmt: skip


async def ends(name: str) -> dict[str, dict[str, Any]]:
    """What became of a rollout, by place and fault."""
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder, what = HERE, PLAYED[name][1]
        if name == "verifiers":
            folder = ROOT / "tests/environments/verifiers"
        if name == "textworld":
            make_games(folder := Path(made))
        if name == "openenv":
            what, _ = stack.enter_context(served(Path(sys.executable), Path(made)))
        return await played(name, what, folder)


async def played(name: str, what: str, folder: Path) -> dict[str, dict[str, Any]]:
    class_, _, options, places, replies = PLAYED[name]
    named = EnvironmentName.read(f"{HERE}/plugins.py:{class_}:{what}", options, folder)
    task, found = hosted.tasks(named, "train")[0], {}
    faults = [(place, kind) for place in places for kind in (*plugins.RAISED, "hang")]
    faults += [("set-up", "broken reset")] * ("open" in places and "set-up" in places)
    own = CONVERTED.get(name, ())
    faults += [("reward", kind) for kind in plugins.REWARDS if kind not in own]
    faults.sort(key=lambda fault: fault[1] == "hang")  # last: they hold what the others need
    timeout = SLOW.get(name, TIMEOUT)
    os.environ["INJECTED_HANG"] = str(timeout + 2)
    if name in (
        "verifiers-v1",
        "inspect",
    ):  # they play in processes of a pool, whose end is a fault of its own
        faults = [(place, kind) for place, kind in faults if kind != "exit"]
    tables = {"verifier": {"path": named.part("verifier"), "range": [-1.0, 1.0]}}
    os.environ["INJECTED_FAULT"] = ""
    async with stage(named, timeout=LOADING, **tables) as on:
        await on.play(task, replied(replies))
    async with stage(named, timeout=timeout, **tables) as on:
        first = [("", "")] * (2 if name in SLOW else 1)
        for fault in [*first, *faults]:
            os.environ["INJECTED_FAULT"] = ":".join(fault)
            done = await on.play(task, replied(replies))
            found[" ".join(fault)] = {"outcome": done.outcome, "problem": done.problem[:400]}
            print(fault, found[" ".join(fault)], file=sys.stderr, flush=True)
    return found


def replied(replies: list[str]) -> Any:
    said = iter([*replies, *[replies[-1]] * 50])

    async def reply(role: str, messages: list[Any], tools: Any) -> Any:
        return {"role": "assistant", "content": next(said)}

    return reply


def main() -> None:
    print(json.dumps(asyncio.run(ends(sys.argv[1]))))


if __name__ == "__main__":
    main()
