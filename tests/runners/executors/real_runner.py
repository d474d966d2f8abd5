"""A runner that takes, uses and discards containers until it is killed: `python -m
tests.runners.executors.real_runner IMAGE`. It prints the owner of its containers."""

from __future__ import annotations

import asyncio
import sys

from agentrl.runners.executors.containers import Containers, ContainerSpec
from tests.runners.executors.real import ENGINE


async def main(image: str) -> None:
    containers = Containers(ENGINE, gateway="http://127.0.0.1:9/v1", warm=2)
    await containers.start()
    print(containers.cli.owner, flush=True)

    async def rollouts() -> None:
        while True:
            container = await containers.take(ContainerSpec(image))
            await container.run(["sh", "-c", "(sleep 100 &) ; sleep 0.2"])
            await container.discard()

    await asyncio.gather(rollouts(), rollouts())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
