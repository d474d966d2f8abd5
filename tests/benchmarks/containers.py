"""Containers by podman: how long a rollout waits for one, and what a killed runner leaves.

python -m tests.benchmarks.containers --json [--rollouts 40] [--kills 50] [--both 10]

`start_ms`: median time of a rollout that takes a warm container until a first program has run in
it; `cold_ms`: without warm ones. `rollouts_per_s`: of four at a time, each with a container of its
own. `leftover`: containers that exist a minute after their runner was killed, of all kills, half
of them in its first 300 ms; `gone_s`: the longest until its keeper had ended and there was none.
`both_leftover` and `both_gone_s`: the same where its keeper was killed with it, and another runner
has started then (whose second search, 5 s later, finds what was being started). Starts wait for
cores: figures of a busy machine say nothing (two cores at a load of 17: start_ms 659).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from statistics import median

from agentrl.runners.executors.containers import Containers, ContainerSpec
from agentrl.runners.executors.keeper import started
from tests.runners.executors.real import (
    ENGINE,
    busybox_image,
    environment,
    left_of,
    missing,
    until_none_is_left,
)

AT_ONCE = 4
A_MINUTE = 60.0
SECOND_SEARCH = 7.0  # seconds from a runner's start until its second search has ended
PAUSE = 0.5  # seconds between rollouts, in which the next container starts


async def _rollout(containers: Containers, spec: ContainerSpec) -> float:
    """Return the milliseconds until a program has run in a new container."""
    started = time.monotonic()
    container = await containers.take(spec)
    done = await container.run(["true"])
    seconds = time.monotonic() - started
    assert done.status == 0, done
    await container.discard()
    return seconds * 1000


async def starts(image: str, rollouts: int) -> dict[str, float]:
    containers, spec = Containers(ENGINE, warm=AT_ONCE), ContainerSpec(image)
    await containers.start()
    try:
        cold, warm = [], []
        for _ in range(rollouts // 4):
            containers.expect(spec, 0)
            cold.append(await _rollout(containers, spec))
        containers.expect(spec, 2)
        for _ in range(rollouts):
            await asyncio.sleep(PAUSE)
            await containers.ready(spec)
            warm.append(await _rollout(containers, spec))
        began = time.monotonic()
        containers.expect(spec, AT_ONCE)
        limit = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with limit:
                await _rollout(containers, spec)

        await asyncio.gather(*(one() for _ in range(rollouts)))
        rate = rollouts / (time.monotonic() - began)
    finally:
        await containers.close()
    return {"start_ms": median(warm), "cold_ms": median(cold), "rollouts_per_s": rate}


async def leftover(image: str, kills: int, *, both: bool = False) -> tuple[int, float]:
    """Kill a runner at any moment, again and again, `both`: its keeper at the same time; return how
    many containers stay, and the longest time until none did."""
    left, longest = 0, 0.0
    for number in range(kills):
        runner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.runners.executors.real_runner", image),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert runner.stdout is not None
        owner = (await runner.stdout.readline()).decode().strip()
        await asyncio.sleep(random.uniform(0.0, 0.3 if number % 2 else 2.0))
        if both:
            os.kill(int(owner.split("/")[2]), signal.SIGKILL)
        how = os.kill if number % 4 < 2 else os.killpg  # the process, or its group
        how(runner.pid, signal.SIGKILL)
        await runner.wait()
        following, began = Containers(ENGINE), time.monotonic()
        if both:
            await following.start()
        # A container that is being started is on no list yet: only the keeper knows of it.
        keeper, due = int(owner.split("/")[2]), began + (SECOND_SEARCH if both else A_MINUTE)
        while time.monotonic() < due and (both or started(keeper)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        with suppress(TimeoutError):
            await until_none_is_left(owner, max(A_MINUTE - (time.monotonic() - began), 0.1))
        longest = max(longest, time.monotonic() - began)
        left += len(left_of(owner))
        if both:
            await following.close()
    return left, round(longest, 1)


def figures(rollouts: int = 40, kills: int = 50, both: int = 10) -> dict[str, object]:
    """All of them, or why there are none."""
    if why := missing():
        return {"skipped": why}
    os.environ |= environment()
    image = busybox_image()
    found: dict[str, object] = {
        name: round(value, 2) for name, value in asyncio.run(starts(image, rollouts)).items()
    }
    found["kills"] = kills
    found["leftover"], found["gone_s"] = asyncio.run(leftover(image, kills))
    found["both_leftover"], found["both_gone_s"] = asyncio.run(leftover(image, both, both=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--both", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = figures(given.rollouts, given.kills, given.both)
    if given.json:
        print(json.dumps(found))
    else:
        print(*(f"{name:>15} {value}" for name, value in found.items()), sep="\n")


if __name__ == "__main__":
    main()
