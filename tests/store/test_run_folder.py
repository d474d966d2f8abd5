"""Who holds a run: a second start is refused while the first one lives, and only then."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl import trainer
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, Conflict, Unavailable
from agentrl.store import Store, open_store, run_folder
from agentrl.store.run_folder import TakenOver, hold
from agentrl.store.sql.runs import LEASE_SLACK
from tests import factories
from tests.store.conftest import Clock

LIVE = r"run 'r' is live \(process \d+ on \S+, since \d\d:\d\d .*\): "
OTHER = """
import asyncio, sys
from agentrl.store import run_folder as run_owner
from agentrl.store import open_store

async def main():
    async with open_store(sys.argv[1]) as store, run_owner.hold(store, "r", {}):
        print("held", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "t.jsonl").write_text('{"input": "a"}\n')
    own = {"output": str(tmp_path / "r"), "tasks": {"train": "t.jsonl"}}
    return factories.config(tmp_path, policy={"model": "m"}, **own)


@pytest.fixture
async def store(config: RunConfig, clock: Clock) -> Any:
    async with open_store(config.store, clock=clock) as opened:
        yield opened


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "BEAT_PAUSE", 0.01)
    monkeypatch.setattr(run_folder, "CHECK_PAUSE", 0.01)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process runs on another machine."""
    monkeypatch.setattr(run_folder, "_machine", lambda: "another")


async def live(config: RunConfig, act: Callable[[], object], *, stopped: bool = False) -> None:
    """Do something while another process holds the run; it must be killed without a goodbye.
    stopped: it does not run meanwhile, as after Ctrl-Z."""
    command = [sys.executable, "-c", OTHER, config.store]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"held\n"
    if stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.to_thread(act)
    finally:
        process.kill()
        await process.wait()
    async with open_store(config.store) as store, hold(store, "r", {}):
        pass


def fit(config: RunConfig, **options: bool) -> None:
    policy, tasks = "m", ({"input": word} for word in ("x", "y"))
    where = {"name": "r", "output": config.output}
    trainer.Trainer(print, tasks, lambda *_: 1.0, policy, **where).fit(**options)


def go_back(config: RunConfig) -> None:
    from agentrl import trainer

    trainer.go_back(config, "0")


@pytest.mark.parametrize(
    ("start", "cure", "stopped"),
    [
        (trainer.run_training, r"stop it first; give --take-over, .* run with name=NAME$", True),
        (lambda config: trainer.run_training(config, fresh=True), "stop it before --fresh", False),
        (fit, r"stop it first; .*fit\(take_over=True\)", False),
        (lambda config: fit(config, fresh=True), "stop it before --fresh", False),
        (go_back, "stop it first; give --take-over", False),
    ],
)
async def test_a_live_run_is_left_alone_and_a_killed_one_is_free_at_once(
    config: RunConfig, start: Callable[[RunConfig], None], cure: str, stopped: bool
) -> None:
    def act() -> None:
        with pytest.raises(ConfigError, match=LIVE + cure):
            start(config)

    await live(config, act, stopped=stopped)
    async with open_store(config.store) as store:
        state = await store.run("r")
    assert state is not None
    assert (state.epoch, state.config) == (2, {})  # only the start after the kill
    assert not Path(config.output, "train.jsonl").exists()


async def test_in_the_folder_of_another_name_the_cure_names_a_folder_too(config: RunConfig) -> None:
    other = Path(config.output).with_name("out")
    moved = msgspec.structs.replace(config, output=str(other), store=f"sqlite:///{other}/store.db")

    def act() -> None:
        with pytest.raises(ConfigError, match="name=NAME output=FOLDER"):
            trainer.run_training(moved)

    await live(moved, act)


async def test_one_process_holds_a_run_once_and_again_after_its_end(store: Store) -> None:
    """As a notebook does, which is interrupted and goes on."""
    async with hold(store, "r", {}):
        with pytest.raises(ConfigError, match=LIVE + "wait for it"):
            async with hold(store, "r", {}):
                pass
    with pytest.raises(KeyboardInterrupt):
        async with hold(store, "r", {}):
            raise KeyboardInterrupt
    async with hold(store, "r", {}):
        pass


async def test_of_two_starts_at_once_one_goes_on(store: Store) -> None:
    both = asyncio.Barrier(2)

    async def start() -> None:
        async with hold(store, "r", {}):
            await both.wait()

    first, second = (asyncio.create_task(start()) for _ in range(2))
    ended, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    (loser,) = ended
    with pytest.raises(ConfigError, match=LIVE):
        loser.result()
    await both.wait()


async def test_whoever_takes_over_stops_the_owner_and_its_processes(
    store: Store, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first() -> None:
        async with hold(store, "r", {}) as held:
            monkeypatch.setenv(run_folder.OWNER_VARIABLE, held.owner)
            child = await run_folder.open_as_child(store, config)
            async with hold(store, "r", {}, take_over=True):
                await asyncio.wait((held.keeping,))
                monkeypatch.setenv(run_folder.OWNER_VARIABLE, held.owner)
                with pytest.raises(Conflict, match="live owner"):  # a process that starts slowly
                    await run_folder.open_as_child(store, config)
                await store.log("r", 0, {"a": 1.0}, epoch=child.epoch)  # Fenced

    with pytest.raises(TakenOver, match=r"taken over \(process \d+ on .*it continues there"):
        await first()


async def test_on_another_machine_a_sign_of_life_decides(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    async with hold(store, "r", {}):
        elsewhere(monkeypatch)
        beating = asyncio.create_task(tick(clock, 1.0))
        with pytest.raises(ConfigError, match=LIVE):
            async with hold(store, "r", {}, tell=said.append):
                pass
        beating.cancel()
    assert "waiting for a sign of it" in said[0]


async def tick(clock: Clock, seconds: float) -> None:
    while True:
        clock.now += seconds
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("passed", [run_folder.LEASE, -LEASE_SLACK - 1.0])
async def test_on_another_machine_a_killed_owner_is_gone_with_its_lease(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, passed: float
) -> None:
    """Or if the clock was set back, which would make the lease as much longer."""
    await store.open_run("r", {}, owner=await killed(store), lease=run_folder.LEASE)
    elsewhere(monkeypatch)
    waiting = asyncio.create_task(enter(hold(store, "r", {}, tell=str)))
    done, _ = await asyncio.wait((waiting,), timeout=0.2)
    assert not done
    clock.now += passed
    await waiting


async def enter(held: Any) -> None:
    async with held:
        pass


async def killed(store: Store) -> str:
    """The text of an owner that held the run."""
    async with hold(store, "r", {}) as held:
        return held.owner


async def test_a_reused_process_id_is_not_the_owner(store: Store) -> None:
    owner = msgspec.json.decode(await killed(store), type=run_folder.Owner)
    parent = msgspec.structs.replace(owner, pid=1)  # lives, but was started at another time
    assert parent.lives() is False
    assert msgspec.structs.replace(parent, born=run_folder._born(1)).lives() is True
    assert msgspec.structs.replace(owner, pid=2**22 + 1).lives() is False


def test_a_zombie_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            run_folder._born(process.pid)


async def test_a_store_that_is_away_for_a_while_ends_no_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, enough = list[float](), asyncio.Event()

    async def away(*_: object, lease: float) -> bool:
        tries.append(lease)
        if len(tries) == 3:
            enough.set()
        raise Unavailable("away")

    async with hold(store, "r", {}) as held:
        with monkeypatch.context() as patch:
            patch.setattr(store, "hold_run", away)
            await enough.wait()
        assert not held.keeping.done()
