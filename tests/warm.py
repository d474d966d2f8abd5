"""`python -m agentrl ...` that starts in milliseconds, for tests that start it often.

Importing torch, transformers and LangChain takes most of the CPU time of a short run. One template
process imports them once and forks for each command; what a command starts with `python -m agentrl`
is forked as well, and is its real child: signals, exit codes and the death of a parent are those of
any process. `/proc/PID/comm` is its first argument after `process`. Tests of starting start cold
processes instead.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "agentrl.algorithms.train.main", "agentrl.algorithms.vision.loading", "agentrl.audit.subjects",
    "agentrl.cli.init", "agentrl.cli.main", "agentrl.environments.runner", "agentrl.live.source",
    "agentrl.runners.feedback", "agentrl.runners.main", "agentrl.store.sqlite", "agentrl.trainer",
    "anyio._backends._asyncio", "httpcore2", "langchain.agents", "langchain_openai",
    "langgraph.graph", "matplotlib.backends.backend_agg", "matplotlib.pyplot", "numpy",
    "openai.resources.chat.chat", "peft", "PIL.GifImagePlugin", "psycopg_pool", "rich.panel",
    "safetensors.torch", "transformers.models.auto.image_processing_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2", "uvicorn", "uvloop", "tests.system.steady",
)  # fmt: skip
Command = dict[str, Any]  # arguments after `python`, cwd, env, session, spare


# -- in the tests ----------------------------------------------------------------------------------


class Process:
    """A command that runs; killed when this object is closed."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.pid = int(channel.recv(16))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._channel.settimeout(timeout)
            self.returncode = int(self._channel.recv(16) or -signal.SIGKILL)
            self._channel.close()
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kill it, if it still runs."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._channel.shutdown(socket.SHUT_RDWR)  # wakes who waits in another thread
        self._channel.close()


def start(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    output: Any = None, errors: Any = None, spare: int = 4,
) -> Process:  # fmt: skip
    """Run `python ARGUMENTS`, which begin with -m or -c; what it prints goes to these files, or to
    the tests' errors. It may start `spare` processes before it starts cold ones."""
    command = {
        "arguments": arguments,
        "cwd": str(cwd or Path.cwd()),
        "session": False,
        "spare": spare,
    }
    command["env"] = dict(os.environ if env is None else env)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(os.devnull, "rb") as nothing, _template() as template:  # noqa: PTH123
        files = [nothing.fileno(), *(2 if f is None else f.fileno() for f in (output, errors))]
        _send(template, command, [*files, theirs.fileno()])
    return Process(ours)


def run(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As `subprocess.run` that captures text."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start(*arguments, cwd=cwd, env=env, output=output, errors=errors)
        with contextlib.closing(process):
            code = process.wait(timeout)
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())


def _template() -> socket.socket:
    """A connection to the template process of these tests, which the first of them starts."""
    tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir(), f"agentrl-warm-{os.getuid()}-{tests}")
    folder.mkdir(mode=0o700, exist_ok=True)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            _start_template(folder, tests)
    connection.connect(str(folder / "socket"))
    return connection


def _start_template(folder: Path, tests: int) -> None:
    # It has threads, those of numpy, which know how to be forked.
    quiet = ["-W", "ignore:This process:DeprecationWarning"]
    command = [sys.executable, *quiet, "-m", "tests.warm", str(folder), str(tests)]
    environment = os.environ | {"GOMP_SPINCOUNT": "20000", "MPLBACKEND": "agg"}
    root = Path(__file__).parents[1]
    template = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True)
    while not (folder / "socket").exists():
        if template.poll() is not None:
            raise RuntimeError("The template process ended; its output says why")
        time.sleep(0.02)
    template.returncode = 0  # it ends after these tests: nobody waits for it


# -- in the template process -----------------------------------------------------------------------


def serve(folder: Path, tests: int) -> None:
    """Fork for each command until the tests end."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is not touched is not copied
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    over = os.pidfd_open(tests)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / "starting"))
        listening.listen(64)
        (folder / "starting").rename(folder / "socket")
        while over not in select.select([listening, over], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                supervise(*_receive(connection))
            connection.close()
    for file in (folder / "socket", folder / "lock"):
        file.unlink()
    folder.rmdir()


def supervise(command: Command, files: list[int]) -> NoReturn:
    """Start the command, report its process id and its exit code; kill it when nobody listens."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        become(command, files[:3], command["spare"])
    with socket.socket(fileno=files[3]) as channel:
        channel.send(str(pid).encode())
        if channel in select.select([os.pidfd_open(pid), channel], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            channel.send(str(code).encode())
    os._exit(0)


def become(command: Command, files: list[int], spare: int = 0) -> NoReturn:
    """Be the process that runs `python ARGUMENTS`."""
    if command["session"]:
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False))
    sys.stdout, sys.stderr = (
        os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2)
    )
    os.environ.clear()
    os.environ.update(command["env"])
    os.chdir(command["cwd"])
    flag, program, *arguments = command["arguments"]
    name = program if flag == "-m" else flag
    sys.argv, sys.path[0] = [name, *arguments], command["cwd"]
    named = arguments[1:] if arguments[:1] == ["process"] else arguments
    Path("/proc/self/comm").write_text("/".join(named[:1]))
    _fork_what_it_starts(spare)
    _exit(_run(flag, program))


def _run(flag: str, program: str) -> int:
    try:
        if flag == "-c":
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _exit(code: int) -> NoReturn:
    """What the interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _is_agentrl(command: list[Any]) -> bool:
    """Whether it is `python -m agentrl ...`, or a module of the package."""
    return command[:2] == [sys.executable, "-m"] and command[2].partition(".")[0] == "agentrl"


def _fork_what_it_starts(number: int) -> None:
    """Processes forked now, while no thread runs and no database is open, become the children that
    `subprocess` and `asyncio` start."""
    spare: list[tuple[int, socket.socket]] = []
    for _ in range(number):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for channel in (ours, *(channel for _, channel in spare)):
                channel.close()
            become(*_receive(theirs))
        theirs.close()
        spare.append((pid, ours))
    cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(
        self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any,
        cwd: Any, env: Any, startup: Any, flags: Any, shell: bool, *more: Any,
    ) -> None:  # fmt: skip
        if not spare or not _is_agentrl(list(args)):
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
            return cold(self, *given, startup, flags, shell, *more)
        pipes, rest = more[:6], more[6:]  # rest: signals, three of users, umask, session, ...
        ends = (
            pipes[0],
            pipes[3],
            pipes[5],
        )  # the child's; -1: as the parent has it
        files = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid, channel = spare.pop()
        self._child_created = True
        command = {"arguments": args[1:], "cwd": str(cwd or Path.cwd()), "session": rest[5]}
        _send(channel, command | {"env": dict(os.environ if env is None else env)}, files)
        channel.close()
        return self._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


# -- between them ----------------------------------------------------------------------------------


def _send(channel: socket.socket, command: Command, files: list[int]) -> None:
    socket.send_fds(channel, [json.dumps(command).encode()], files)


def _receive(channel: socket.socket) -> tuple[Command, list[int]]:
    text, files, *_ = socket.recv_fds(channel, 2**17, 4)
    if not text:  # nobody is left who could ask
        os._exit(0)
    return json.loads(text), files


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
