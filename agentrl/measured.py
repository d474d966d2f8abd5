"""Settings of a pretrained model that are measured on this machine, unless the user sets them.

`agentrl init --model` writes the same into a run file. They are measured in another process, since
the launcher never loads torch, once per run: a resumed run reads them from its folder.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.core.config import AlgorithmConfig
from agentrl.core.config.validate import flatten
from agentrl.core.errors import install_command
from agentrl.core.files import replace_file
from agentrl.core.loading import is_installed

FILE = "measured.json"  # in the output folder
# The measured quantities, by setting. An adapter and its learning rate are chosen together.
SETTINGS = {
    "policy.dtype": "dtype", "policy.lora.rank": "rank", "algorithm.lr": "lr",
    "engine.threads": "threads", "engine.max_batch": "concurrency", "engine.max_context": "context",
    "sampling.max_tokens": "max_tokens", "agent.timeout": "timeout",
    "runner.concurrency": "concurrency", "algorithm.groups": "groups",
}  # fmt: skip
ADAPTER = {"policy.lora.rank", "algorithm.lr"}
CALLS, SLACK = 4, 4  # calls of a rollout; how many times as long as measured it may take
MIN_TIMEOUT = 60  # seconds
MIN_GROUPS = 4  # a step of fewer tasks learns from too few


def timeout(per_token: float, max_tokens: int) -> int:
    """Seconds for a rollout with completions of at most `max_tokens` tokens, at `per_token` seconds
    per token."""
    return max(MIN_TIMEOUT, math.ceil(SLACK * CALLS * max_tokens * per_token / 10) * 10)


async def complete(
    tables: Mapping[str, Any], output: Path, console: Console, *, plays_rollouts: bool = True
) -> dict[str, Any]:
    """The settings, by dotted names, that measurements on this machine add to these tables. Prints
    the chosen settings, or why there are none. plays_rollouts: whether the run learns from
    rollouts."""
    given = flatten(tables)
    model = given.get("policy.model")
    if not model or not _trains_it_here(tables):
        return {}
    wanted = {key: name for key, name in SETTINGS.items() if key not in given}
    if not is_installed("peft"):
        install = install_command("lora")
        console.print(f"all weights are trained; an adapter needs less memory: {install}")
        wanted = {key: name for key, name in wanted.items() if key not in ADAPTER}
    if ADAPTER - wanted.keys() or any(key.startswith("policy.lora.") for key in given):
        wanted = {key: name for key, name in wanted.items() if key not in ADAPTER}
    if not plays_rollouts:  # the groups of a step are rows of a data set
        wanted.pop("algorithm.groups", None)
    if not wanted:
        return {}
    file = output / FILE
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads(file.read_bytes())
    if found.get("of") != model or "per_token" not in found:
        console.print(f"measuring {model} on this machine (seconds; minutes if it is large) ...")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl.models.pretrained", model,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            why = (errors.decode(errors="replace").strip() or "no reason given").splitlines()[-1]
            console.print(f"not measured, so the defaults are used: {why}", highlight=False)
            return {}
        found = json.loads(out) | {"of": model}
        replace_file(file, json.dumps(found).encode())
    if isinstance(length := given.get("sampling.max_tokens"), int):
        found["timeout"] = timeout(found["per_token"], length)
    size = given.get("algorithm.group_size", AlgorithmConfig().group_size)
    if isinstance(size, int) and size > 0:  # any other value is rejected by the check that follows
        found["groups"] = max(MIN_GROUPS, found["concurrency"] // size)
    chosen = {key: found[name] for key, name in wanted.items()}
    shown = ", ".join(f"{key} = {value}" for key, value in chosen.items())
    console.print(f"measured: {shown} (settings of yours take precedence)", highlight=False)
    return chosen


def _trains_it_here(tables: Mapping[str, Any]) -> bool:
    """Whether a single model is trained by the torch learner and served by the embedded engine. The
    measurements apply to no other set-up."""
    given = flatten(tables)
    kinds = given.get("engine.kind", "embedded"), given.get("learner.kind", "torch")
    others = ("policies", "policy.build", "policy.quantize", "policy.device", "prompts")
    return kinds == ("embedded", "torch") and not any(
        key in given or key in tables for key in others
    )
