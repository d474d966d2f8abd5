"""A live run of a tiny model in real processes, with an OpenAI client as its agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agentrl.core.errors import Conflict
from agentrl.core.types import SESSION, Reward, Rollout, StepReward
from agentrl.live.records import Event, Lanes, decide, ended, live_state, policy_of
from agentrl.store import open_store
from agentrl.store.base import Store

RUN = "shop"
SETTINGS = """
name = "shop"
[policy]
model = "{model}"
[sampling]
max_tokens = 8
[algorithm]
preset = "reinforce+tis"
lr = 1e-4
[runner]
port = {port}
[live]
sessions = 4
wait = 0.0
[live.promotion]
rule = "never"
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Shop:
    """The run. Its watch makes what is offered the candidate; the test labels and decides."""

    def __init__(self, folder: Path, model: Path, *settings: str) -> None:
        self.folder, self.port, self.settings = folder, free_port(), settings
        self.file = folder / "shop.toml"
        self.file.write_text(SETTINGS.format(model=model, port=self.port))
        self.process: asyncio.subprocess.Process | None = None
        own = f"sqlite:///{folder}/runs/shop/store.db"
        given = (one.removeprefix("store=") for one in settings if one.startswith("store="))
        self.url = next(given, own)

    async def start(self) -> None:
        with (self.folder / "front.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agentrl", "live", str(self.file), *self.settings,
                cwd=self.folder, stdout=log, stderr=log,
            )  # fmt: skip

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
            await self.process.wait()

    async def kill(self, name: str) -> int:
        """SIGKILL a process of the run; returns its id."""
        pid = await self.pid(name)
        os.kill(pid, signal.SIGKILL)
        if name == "supervisor":
            assert self.process is not None
            await self.process.wait()
        return pid

    async def pid(self, name: str, *, other: int = 0) -> int:
        """The id of a process, once it is another one than `other`."""
        assert self.process is not None
        if name == "supervisor":
            return self.process.pid
        mark = "process\0live-gateway" if name == "gateway" else f"process\0{name}"

        async def found() -> int | None:
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if not entry.name.isdigit() or int(entry.name) == other:
                        continue
                    line = (entry / "cmdline").read_text()
                    if mark in line and str(self.folder) in str((entry / "cwd").readlink()):
                        return int(entry.name)
            return None

        return await until(found, what=f"{name} runs")

    def client(self, **named: Any) -> AsyncOpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return AsyncOpenAI(base_url=url, api_key="none", timeout=120.0, **named)

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        async def present() -> bool:
            assert self.process is not None
            assert self.process.returncode is None, (self.folder / "front.log").read_text()
            kind, _, path = self.url.partition(":///")
            return kind != "sqlite" or Path(path).exists()

        await until(present, what="a store")
        async with open_store(self.url) as store:
            yield store


async def until(look: Callable[[], Awaitable[Any]], *, what: str, seconds: float = 90.0) -> Any:
    """The first true result of `look`, asked again and again."""
    end = time.monotonic() + seconds
    while not (found := await look()):
        assert time.monotonic() < end, f"after {seconds:g} s still not: {what}"
        await asyncio.sleep(0.05)
    return found


async def listening(
    process: asyncio.subprocess.Process, port: int, log: Path, *, seconds: float = 90.0
) -> None:
    """Wait until a process listens. Raises RuntimeError with its log if it ends before."""

    async def listens() -> bool:
        if process.returncode is not None:
            raise RuntimeError(log.read_text())
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    await until(listens, what=f"port {port} is listened at", seconds=seconds)


async def first_lanes(store: Store) -> Lanes:
    """Those of the run, once the first version serves."""

    async def served() -> Lanes | None:
        return (await live_state(store, RUN)).lanes

    found: Lanes = await until(served, what="a version serves")
    return found


async def move(store: Store, lanes: Lanes, **what: Any) -> None:
    """Decide about versions, as watch does, or before it does."""
    event = Event(time=time.time(), lanes=lanes, **({"why": "a test"} | what))
    try:
        await decide(store, RUN, await live_state(store, RUN), event)
    except Conflict:
        await move(store, lanes, **what)


async def label(store: Store, count: int, value: Callable[[Rollout], float]) -> list[Rollout]:
    """Label sessions once `count` have ended."""

    async def enough() -> list[Rollout]:
        rows = await ended(store, RUN)
        return rows if len(rows) >= count else []

    rows: list[Rollout] = await until(enough, what=f"{count} sessions have ended")
    await store.add_rewards(
        [StepReward(rollout=row.id, reward=Reward(value=value(row), source="live")) for row in rows]
    )
    return rows


async def talk(
    client: AsyncOpenAI, session: str, *, turns: int = 2, end: bool = True, about: str = "Ada"
) -> None:
    """A session of some calls."""
    said = []
    for turn in range(turns):
        said.append({"role": "user", "content": f"Where is {about}, for the time {turn}?"})
        headers = {"x-session-id": session}
        if end and turn == turns - 1:
            headers["x-agentrl-end"] = "1"
        answer = await client.chat.completions.create(
            model="gpt-4o", messages=said, extra_headers=headers
        )
        said.append({"role": "assistant", "content": answer.choices[0].message.content})


def half(row: Rollout) -> float:
    """An outcome that differs between sessions."""
    return float(row.group[-1] < "8")


async def offered(store: Store, version: int) -> None:
    async def there() -> bool:
        return version in (await live_state(store, RUN)).versions

    await until(there, what=f"version {version} is offered")


async def seated(store: Store, client: AsyncOpenAI, version: int) -> None:
    """Wait until new sessions go to a version."""

    async def goes() -> bool:
        known = {row.id for row in await store.rollouts(RUN, step=SESSION)}
        await talk(client, f"probe{len(known)}", turns=1)
        rows = await store.rollouts(RUN, step=SESSION)
        new = [row.seats["policy"] for row in rows if row.id not in known]
        return new == [policy_of(version)]

    await until(goes, what=f"new sessions go to version {version}")


@asynccontextmanager
async def running(
    folder: Path, model: Path, *settings: str
) -> AsyncIterator[tuple[Shop, Store, AsyncOpenAI]]:
    shop = Shop(folder, model, *settings)
    await shop.start()
    try:
        async with shop.store() as store, shop.client() as client:
            await first_lanes(store)
            yield shop, store, client
    except BaseException:
        await shop.stop()
        print((folder / "front.log").read_text())
        for log in (folder / "runs/shop/logs").glob("*.log"):
            print(log.name, log.read_text())
        raise
    await shop.stop()
