"""How soon a live agent gets better: examples/live with its customers, over real processes.

For three seeds, `agentrl live` serves and learns while users.py plays 1500 sessions, 16 at a time.
`success <seed>`: share of sessions whose first answer was right, for each hundred of them in the
order of their ends. `sessions_to_80`: after how many the mean of the last hundred is .8 or more;
null: never. `failed_requests`: requests of customers without an answer. `seconds`: of the whole.
`--only learning` runs this with the run file as it is; LEARNING=attack, ablation, offline, worse
beside it (comma-separated):

attack: the same without the attacker, `attack_cost` is the difference in points of the last 500.
ablation: outcome alone, signals of turns, and self-distillation beside: `last_500 <name>`.
offline: a third of the sessions is collected with the first version, thumbs and next messages are
mined to labels for KTO, and the result is deployed; then the next third; `offline_sessions_to_80`.
worse: a candidate that was made worse is offered by hand when the agent is good: `worse_sessions`,
those that it has served when it is taken back.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.agentrl.live.shop import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "live"
SEEDS, SESSIONS, WINDOW, GOAL = (0, 1, 2), 1500, 100, 0.8
ABLATION = {
    "outcome": ["algorithm.preset=reinforce+ema+tis", "algorithm.options={}"],
    "signals": ["algorithm.preset=streams+ema+tis", "algorithm.options.corrections_weight=null"],
    "self-distill": ["algorithm.preset=streams+ema+tis+corrections+self-distill"],
}


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    asked = os.environ.get("LEARNING", "").split(",")
    for seed in SEEDS:
        found |= _named(seed, asyncio.run(live(seed)))
    every = [found[f"sessions_to_80 {seed}"] for seed in SEEDS]
    found["sessions_to_80"] = None if None in every else max(every)
    if "attack" in asked:
        alone = [asyncio.run(live(seed, attack=0.0)) for seed in SEEDS]
        found["attack_cost"] = round(100 * fmean(
            last(one["right"]) - found[f"last_500 {seed}"]
            for seed, one in zip(SEEDS, alone, strict=True)
        ), 1)  # fmt: skip
    for name, settings in ABLATION.items() if "ablation" in asked else ():
        runs = [asyncio.run(live(seed, settings)) for seed in SEEDS]
        found[f"last_500 {name}"] = [round(last(one["right"]), 3) for one in runs]
    return found


def _named(seed: int, one: dict[str, Any]) -> dict[str, Any]:
    right = one["right"]
    hundreds = [right[n : n + WINDOW] for n in range(0, len(right), WINDOW)]
    return {
        f"success {seed}": [round(fmean(some), 2) for some in hundreds],
        f"last_500 {seed}": round(last(right), 3),
        f"sessions_to_80 {seed}": sessions_to(right),
        f"failed_requests {seed}": one["failed"],
        f"seconds {seed}": round(one["seconds"]),
        f"promoted {seed}": one["promoted"],
    }  # fmt: skip


def last(right: list[bool]) -> float:
    return fmean(right[-500:])


def sessions_to(right: list[bool]) -> int | None:
    """After how many sessions the mean of the last WINDOW is at least GOAL."""
    means = ((n, fmean(right[n - WINDOW : n])) for n in range(WINDOW, len(right) + 1))
    return next((n for n, mean in means if mean >= GOAL), None)


async def live(
    seed: int, settings: list[str] | None = None, *, sessions: int = SESSIONS, attack: float = 0.05
) -> dict[str, Any]:
    """A live run and its customers."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "live"
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        async with serving(folder, [f"seed={seed}", *(settings or [])]) as url:
            began = time.monotonic()
            played = await customers(folder, url, sessions, seed, attack)
            seconds = time.monotonic() - began
        events = await decisions(folder)
    return {
        "right": [one["right"] for one in played],
        "failed": sessions - len(played),
        "seconds": seconds,
        "promoted": sum(event == "promoted" for event in events),
    }


@asynccontextmanager
async def serving(folder: Path, settings: list[str]) -> AsyncIterator[str]:
    """`agentrl live run.toml` in the folder, until the end; gives its address once it answers."""
    port = free_port()
    with (folder / "front.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl", "live", "run.toml", "name=live",
            f"runner.port={port}", *settings, cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()


async def customers(
    folder: Path,
    url: str,
    sessions: int,
    seed: int,
    attack: float,
    look: Callable[[dict[str, Any]], None] = lambda one: None,
) -> list[dict[str, Any]]:
    """What users.py prints. Requests wait until the policy is built. Raises RuntimeError with what
    it said if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "users.py", "--sessions", str(sessions), "--seed", str(seed),
        "--attack", str(attack), cwd=folder, env={**os.environ, "OPENAI_BASE_URL": url},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    played, errors = [], asyncio.create_task(process.stderr.read())
    async for line in process.stdout:
        played.append(json.loads(line))
        look(played[-1])
    if await process.wait():
        front = (folder / "front.log").read_text()
        raise RuntimeError(f"{(await errors).decode()}\n{front}")
    return played


async def decisions(folder: Path) -> list[str]:
    """The kinds of what was decided about versions, in order."""
    from agentrl.live.records.documents import told
    from agentrl.store import open_store

    async with open_store(f"sqlite:///{folder}/runs/live/store.db") as store:
        return [event.kind for event in (await told(store, "live")).events]
