"""The keeper's own promises, with a stand-in for the command line that is slow or fails."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.runners.executors import keeper
from agentrl.runners.executors.container_engine import Cli
from agentrl.runners.executors.keeper import Keeper

# `ps` lists the files of a folder, `rm` removes them after a while, `run` adds one after a while.
ENGINE = """#!/bin/sh
cd "$(dirname "$0")" && echo "$@" >> log
case $1 in
ps) [ -e down ] && exit 125; ls all;;
rm) sleep 0.3; shift 3; for name; do rm -f "all/$name"; done; [ ! -e down ];;
run) sleep "$2"; touch "all/$3";;
esac
"""
Serve = Callable[[list[bytes]], Any]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    program = tmp_path / "engine"
    program.write_text(ENGINE)
    program.chmod(0o755)
    (tmp_path / "all").mkdir()
    return program


async def serve(engine: Path, *lines: bytes, pause: float = 0.0) -> None:
    """A runner that asks for these, and is killed after `pause` seconds."""
    ours, theirs = socket.socketpair()
    scratch = engine.parent / "scratch"
    scratch.mkdir()
    serving = asyncio.create_task(Keeper(str(engine), "me", str(scratch)).serve(theirs.detach()))
    ours.sendall(b"".join(lines))
    await asyncio.sleep(pause)
    ours.close()
    await asyncio.wait_for(serving, 20.0)
    assert not scratch.exists()
    assert not list((engine.parent / "all").iterdir())


def call(engine: Path, *words: str, ends: bool = False) -> bytes:
    return (
        keeper.json.dumps(
            {"do": "call", "id": 1, "how": {"argv": [str(engine), *words]}, "ends": ends}
        ).encode()
        + b"\n"
    )


async def test_a_runner_that_is_killed_in_the_middle_of_a_line(engine: Path) -> None:
    (engine.parent / "all" / "box").touch()
    await serve(engine, b'{"do": "call", "how": {"argv": ["')


async def test_one_slow_start_does_not_keep_the_others(engine: Path) -> None:
    """They are removed at once, and it when it has ended."""
    box = engine.parent / "all" / "box"
    box.touch()
    serving = asyncio.create_task(serve(engine, call(engine, "run", "1.5", "slow", ends=True)))
    began = time.monotonic()
    while box.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert time.monotonic() - began < 1.3
    await serving
    said = (engine.parent / "log").read_text().splitlines()
    assert [line for line in said if line.startswith("rm")][-1] == "rm --force --volumes slow"


async def test_a_removal_is_not_interrupted(engine: Path) -> None:
    """What is half removed may keep processes that nobody finds."""
    for name in ("a", "b"):
        (engine.parent / "all" / name).touch()
    await serve(engine, b'{"do": "remove", "name": "a", "folder": ""}\n', pause=0.15)
    said = (engine.parent / "log").read_text().splitlines()
    removals = [line for line in said if line.startswith("rm")]
    assert removals.count("rm --force --volumes a") == 1


async def test_what_is_not_known_to_be_gone_is_removed_again(engine: Path, tmp_path: Path) -> None:
    """The daemon is down for a while: neither the container nor its folder is forgotten."""
    (tmp_path / "share").mkdir()
    (tmp_path / "down").touch()
    asked = {"do": "remove", "name": "box", "folder": str(tmp_path / "share")}

    async def repaired() -> None:
        while "ps -a --filter label=agentrl.owner=me --format" not in log():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert (tmp_path / "share").exists()
        (tmp_path / "down").unlink()
        while (tmp_path / "share").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def log() -> str:
        file = tmp_path / "log"
        return file.read_text() if file.exists() else ""

    repairing = asyncio.create_task(repaired())
    await serve(engine, keeper.json.dumps(asked).encode() + b"\n", pause=4.0)
    await asyncio.wait_for(repairing, 1.0)


async def test_a_program_that_is_late_can_clean_up(tmp_path: Path) -> None:
    """A build that is killed itself leaves its layers: what it has started is killed."""
    build = f"sleep 100; touch {tmp_path}/cleaned"
    with pytest.raises(TimeoutError):
        await keeper.run(["sh", "-c", build], timeout=0.5)
    assert (tmp_path / "cleaned").exists()
    with pytest.raises(TimeoutError):
        await keeper.run(["sleep", "100"], timeout=0.1)


def test_a_dead_keeper_that_nobody_has_looked_at_is_dead() -> None:
    with subprocess.Popen(["sleep", "0"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert keeper.started(ended.pid) == ""
        unknown = keeper.owner_of(ended.pid)
    assert keeper.started(os.getpid())
    assert keeper._is_dead(unknown)
    assert not keeper._is_dead(keeper.owner_of(os.getpid()))


async def test_whoever_notices_first_that_the_keeper_is_gone_starts_the_next(engine: Path) -> None:
    cli = Cli(str(engine))
    await cli.start()
    assert cli._keeper is not None
    last = cli.owner
    cli._keeper.kill()
    while cli.alive:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    try:
        await cli.awake()
        assert cli.owner != last
        cli._keeper.kill()
        while cli.alive:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(cli.ask("run", "0.3", name) for name in "abc"))
        assert [answer.status for answer in answers] == [0, 0, 0]
    finally:
        await cli.close()
    assert not list((engine.parent / "all").iterdir())


async def test_a_folder_stays_while_its_runner_or_its_keeper_lives(
    engine: Path, tmp_path: Path
) -> None:
    """A runner whose keeper was killed goes on in it."""
    alive, dead = keeper.owner_of(os.getpid()), f"{keeper.owner_of(os.getpid())}0"
    owners = {"runner": [alive, dead], "keeper": [dead, alive], "none": [dead, dead]}
    for name, lines in owners.items():
        folder = tmp_path / f"{keeper.PREFIX}{name}"
        folder.mkdir()
        (folder / keeper.OWNER).write_text("\n".join(lines))
    await serve(engine, pause=0.5)
    assert sorted(file.name for file in tmp_path.glob(f"{keeper.PREFIX}*")) == [
        f"{keeper.PREFIX}keeper",
        f"{keeper.PREFIX}runner",
    ]


async def test_whatever_goes_wrong_is_an_answer(engine: Path) -> None:
    cli = Cli(str(engine))
    await cli.start()
    try:
        said = await asyncio.wait_for(cli._send({"do": "proxy", "how": {"name": "x"}}), 5.0)
        assert said.status
    finally:
        await cli.close()
