import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.core.config.derived import EnvironmentName
from agentrl.environments import hosted
from agentrl.environments.runner import stage
from tests.environments.openenv.served import served


async def figures(url: str) -> dict[str, Any]:
    """An echo is worth 0.1 a sign, at most 1: ten signs in each of two turns score 2 of 2."""
    named = EnvironmentName.read(f"openenv:{url}", {"limit": 2}, ".")
    tasks = {split: hosted.tasks(named, split) for split in ("train", "heldout")}

    async def reply(role: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": "ten signs!"}

    async with stage(named) as on:
        began = time.monotonic()
        outcomes = [(await on.play(task, reply)).outcome for task in tasks["train"][:5]]
        spent = time.monotonic() - began
    truth = sum(outcome or 0.0 for outcome in outcomes) / 2 / len(outcomes)
    known = {"tasks": sum(map(len, tasks.values())), "ground_truth": truth}
    return known | {"rollouts_per_s": len(outcomes) / spent}


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(sys.executable), Path(folder)) as (url, _),
    ):
        print(json.dumps(asyncio.run(figures(url))))
