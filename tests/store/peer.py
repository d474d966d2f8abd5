"""Another process on the same store file: `python peer.py URL COMMAND ARGUMENT`."""

from __future__ import annotations

import asyncio
import itertools
import sys
from hashlib import sha256

from agentrl.core.types import Image, NewRollout, Outcome, Transition, float32, int32
from agentrl.store import Store, open_store


def rollouts(group: str, n: int) -> list[NewRollout]:
    return [
        NewRollout(id=f"{group}/{i}", run="run", group=group, index=i, task={}) for i in range(n)
    ]


async def work(store: Store, name: str) -> None:
    """Enqueue twenty groups and finish whatever can be claimed, in competition with others."""
    for number in range(20):
        await store.enqueue(rollouts(f"{name}-{number}", 4))
        for attempt in await store.claim(4, runner=name, lease=60):
            outcome = Outcome(attempt=attempt.id, fence=attempt.fence, result=name)
            assert await store.finish([outcome]) == [True]


async def enqueue(store: Store, group: str) -> None:
    """Say ready, wait for a line, then write one group."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await store.enqueue(rollouts(group, 1))


async def load(store: Store, group: str) -> None:
    """Write until killed, printing the id of every call that the store has acknowledged."""
    await store.enqueue(rollouts(group, 8))
    attempts = await store.claim(8, runner=group, lease=600)

    async def write(attempt_id: str) -> None:
        for index in itertools.count():
            call = Transition(
                id=f"{attempt_id}-{index}",
                attempt=attempt_id,
                index=index,
                prompt=int32(range(index % 50)),
                completion=int32([index]),
                logprobs=float32([-1.0]),
            )
            await store.add_transitions([call])
            print(call.id, flush=True)

    await asyncio.gather(*(write(attempt.id) for attempt in attempts))


async def look(store: Store, group: str) -> None:
    """Like `load`, with an image for each call."""
    await store.enqueue(rollouts(group, 8))
    attempts = await store.claim(8, runner=group, lease=600)

    async def write(attempt_id: str) -> None:
        for index in itertools.count():
            body = f"{attempt_id} {index}".encode() * 500
            image = Image(sha256(body).hexdigest(), "image/png", 1, 1, body)
            call = Transition(
                id=f"{attempt_id}-{index}",
                attempt=attempt_id,
                index=index,
                prompt=int32([7] * 20),
                completion=int32([index]),
                logprobs=float32([-1.0]),
                images=(image.digest,),
            )
            await store.put_images("run", [image])
            await store.add_transitions([call])
            print(call.id, flush=True)

    await asyncio.gather(*(write(attempt.id) for attempt in attempts))


async def main(url: str, command: str, argument: str) -> None:
    async with open_store(url) as store:
        await {"work": work, "enqueue": enqueue, "load": load, "look": look}[command](
            store, argument
        )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
