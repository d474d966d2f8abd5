"""Prompt searches as whole commands over store, runner and gateway, for `tests.benchmarks.prompts`.

stored: of how many seeds `agentrl prompts` finds the very candidates that the search finds in
process. alternate, prompts_alone, weights_alone: held-out score, mean and standard deviation of
five seeds, on `examples/orders/alternate.toml`, of which half is a role that only a prompt mends
and half a role that only training mends; the arms alone may play as many rollouts as both together.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agentrl.algorithms.prompt_search import candidates_of
from agentrl.core.types import Purpose
from agentrl.store import open_store
from examples.orders import world

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders"
SEEDS = range(1, 6)
ARMS = ("alternate", "prompts_alone", "weights_alone")


@contextmanager
def serving() -> Iterator[type[Any]]:
    """The example's models and reflector; `url` of what it yields is their address, `calls` counts
    what they were asked."""
    sys.path.insert(0, str(EXAMPLE))
    from model import Handler  # type: ignore[import-not-found]

    class Counting(Handler):  # type: ignore[misc]
        calls, url = 0, ""

        def do_POST(self) -> None:  # noqa: N802
            Counting.calls += 1
            super().do_POST()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    Counting.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Counting
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        sys.path.remove(str(EXAMPLE))


def start(folder: Path, url: str, verb: str, file: str, *settings: str) -> subprocess.Popen[str]:
    """A command on a run file of the example, in a folder with a copy of it."""
    if not (folder / "orders").exists():
        shutil.copytree(EXAMPLE, folder / "orders")
    command = [sys.executable, "-m", "agentrl", verb, str(folder / "orders" / file), *settings]
    command += [f"upstreams.{name}.base_url={url}" for name in ("scripted", "reflector")]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ, **pipes)


def finish(folder: Path, url: str, verb: str, file: str, *settings: str) -> None:
    process = start(folder, url, verb, file, *settings)
    output = process.communicate()[0]
    assert process.returncode == 0, output


def stored(seeds: Iterable[int], expected: Callable[[int], list[str]]) -> int:
    """Seeds whose candidates are those expected, in order."""
    equal = 0
    with serving() as server:
        for seed in seeds:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                tasks = [*world.make(16, f"train{seed}"), *world.make(12, f"val{seed}")]
                (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
                own = [f"seed={seed}", f"tasks.train={folder / 'tasks.jsonl'}", "eval.tasks=1"]
                own.append(f"upstreams.reflector.model=reflector-{seed}")
                finish(folder, server.url, "prompts", "run.toml", *own)
                found = asyncio.run(candidates(folder / "runs" / "orders-prompts"))
            equal += found == expected(seed)
            print(
                f"seed {seed}: {len(found)} candidates, {found == expected(seed)}", file=sys.stderr
            )
    return equal


async def candidates(run: Path) -> list[str]:
    async with open_store(f"sqlite:///{run / 'store.db'}") as store:
        return [one.id for one in await candidates_of(store, run.name)]


def in_turns(seeds: Iterable[int]) -> dict[str, float]:
    """Mean and standard deviation of each arm, and by how many of these, of the three the largest,
    alternating is better than the better arm."""
    scores: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with serving() as server:
        for seed in seeds:
            for arm, score in zip(ARMS, arms(server.url, seed), strict=True):
                scores[arm].append(score)
            print(
                f"seed {seed}: {[(arm, rows[-1]) for arm, rows in scores.items()]}", file=sys.stderr
            )
    found = {arm: fmean(rows) for arm, rows in scores.items()}
    spread = {f"{arm}_sd": stdev(rows) for arm, rows in scores.items() if len(rows) > 1}
    ahead = found["alternate"] - max(found["prompts_alone"], found["weights_alone"])
    if spread:  # of one seed there is none
        spread["alternate_ahead_sd"] = ahead / max(*spread.values(), 1e-9)
    return found | spread


def arms(url: str, seed: int) -> tuple[float, float, float]:
    """Held-out scores. Alternating plays first; the others get its number of rollouts or more."""
    own = [f"seed={seed}", f"upstreams.reflector.model=reflector-{seed}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(folder, url, "train", "alternate.toml", *own)
        both, played = asyncio.run(result(folder / "runs" / "orders-alternate", "eval/score"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        off = [*own, "prompts.schedule=off", f"steps={math.ceil(played / 64)}"]
        finish(folder, url, "train", "alternate.toml", *off)
        weights, more = asyncio.run(result(folder / "runs" / "orders-alternate", "eval/score"))
        assert more >= played
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        off = [*own, "prompts.schedule=off", f"prompts.budget={played}"]
        finish(folder, url, "prompts", "alternate.toml", *off)
        run = folder / "runs" / "orders-alternate-prompts"
        prompts, _ = asyncio.run(result(run, "prompts/heldout"))
    return both, prompts, weights


async def result(run: Path, metric: str) -> tuple[float, int]:
    """The last value of a metric, and the rollouts played, but for held-out scores."""
    async with open_store(f"sqlite:///{run / 'store.db'}") as store:
        steps = await store.steps(run.name)
        rows = await store.rollouts(run.name)
    last = [row.metrics[metric] for row in steps if metric in row.metrics][-1]
    searched = f"{run.name}/prompts/0"  # the number of a step follows
    played = [r for r in rows if r.purpose is Purpose.TRAIN or r.group.startswith(searched)]
    return last, len(played)
