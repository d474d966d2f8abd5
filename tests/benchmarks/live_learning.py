"""How soon a live agent gets better: examples/live with its customers, over real processes.

Parts, for each of `--seeds`, of about seven minutes each. One that fails is a `problem`, and the
others go on; the figures of each are printed to stderr when it is done.

`live`: `agentrl live` serves and learns while users.py plays 1500 sessions, four a second.
`success <seed>`: share of sessions whose first answer was right, for each hundred of them in the
order of their ends. `sessions_to_80`: after how many the mean of the last hundred is .8 or more;
null: never. `failed_requests`: sessions that did not come to their end. `seconds`: of the sessions.
After them the first version is offered by hand, which knows nothing: `worse_sessions` are those
that it serves of 200 more until it is rolled back; null: it is not.
`attack`: the same with an ordinary customer in the place of the attacker. `attack_cost <seed>` is
how many points higher the mean of the last 500 sessions then is; `attack_cost`: the seeds' mean.
`offline`: the way without `agentrl live`, with what its users said, and `judged`, with the judge of
the live run too: see `live_offline`. `of_offline <seed>`, `of_judged <seed>`: sessions that the
live run needs, of those of this way; one that did not get there counts with all of its sessions.
`ablation`: other recipes, by name.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.live.records import all_sessions, live_state
from agentrl.store import open_store
from tests.benchmarks import live_example as example
from tests.benchmarks.live_offline import JUDGED, VOTED, Recipe, offline

Figures = dict[str, Any]
SEEDS, PARTS = (0, 1, 2), ("live", "attack", "offline", "judged", "ablation")
SESSIONS, WINDOW, ATTACK, VOTES = 1500, example.WINDOW, 0.05, 0.2
BY_HAND = {"offline": VOTED, "judged": JUDGED}
ABLATION: dict[str, list[str]] = {
    "outcome": ["algorithm.preset=reinforce+ema+tis", "algorithm.options={}"],
    "turns": ["algorithm.preset=streams+ema+tis", "algorithm.options.corrections_weight=null"],
    "signals": [],  # nobody votes
    "self-distill": ["algorithm.preset=streams+ema+tis+corrections+self-distill"],
}


def measure(seeds: Sequence[int] = SEEDS, parts: Sequence[str] = PARTS[:4]) -> Figures:
    found: Figures = {}
    for name, work in sections(seeds, parts):
        try:
            figures = asyncio.run(work)
        except Exception as error:  # noqa: BLE001  (hours of others would be lost)
            traceback.print_exc()
            figures = {f"problem {name}": repr(error)[-500:]}
        print(json.dumps(figures), file=sys.stderr, flush=True)
        found |= figures
    return found | compared(found, seeds)


def sections(
    seeds: Sequence[int], parts: Sequence[str]
) -> Iterator[tuple[str, Coroutine[Any, Any, Figures]]]:
    """What is measured, by name; each is to be run before the next is asked for."""
    for seed in seeds:
        if "live" in parts:
            yield f"live {seed}", live(seed, worse=True)
        if "attack" in parts:
            yield f"attack {seed}", live(seed, name="without attacker", attack=0.0)
        for name, recipe in BY_HAND.items():
            if name in parts:
                yield f"{name} {seed}", by_hand(seed, name, recipe)
    for name, settings in ABLATION.items() if "ablation" in parts else ():
        votes = 0.0 if name == "signals" else VOTES
        for seed in seeds:
            yield f"{name} {seed}", live(seed, *settings, name=name, votes=votes)


def compared(found: Figures, seeds: Sequence[int]) -> Figures:
    """What follows from the figures that there are."""
    costs, ratios = Figures(), Figures()
    for seed in seeds:
        usual, alone = (f"last_500 {name}{seed}" for name in ("", "without attacker "))
        if usual in found and alone in found:
            costs[f"attack_cost {seed}"] = round(100 * (found[alone] - found[usual]), 1)
        own = f"sessions_to_80 {seed}"
        for name in BY_HAND:
            if own in found and (other := f"{name}_sessions {seed}") in found:
                ratios[f"of_{name} {seed}"] = round((found[own] or SESSIONS) / found[other], 2)
    mean = {"attack_cost": round(fmean(costs.values()), 1)} if costs else {}
    return costs | mean | ratios


async def by_hand(seed: int, name: str, recipe: Recipe) -> Figures:
    right = await offline(seed, ATTACK, recipe)
    reached = example.sessions_to(right)
    return {
        f"{name}_success {seed}": by_hundreds(right),
        f"{name}_sessions_to_80 {seed}": reached,
        f"{name}_sessions {seed}": reached or len(right),
    }


async def live(
    seed: int, *settings: str, name: str = "", worse: bool = False, sessions: int = SESSIONS,
    attack: float = ATTACK, votes: float = VOTES,
) -> Figures:  # fmt: skip
    """The figures of a live run and its customers. attack, votes: options of users.py."""
    with example.copied() as folder:
        async with example.live(folder, f"seed={seed}", *settings) as url:
            began = time.monotonic()
            played = await example.customers(
                folder, url, sessions=sessions, seed=seed, attack=attack, votes=votes
            )
            seconds = time.monotonic() - began
            back = {"worse_sessions": await offered(folder, url, seed)} if worse else {}
        events, steps = await decisions(folder)
    right = [one["right"] for one in played]
    found = back | {
        "success": by_hundreds(right),
        "last_500": round(fmean(right[-500:]), 3),
        "sessions_to_80": example.sessions_to(right),
        "failed_requests": sessions - len(played),
        "seconds": round(seconds),
        "promoted": sum(event == "promoted" for event in events),
        "steps": steps,
    }
    return called(found, name, seed)


def called(found: Figures, name: str, seed: int) -> Figures:
    """Figures with their whole names."""
    end = f"{name} {seed}" if name else f"{seed}"
    return {f"{key} {end}": value for key, value in found.items()}


def by_hundreds(right: Sequence[bool]) -> list[float]:
    hundreds = [right[n : n + WINDOW] for n in range(0, len(right), WINDOW)]
    return [round(fmean(some), 2) for some in hundreds]


async def offered(folder: Path, url: str, seed: int) -> int | None:
    """Offer the first version again; the sessions that it served until it was rolled back."""
    first = folder / "runs/live/versions/policy-0"
    await example.command(folder, "live", "offer", "run.toml", str(first))
    await example.customers(folder, url, sessions=200, seed=seed + 1000, attack=0.0)
    async with open_store(f"sqlite:///{folder}/runs/live/store.db") as store:
        known = await live_state(store, "live")
        version = max(row.version for row in known.versions.values() if row.kind != "trained")
        back = any(event.version == version and event.worse for event in known.events)
        rows = [row async for row in all_sessions(store, "live")]
    return sum(row.task.get("version") == version for row in rows) if back else None


async def decisions(folder: Path) -> tuple[list[str], int]:
    """The kinds of what was decided about versions, in order, and the number of training steps."""
    async with open_store(f"sqlite:///{folder}/runs/live/store.db") as store:
        events = (await live_state(store, "live")).events
        return [event.kind for event in events], len(await store.steps("live"))
