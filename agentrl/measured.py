"""Settings of a pretrained model that are measured on this machine, unless the user sets them.

`agentrl init --model` writes the same into a run file. They are measured once per run, in another
process, since the launcher never loads torch: a resumed run reads them from its folder.
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
MIN_GROUPS = 4  # tasks of a step; fewer are too few to learn from


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
    set_by_user = flatten(tables)
    model = set_by_user.get("policy.model")
    if not model or not _trains_it_here(tables):
        return {}
    missing = {key: name for key, name in SETTINGS.items() if key not in set_by_user}
    if not is_installed("peft"):
        install = install_command("lora")
        console.print(f"all weights are trained; an adapter needs less memory: {install}")
        missing = {key: name for key, name in missing.items() if key not in ADAPTER}
    if ADAPTER - missing.keys() or any(key.startswith("policy.lora.") for key in set_by_user):
        missing = {key: name for key, name in missing.items() if key not in ADAPTER}
    if not plays_rollouts:  # the groups of a step are rows of a data set
        missing.pop("algorithm.groups", None)
    if not missing:
        return {}
    file = output / FILE
    measurements: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        measurements = json.loads(file.read_bytes())
    if measurements.get("of") != model or "per_token" not in measurements:
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
            reason = (errors.decode(errors="replace").strip() or "no reason given").splitlines()[-1]
            console.print(f"not measured, so the defaults are used: {reason}", highlight=False)
            return {}
        measurements = json.loads(out) | {"of": model}
        replace_file(file, json.dumps(measurements).encode())
    if isinstance(length := set_by_user.get("sampling.max_tokens"), int):
        measurements["timeout"] = timeout(measurements["per_token"], length)
    size = set_by_user.get("algorithm.group_size", AlgorithmConfig().group_size)
    if isinstance(size, int) and size > 0:  # any other value is rejected by the check that follows
        measurements["groups"] = max(MIN_GROUPS, measurements["concurrency"] // size)
    chosen = {key: measurements[name] for key, name in missing.items()}
    shown = ", ".join(f"{key} = {value}" for key, value in chosen.items())
    console.print(f"measured: {shown} (your own settings take precedence)", highlight=False)
    return chosen


def _trains_it_here(tables: Mapping[str, Any]) -> bool:
    """Whether a single model is trained by the torch learner and served by the embedded engine. The
    measurements apply to no other set-up."""
    set_by_user = flatten(tables)
    kinds = set_by_user.get("engine.kind", "embedded"), set_by_user.get("learner.kind", "torch")
    others = ("policies", "policy.build", "policy.quantize", "policy.device", "prompts")
    return kinds == ("embedded", "torch") and not any(
        key in set_by_user or key in tables for key in others
    )
