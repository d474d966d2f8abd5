"""One agent for every executor: imported by those of Python, run as a command by the others."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

SECRET = re.compile(rb"secret-[0-9a-f]{32}")

# Detached from its session, its process group and its parent: only a subreaper finds it again.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    with open(sys.argv[1], "a") as file:
        print(os.getpid(), file=file)
    os.close(1)  # the starter reads stdout until here
    time.sleep(3600)
"""


async def agent(task: dict[str, Any]) -> Any:
    return await globals()[task["do"]](task)


async def answer(task: dict[str, Any]) -> Any:
    return {"said": task["text"], "n": [1, 2.5, None]}


async def shape(task: dict[str, Any]) -> Any:
    """Return an object that is not JSON as it is."""
    import numpy as np
    import pydantic

    model = pydantic.create_model("Model", n=(int, 7), at=(tuple[int, int], (1, 2)))
    shapes = {
        "number": np.int64(7),
        "truth": np.bool_(True),
        "keys": {1: np.float64(0.5), "inner": (1, {2})},
        "model": [model()],
        "text": "\ud83d",
        "object": {"steps": [1, object()]},
        "infinite": (1.0, float("inf")),
        "large": {"n": 2**70},
    }
    return shapes[task["name"]]


async def fail(task: dict[str, Any]) -> None:
    print("going down", file=sys.stderr)
    raise ValueError("no luck")


async def escape(task: dict[str, Any]) -> Any:
    """Raise what is no Exception: in the agent itself, or in a task or thread that it started."""
    odd: Any = type("Odd", (BaseException,), {})
    known = vars(builtins) | {"CancelledError": asyncio.CancelledError, "Odd": odd}
    error = known[task["name"]]

    async def later() -> None:
        raise error("out")

    def blocking() -> None:
        raise error("out")

    if task["where"] == "task":
        return await asyncio.create_task(later())
    return await (asyncio.to_thread(blocking) if task["where"] == "thread" else later())


async def leave(task: dict[str, Any]) -> None:
    os._exit(3)


async def ask(task: dict[str, Any]) -> str:
    import httpx  # the other doings start faster without

    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = {"messages": [{"role": "user", "content": task["text"]}]}
    async with httpx.AsyncClient(timeout=20, headers={"authorization": f"Bearer {key}"}) as client:
        answer = await client.post(f"{url}/chat/completions", json=body)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


async def enlarge(task: dict[str, Any]) -> str:
    return "x" * task["bytes"]


async def look(task: dict[str, Any]) -> list[str]:
    """Everything like a secret that this process was given: arguments, environment, stdin, files
    beside its task, and all of its memory."""
    seen = [repr(task), repr(sys.argv), repr(dict(os.environ))]
    if __name__ == "__main__":
        seen.append(sys.stdin.read())
    if task_file := os.environ.get("AGENTRL_TASK_FILE"):
        seen += [file.read_text() for file in Path(task_file).parent.iterdir() if file.is_file()]
    found = {secret for text in seen for secret in SECRET.findall(text.encode())}
    if task["memory"]:
        found |= set(_secrets_in_memory())
    return sorted(secret.decode() for secret in found)


def _secrets_in_memory() -> Iterator[bytes]:
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            region, rights, *_ = line.split()
            start, end = (int(edge, 16) for edge in region.split("-"))
            if rights.startswith("rw"):
                with suppress(OSError, OverflowError):
                    memory.seek(start)
                    yield from SECRET.findall(memory.read(end - start))


async def eat(task: dict[str, Any]) -> int:
    return len(bytearray(task["bytes"]))


def start_daemon(pids: Path) -> None:
    daemon = [sys.executable, "-Sc", DAEMON, str(pids)]
    subprocess.run(daemon, check=True, timeout=20, stdout=subprocess.PIPE)


def leave_pid(pids: Path) -> None:
    with pids.open("a") as file:
        print(os.getpid(), file=file)


async def hang(task: dict[str, Any]) -> str:
    """Leaves the process ids of itself and of what it starts in `task["pids"]`, says "begun" into
    the pipe `task["says"]`, and ends only if an earlier attempt did that."""
    pids, says = Path(task["pids"]), Path(task["says"])
    if pids.exists() and task.get("once"):
        return "done"
    if task.get("daemon"):
        start_daemon(pids)
    leave_pid(pids)
    says.write_text("begun\n")
    try:
        await asyncio.Event().wait()
    finally:
        says.write_text("cancelled\n")
    return "never"


async def wait(task: dict[str, Any]) -> str:
    """Ends when something is written into the pipe `task["until"]`."""
    Path(task["says"]).write_text("begun\n")
    return await asyncio.to_thread(Path(task["until"]).read_text)


def verify(task: Any, result: Any) -> float:
    return float(result is not None)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(agent(json.loads(os.environ["AGENTRL_TASK"])))))
