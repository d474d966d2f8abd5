"""Plays a task with a model that does what models do wrong, again and again, in the interpreter
that has the environment's package; prints what became of each rollout.

`python -m tests.environments.faults FOLDER PLUGIN:WHAT OPTIONS`, the last as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from agentrl.core.config.derived import EnvironmentName
from agentrl.environments import hosted
from agentrl.environments.runner import stage

OTHERS = {"user": "Please do it.", "grader": "GRADE: I", "judge": "no"}
DEEP = '{"a": [' * 2_000  # deeper than Python's parser of JSON goes
TEXTS = {
    "empty": "",
    "spaces": " \n",
    "no call": "I do not know.",
    "long": "x" * 10_000,
    "lines": "\n" * 10_000,
    "digits": "9" * 10_000,
    "deep": DEEP,
    "powers": "9**9**9**9",
    "signs": "\ud7ff\x00\u2028{[<answer>\\",
}
ARGUMENTS = {
    "malformed": '{"item": "te',
    "no object": "[1]",
    "null": "null",
    "empty call": "",
    "wrong argument": '{"no_such": NaN}',
    "deep call": DEEP,
}


def faults(tools: list[Any]) -> dict[str, dict[str, Any]]:
    """Assistant's messages by what is wrong with them."""
    name = tools[0]["function"]["name"] if tools else "price"
    found: dict[str, dict[str, Any]] = {what: {"content": said} for what, said in TEXTS.items()}
    calls = {what: (name, given) for what, given in ARGUMENTS.items()}
    calls |= {"unknown tool": ("no_such_tool", "{}"), "no tool": ("", "{}")}
    for what, (function, given) in calls.items():
        call = {"name": function, "arguments": given}
        found[what] = {"tool_calls": [{"id": "c", "type": "function", "function": call}]}
    return found


async def ends(named: EnvironmentName) -> dict[str, dict[str, Any]]:
    """What became of a rollout for each fault."""
    found, task = dict[str, dict[str, Any]](), hosted.tasks(named, "train")[0]
    async with stage(named, timeout=60.0) as on:
        for what in faults([]):

            async def reply(role: str, messages: list[Any], tools: Any, what: str = what) -> Any:
                if role in OTHERS:
                    return {"role": "assistant", "content": OTHERS[role]}
                return {"role": "assistant", "content": None} | faults(tools)[what]

            began = time.monotonic()
            done = await on.play(task, reply)
            ended = {"problem": done.problem[:1500], "outcome": done.outcome}
            found[what] = ended | {"calls": len(done.calls), "s": time.monotonic() - began}
            print(what, found[what], file=sys.stderr, flush=True)
    return found


def main() -> None:
    folder, environment, options = sys.argv[1:]
    print(
        json.dumps(
            asyncio.run(ends(EnvironmentName.read(environment, json.loads(options), folder)))
        )
    )


if __name__ == "__main__":
    main()
