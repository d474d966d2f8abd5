"""Client of the supervisors: starts processes, reads their output, kills them.

Owns: the template process and the sockets to it and to every supervisor. If this process is killed,
the kernel closes them, and each supervisor kills its process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from agentrl.base import memory
from agentrl.errors import AgentRLError, ConfigError
from agentrl.runners.processes import supervisor
from agentrl.runners.processes.supervisor import HEADER, ProcessSpec

SUPERVISOR = ("-I", "-S", supervisor.__file__)  # few imports: it is forked for every process


class SupervisorLost(AgentRLError):
    """The supervisor ended without reporting its process's exit status."""


class Finished(NamedTuple):
    """A program that has finished: exit status (negative: a signal), and the end of its outputs."""

    status: int
    stdout: str
    stderr: str


class SupervisedProcess:
    """A process under a supervisor."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, self._status = writer, asyncio.create_task(self._read(reader))

    async def wait(self) -> int:
        """Wait until the process and all its descendants have ended; return its exit status, or
        minus the number of the signal that ended it.

        Raises SupervisorLost if the supervisor was killed."""
        status = await asyncio.shield(self._status)
        if not status.endswith(b"\n"):
            raise SupervisorLost("the supervisor of the process was killed")
        return int(status)

    async def wait_at_most(self, seconds: float | None) -> int:
        """Like `wait`, but kill it, and wait for its end, after that time or if this is cancelled.
        Raises TimeoutError."""
        try:
            async with asyncio.timeout(seconds):
                return await self.wait()
        except BaseException:
            self.kill()
            with suppress(SupervisorLost):
                await self.wait()
            raise

    def kill(self) -> None:
        """Kill the process and all its descendants; `wait` returns when they have ended."""
        self._writer.write_eof()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            self._writer.close()


class Channel(NamedTuple):
    """A process that is talked to."""

    supervised: SupervisedProcess
    printed: LogPipe
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def end(self) -> int:
        """Kill the process and its descendants, wait for their end, return the exit status."""
        self.supervised.kill()
        try:
            return await self.supervised.wait()
        except SupervisorLost:
            return -signal.SIGKILL
        finally:
            self.writer.close()


class ProcessLauncher:
    """Starts processes through a template: the module `supervisor`, or a Python program that calls
    `supervisor.run_template`. Its last argument is the file descriptor of its socket."""

    def __init__(
        self,
        program: Sequence[str] = SUPERVISOR,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """`python` and `env`: the template's interpreter and environment, by default the runner's.
        Payloads can read the environment, like that of any process of the same user."""
        self._program, self._env, self._python = program, env, python
        self._control: socket.socket | None = None
        self._template: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the template. Raises ConfigError on systems other than Linux."""
        if not sys.platform.startswith("linux"):
            raise ConfigError("runner.executor: separate processes need Linux; use 'async'")
        memory.watch()
        self._start_template()

    def _start_template(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._template = subprocess.Popen(
                [self._python, *self._program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=self._env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the runner, which ends its processes
            )

    async def launch(self, spec: ProcessSpec, fds: Sequence[int]) -> SupervisedProcess:
        """Start a process with `fds` as its descriptors 0, 1, 2, ..., and close them here.

        Raises SupervisorLost if the template has died, and its replacement too; OSError if this
        process has too many open files."""
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._send([theirs.fileno(), *fds])
        except SupervisorLost:
            ours.close()
            raise
        finally:
            for fd in set(fds):
                os.close(fd)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        body = msgspec.json.encode(spec)
        writer.write(HEADER.pack(len(body)) + body)
        return SupervisedProcess(reader, writer)

    async def talk(self, spec: ProcessSpec, printed: int) -> Channel:
        """Start a process whose descriptor 3 is a socket to this one. printed: bytes of output that
        are copied at once, see `LogPipe`. Raises as `launch` does."""
        ours, theirs = socket.socketpair()
        pipe = LogPipe(printed)
        out = await pipe.open()
        fds = [os.open(os.devnull, os.O_RDONLY), out, out, theirs.detach()]
        try:
            supervised = await self.launch(spec, fds)
        except (SupervisorLost, OSError):
            ours.close()
            raise
        return Channel(supervised, pipe, *await asyncio.open_unix_connection(sock=ours))

    def _send(self, fds: Sequence[int]) -> None:
        assert self._control is not None
        assert self._template is not None
        try:
            socket.send_fds(self._control, [b"k"], fds)
        except OSError:  # the template was killed, or could not fork
            self._control.close()
            self._template.kill()
            self._template.wait()
            try:
                self._start_template()
                socket.send_fds(self._control, [b"k"], fds)
            except OSError as error:
                raise SupervisorLost(f"the template process is gone: {error}") from error

    async def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._template is not None:
            await asyncio.to_thread(self._template.wait)


class Pipe(asyncio.Protocol):
    """Base class: reads the output of a process."""

    async def open(self) -> int:
        """Return the write end, which the caller closes after passing it to the process."""
        ours, theirs = os.pipe()
        pipe = os.fdopen(ours, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        return theirs


class LogPipe(Pipe):
    """Copies the output of a process to this process's stderr: at most `limit` bytes between calls
    of `reset`, then a notice instead of the rest."""

    def __init__(self, limit: int) -> None:
        self._limit, self._left = limit, limit

    def reset(self) -> None:
        self._left = self._limit

    def data_received(self, data: bytes) -> None:
        if self._left <= 0:
            return
        sys.stderr.write(data[: self._left].decode(errors="replace"))
        self._left -= len(data)
        if self._left <= 0:
            sys.stderr.write(f"\n(agents printed over {self._limit} bytes; the rest is not kept)\n")
        sys.stderr.flush()


class OutputPipe(Pipe):
    """Keeps the first, or with `tail` the last, `limit` bytes of a process's output."""

    def __init__(self, limit: int, *, tail: bool = False) -> None:
        self.cut = False
        self._limit, self._tail, self._data = limit, tail, bytearray()
        self._closed = asyncio.Event()

    async def text(self) -> str:
        """Return the kept output, once every writer has closed the pipe."""
        await self._closed.wait()
        return self._data.decode(errors="replace")

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > self._limit:
            self.cut = True
            if self._tail:
                del self._data[: -self._limit]
            else:
                del self._data[self._limit :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
