"""Plays one task of an environment in the interpreter that has its package, through a real gateway,
with scripted replies by role; prints what was stored.

`python -m tests.environments.played FOLDER PLUGIN:WHAT OPTIONS REPLIES`, the last two as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agentrl.core.config.derived import EnvironmentName
from agentrl.core.errors import ConfigError
from agentrl.environments import hosted
from agentrl.environments.runner import stage


async def played(named: EnvironmentName, replies: dict[str, list[Any]]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []

    async def reply(role: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        calls.append({"role": role, "last": messages[-1].get("content"), "tools": len(tools or [])})
        said = replies[role].pop(0) if len(replies[role]) > 1 else replies[role][0]
        message = {"content": said} if isinstance(said, str) else said
        return {"role": "assistant", "content": None} | message

    async with stage(named) as on:
        done = await on.play(hosted.tasks(named, "train")[0], reply)
    found = {"outcome": done.outcome, "rewards": done.rewards, "steps": done.steps}
    found |= {"by_role": done.by_role}
    return found | {"problem": done.problem, "calls": calls}


def main() -> None:
    folder, environment, options, replies = sys.argv[1:]
    named = EnvironmentName.read(environment, json.loads(options), folder)
    try:
        about = hosted.describe(named)
        found = asyncio.run(played(named, json.loads(replies))) | {"asks": about.roles}
    except ConfigError as error:
        found = {"problem": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
