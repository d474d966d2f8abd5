"""The keeper: a process that runs docker's command line for a runner, opens proxies in its
containers to the runner's gateway, and outlives the runner.

A proxy listens on the loopback address of a container's network namespace and forwards connections
to the gateway. So a container without a network can call models, and its image needs no program for
it. Linux only.

Invariant: after the end of the runner, however it ended, this process removes all containers with
its label, and only then ends. The next keeper removes what a killed keeper has left behind.

A small process imports this module: import only the standard library here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

LABEL = "agentrl.owner"
NEWUSER, NEWNET = 0x10000000, 0x40000000  # linux/sched.h
EXITING = 0x4  # PF_EXITING, linux/sched.h: a flag in /proc/PID/stat
MAX_MESSAGE_BYTES = 2**26  # bytes
MAX_OUTPUT_BYTES = 2**20  # bytes of a program's output that are returned
ENDING = 600.0  # seconds of retries to remove the containers of a dead runner
GRACE = 5.0  # seconds that a program has to end after its child processes were killed
CLI_TIMEOUT = 60.0  # seconds; default of a call
SWEEPS = (0.0, 5.0, 30.0, 300.0)  # seconds between searches for containers of dead runners
LISTEN = "listen"
PREFIX, OWNER = (
    "agentrl-containers-",
    "owner",
)  # prefix of scratch folders, and name of a file in each


class Keeper:
    def __init__(self, cli: str, owner: str, scratch: str) -> None:
        """`scratch`: folder of the runner, removed at the end."""
        self._cli, self._scratch = cli, scratch
        self._filter = ("--filter", f"label={LABEL}={owner}")
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ending = set[int]()  # calls that are never interrupted
        self._proxies: dict[str, asyncio.Server] = {}
        self._removals: dict[str, str] = {}  # container -> its folder, or no path
        self._remove = asyncio.Event()
        self._rms = set[asyncio.Task[tuple[int, str, str]]]()

    async def serve(self, fd: int) -> None:
        """Handle the runner's requests, one line of JSON each, until it disconnects."""
        ours = socket.socket(fileno=fd)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
        background = [asyncio.create_task(self._sweeping()), asyncio.create_task(self._removing())]
        # The runner may be killed in the middle of a line.
        with contextlib.suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                self._handle(json.loads(line), writer)
        for task in background:
            task.cancel()
        for number, call in self._calls.items():
            if number not in self._ending:
                call.cancel()
        await self._remove_all()
        writer.close()

    def _handle(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if request["do"] == "stop":
            if (stopped := self._calls.get(request["of"])) is not None:
                stopped.cancel()
        elif request["do"] == "remove":
            self._removals[request["name"]] = request["folder"]
            self._remove.set()
        else:
            self._calls[request["id"]] = asyncio.create_task(self._answer(request, writer))
            if request.get("ends"):
                self._ending.add(request["id"])

    async def _answer(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            do = self._open_proxy if request["do"] == "proxy" else run
            status, out, err = await do(**request["how"])
        except asyncio.CancelledError:
            status, out, err = -9, "", "stopped"
        except TimeoutError:
            status, out, err = -9, "", f"it took longer than {request['how'].get('timeout'):g} s"
        except Exception as error:  # noqa: BLE001 - whatever it is, the runner waits for an answer
            status, out, err = 127, "", str(error) or type(error).__name__
        del self._calls[request["id"]]
        self._ending.discard(request["id"])
        answer = {"id": request["id"], "status": status, "out": out, "err": err}
        with contextlib.suppress(OSError, RuntimeError):  # the runner is gone
            writer.write(json.dumps(answer).encode() + b"\n")

    async def _open_proxy(self, name: str, pid: int, host: str, port: int) -> tuple[int, str, str]:
        """Forward `port` of a container's loopback address to the same port of `host`. `pid`: the
        container's first process; its arguments contain the container's name."""
        if name not in command_line(pid):
            return 1, "", f"process {pid} is not a container of this machine"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = [sys.executable, "-I", "-S", __file__, LISTEN, str(pid), str(port)]
            reply = await run([*program, str(theirs.fileno())], fds=(theirs.fileno(),))
            theirs.close()
            if reply[0]:
                return reply
            _, (fd,), *_ = socket.recv_fds(ours, 1, 1)

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                gateway = await asyncio.open_connection(host, port)
                await asyncio.gather(_copy(reader, gateway[1]), _copy(gateway[0], writer))
                gateway[1].close()
            writer.close()

        self._proxies[name] = await asyncio.start_server(forward, sock=socket.socket(fileno=fd))
        return 0, "", ""

    async def _removing(self) -> None:
        """Remove containers that the runner no longer needs, all that are queued in one command."""
        while True:
            await self._remove.wait()
            self._remove.clear()
            queued = dict(self._removals)
            for name in queued:
                if (proxy := self._proxies.pop(name, None)) is not None:
                    proxy.close()  # a proxy keeps the network of a container that is gone
            remaining: set[str] = set()
            if await self._rm(*queued):
                failed, listed, _ = await self._ask(
                    "ps", "-a", *self._filter, "--format", "{{.Names}}"
                )
                remaining = set(queued if failed else listed.split())
            for name, folder in queued.items():
                if name not in remaining:
                    del self._removals[name]
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if remaining & self._removals.keys():
                await asyncio.sleep(1.0)
                self._remove.set()

    async def _remove_all(self) -> None:
        """Remove all containers of the runner, repeatedly: calls that are still running may start
        more, and only after their end is it certain that none is left."""
        for proxy in self._proxies.values():
            proxy.close()
        until, pause = asyncio.get_running_loop().time() + ENDING, 0.1
        while asyncio.get_running_loop().time() < until:
            ended = not self._calls and not self._rms
            failed, remaining, _ = await self._ask("ps", "-aq", *self._filter)
            if remaining.split():
                await self._rm(*remaining.split())
            elif ended and not failed:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def _sweeping(self) -> None:
        """Sweep several times, because the last command of a killed keeper may still start a
        container."""
        note_owner(self._scratch)
        for pause in SWEEPS:
            await asyncio.sleep(pause)
            with contextlib.suppress(OSError):
                await self._sweep()

    async def _sweep(self) -> None:
        """Remove scratch folders and containers of dead runners of this machine whose keepers are
        dead, too."""
        for file in Path(self._scratch).parent.glob(f"{PREFIX}*/{OWNER}"):
            with contextlib.suppress(OSError):
                if all(map(_is_dead, file.read_text().split())):
                    shutil.rmtree(file.parent, ignore_errors=True)
        _, listed_ids, _ = await self._ask("ps", "-aq", "--filter", f"label={LABEL}")
        if not (ids := listed_ids.split()):
            return
        field = f'{{{{.Id}}}} {{{{index .Config.Labels "{LABEL}"}}}}'
        _, listed, _ = await self._ask("inspect", "--format", field, *ids)
        pairs = [line.split() for line in listed.splitlines()]
        if dead := [pair[0] for pair in pairs if len(pair) == 2 and _is_dead(pair[1])]:
            await self._rm(*dead)

    async def _rm(self, *containers: str) -> int:
        """Remove containers in any state; return whether that failed. A cancelled removal
        continues, because half a removal would leave the rest behind."""
        removal = asyncio.create_task(self._ask("rm", "--force", "--volumes", *containers))
        self._rms.add(removal)
        removal.add_done_callback(self._rms.discard)
        return (await asyncio.shield(removal))[0]

    async def _ask(self, *arguments: str) -> tuple[int, str, str]:
        try:
            return await run([self._cli, *arguments], timeout=CLI_TIMEOUT)
        except (OSError, TimeoutError) as error:
            return -1, "", str(error)


async def run(
    argv: list[str],
    env: dict[str, str] | None = None,
    stdin: str = os.devnull,
    stdout: str = "",
    largest: int = 0,
    timeout: float = CLI_TIMEOUT,
    fds: tuple[int, ...] = (),
) -> tuple[int, str, str]:
    """Run a program; return its exit status, its output, unless that goes to the file `stdout`, and
    the end of its errors. It is killed after `timeout` seconds, if the caller is cancelled, and if
    it writes a file of more than `largest` bytes."""
    with contextlib.ExitStack() as stack:
        how: dict[str, Any] = {"stdin": stack.enter_context(open(stdin, "rb"))}  # noqa: ASYNC230, PTH123
        how["stdout"] = asyncio.subprocess.PIPE
        if stdout:
            how["stdout"] = stack.enter_context(open(stdout, "wb"))  # noqa: ASYNC230, PTH123
        environment = None if env is None else {**os.environ, **env}
        how |= {"stderr": asyncio.subprocess.PIPE, "env": environment, "pass_fds": fds}
        process = await asyncio.create_subprocess_exec(*argv, start_new_session=True, **how)
    if largest:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest, largest))
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    except BaseException:
        await _kill(process)
        raise
    status, texts = process.returncode, ((out or b"")[:MAX_OUTPUT_BYTES], err[-MAX_OUTPUT_BYTES:])
    assert status is not None
    return status, texts[0].decode(errors="replace"), texts[1].decode(errors="replace")


def _children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")  # one for each thread
    return [int(child) for file in files for child in file.read_text().split()]


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program, but its child processes first: a build that is killed before them leaves a
    container that cannot be found."""
    with contextlib.suppress(OSError, TimeoutError):
        if pids := _children(process.pid):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(process.wait(), GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def command_line(pid: int) -> str:
    """Return a process's arguments, among them a container's name. Raises OSError."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


def listen(pid: int, port: int, fd: int) -> None:
    """Listen in the network of process `pid`; send the socket through `fd`."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in (("user", NEWUSER), ("net", NEWNET)):
        namespace = f"/proc/{pid}/ns/{kind}"
        if os.stat(namespace).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:  # noqa: PTH116
            continue
        if libc.setns(os.open(namespace, os.O_RDONLY), flag):
            number = ctypes.get_errno()
            sys.exit(f"its {kind} namespace cannot be entered: {os.strerror(number)}")
    with socket.socket() as listener, socket.socket(fileno=fd) as control:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        socket.send_fds(control, [b"d"], [listener.fileno()])


def started(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty if there is none, or if it is
    ending or has ended."""
    try:
        state, *stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" or int(stat[5]) & EXITING else stat[18]


def owner_of(pid: int) -> str:
    """Identify a process among all machines and PID namespaces that use the same docker."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}/{pid}/{started(pid)}"  # noqa: PTH116


def note_owner(scratch: str | Path) -> None:
    """Register this process as an owner of the folder, which is kept as long as the runner or its
    keeper lives."""
    with contextlib.suppress(OSError), Path(scratch, OWNER).open("a") as file:
        file.write(f"{owner_of(os.getpid())}\n")


def _is_dead(owner: str) -> bool:
    """Whether a process is known to be dead; False for processes of other machines."""
    _, _, pid = owner.rpartition("/")[0].rpartition("/")
    on_this_machine = owner.split("/")[:2] == owner_of(os.getpid()).split("/")[:2]
    started_then = not owner.endswith("/")
    return on_this_machine and pid.isdigit() and not (started_then and owner_of(int(pid)) == owner)


def main(cli: str, scratch: str, fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # it ends when its work is done
    asyncio.run(Keeper(cli, owner_of(os.getpid()), scratch).serve(fd))


if __name__ == "__main__":
    if sys.argv[1] == LISTEN:
        listen(*map(int, sys.argv[2:]))
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
