"""The processes of examples/live: its customers, and the commands that answer them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.agentrl.live.shop import free_port, listening

EXAMPLE = Path(__file__).parents[2] / "examples" / "live"
WINDOW, GOAL = 100, 0.8
AGENTRL = (sys.executable, "-m", "agentrl")
Played = list[dict[str, Any]]


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the example, until the end."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "live"
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        yield folder


@asynccontextmanager
async def answering(folder: Path, port: int, *arguments: str) -> AsyncIterator[str]:
    """An agentrl command in the folder that answers at the port, until the end; gives the address
    once it listens. Raises RuntimeError with what it said if it ends before."""
    log = folder / "front.log"
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *AGENTRL, *arguments, cwd=folder, stdout=out, stderr=out
        )

    try:
        await listening(process, port, log, seconds=300.0)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()


@asynccontextmanager
async def live(folder: Path, *settings: str) -> AsyncIterator[str]:
    """`agentrl live run.toml` in the folder, until the end."""
    port = free_port()
    async with answering(folder, port, "live", "run.toml", f"runner.port={port}", *settings) as url:
        yield url


async def command(folder: Path, *arguments: str) -> None:
    """An agentrl command in the folder, until its end. Raises RuntimeError with what it said if it
    fails."""
    process = await asyncio.create_subprocess_exec(
        *AGENTRL, *arguments, cwd=folder,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {said.decode()}")


async def customers(folder: Path, url: str, **options: float | bool) -> Played:
    """What users.py prints with these options. Requests wait until the policy is built. Raises
    RuntimeError with what it said if it fails."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()
             if value is not True]  # fmt: skip
    flags = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is True]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "users.py", *words, *flags, cwd=folder,
        env={**os.environ, "OPENAI_BASE_URL": url},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{(folder / 'front.log').read_text()}\n{errors.decode()}")
    return [json.loads(line) for line in said.splitlines()]


def sessions_to(right: list[bool]) -> int | None:
    """After how many sessions the mean of the last WINDOW is at least GOAL."""
    means = ((n, fmean(right[n - WINDOW : n])) for n in range(WINDOW, len(right) + 1))
    return next((n for n, mean in means if mean >= GOAL), None)
