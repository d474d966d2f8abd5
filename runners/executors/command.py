"""The command executor: a process for each attempt, in any language, and the interface of agents.

A program finds in its environment `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`,
`ANTHROPIC_API_KEY`, `GOOGLE_GEMINI_BASE_URL`, `GEMINI_API_KEY` (the attempt's own key, valid only
for model calls of this attempt while it runs), `TRACEPARENT` (the attempt's trace),
`OTEL_EXPORTER_OTLP_ENDPOINT` with its headers, and `AGENTRL_TASK`, the task's input as JSON. The
same JSON is on stdin and, on a shared disk, in the file `AGENTRL_TASK_FILE`; an input larger than
`MAX_VARIABLE_BYTES` is only there. The program writes its result to stdout, or to the file
`AGENTRL_RESULT_FILE` if that is set (not in a container): JSON if all of it parses and no integer
has more than 64 bits, else text. Exit status 0 is success. Agents in Python create their model
clients from the same variables (`environment`).

Owns: the template process and the sockets to it and to every supervisor (`supervisor.py`).
Invariant: all processes of an attempt end with it. If this process is killed, the kernel closes the
sockets, and each supervisor kills its process.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec
from msgspec.structs import replace

from agentrl.core import processes
from agentrl.core.access import is_loopback
from agentrl.core.config import AgentConfig, RunnerConfig
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.loading import KEY, NO_TELEMETRY, model_variables
from agentrl.core.types import ErrorKind, Failure, Json, Span
from agentrl.core.values import NotJsonError, as_json
from agentrl.runners import executors
from agentrl.runners.executors import ExecutionResult, input_of, out_of_time, supervisor
from agentrl.runners.executors.supervisor import HEADER, ProcessSpec
from agentrl.runners.gateway.attribution import ActiveAttempt, AgentPlace
from agentrl.runners.scoring import MAX_TRACEBACK_CHARS

LOCAL = "127.0.0.1,localhost"
VARIABLE = re.compile(r"""\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b|(?<=['"])[A-Z][A-Z0-9]+(?=['"])""")
# Credentials that model clients read. The agent keeps credentials of tools.
KEYS = (
    *("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    *("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AZURE_API_KEY", "AZURE_AI_API_KEY"),
    *("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GENERATIVE_AI_API_KEY", "MISTRAL_API_KEY"),
    *("GROQ_API_KEY", "TOGETHER_API_KEY", "TOGETHERAI_API_KEY", "FIREWORKS_API_KEY"),
    *("DEEPSEEK_API_KEY", "OPENROUTER_API_KEY", "XAI_API_KEY", "COHERE_API_KEY", "CO_API_KEY"),
    *("PERPLEXITY_API_KEY", "PERPLEXITYAI_API_KEY", "CEREBRAS_API_KEY", "MOONSHOT_API_KEY"),
    *("DASHSCOPE_API_KEY", "NVIDIA_API_KEY", "AWS_BEARER_TOKEN_BEDROCK", "LITELLM_API_KEY"),
)
# Names of variables that belong to an API key.
ACCOUNT = ("OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID")


@contextmanager
def environment(base_url: str, keep: Sequence[str] = ()) -> Iterator[None]:
    """Point model clients that are created inside the block at `base_url`, which ends in /v1, and
    replace the user's model API keys, except variables that match a pattern of `keep`. Restores the
    environment at the end.

    Clients read these variables when they are created, usually on import of the agent's module, so
    enter the block before that. A client of another API gets no valid key."""
    kept = matching(os.environ, keep)
    changed: dict[str, str | None] = {**model_variables(base_url, KEY, kept)}
    replaceable = os.environ.keys() - kept.keys()
    changed |= {name: KEY for name in KEYS if name in replaceable}
    changed |= {name: None for name in ACCOUNT if name in replaceable}
    if getproxies().keys() - {"no"}:  # the gateway is never reached through a proxy
        for name in ("NO_PROXY", "no_proxy"):
            value = os.environ.get(name)
            changed[name] = f"{value},{LOCAL}" if value else LOCAL
    before = {name: os.environ.get(name) for name in changed}
    _set(changed)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def withheld(text: str, variables: Mapping[str, str]) -> str:
    """A hint for an error message of a process that has these `variables`, if the message names
    variables that only the runner has; else empty."""
    missing = {
        name for name in VARIABLE.findall(text) if name in os.environ and name not in variables
    }
    names = sorted(name for name in missing if not name.startswith("AGENTRL_"))
    if not names:
        return ""
    return (
        f"; the runner has {', '.join(names)} and the agent's process does not: set"
        f" agent.pass_env = {json.dumps(names)}"
    )


def explained(failure: Failure, variables: Mapping[str, str]) -> Failure:
    """The failure of an agent whose process has these `variables`, with a hint about missing
    ones."""
    return replace(failure, message=failure.message + withheld(failure.message, variables))


def matching(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match any of the patterns."""
    wanted = tuple(patterns)
    return {k: v for k, v in environment.items() if any(fnmatchcase(k, p) for p in wanted)}


TASK, RESULT = "task.json", "result"  # files in the folder of one attempt
MAX_VARIABLE_BYTES = 100_000  # bytes; Linux refuses variables above 128 KiB
MAX_PRINTED_BYTES = 2**20  # bytes printed by one rollout in the runner's log
PYTHON = ("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "*_PROXY")
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
MODEL = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"),
    *("GEMINI_API_BASE", "NO_PROXY", "no_proxy", *KEYS, *NO_TELEMETRY),
)  # variables that the runner's own `environment` sets


def attempt_environment(
    active: ActiveAttempt, gateway: str, span: str, task: bytes, given: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables of one attempt. `gateway`: its URL as seen by the process, ending in
    /v1. `span`: id of the parent for the process's spans. `given`: names of the user's own
    variables. No `AGENTRL_TASK` if the task is too large for a variable."""
    return model_variables(gateway, active.key, given) | {
        "TRACEPARENT": f"00-{active.id}-{span}-01",
        "OTEL_EXPORTER_OTLP_ENDPOINT": gateway.removesuffix("/v1"),
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{active.key}",
        **task_variable(task),
    }


def task_variable(task: bytes) -> dict[str, str]:
    return {"AGENTRL_TASK": task.decode()} if len(task) <= MAX_VARIABLE_BYTES else {}


def passed_environment(patterns: Iterable[str]) -> dict[str, str]:
    """Return the runner's variables that a process on this machine inherits."""
    return matching(os.environ, (*PASSED, *patterns))


def private_folders(home: str, repository: Path) -> dict[str, str]:
    """Return variables that keep a program in the folders of its attempt. PWD is included: a shell
    or wrapper may leave it stale, and some programs trust it."""
    folders = {"CONFIG": "config", "DATA": "local/share", "STATE": "local/state", "CACHE": "cache"}
    xdg = {f"XDG_{name}_HOME": f"{home}/.{folder}" for name, folder in folders.items()}
    return {"HOME": home, "PWD": str(repository)} | xdg


def reachable_url(base_url: str, runner: RunnerConfig, host: str) -> str:
    """Return the gateway's URL as seen from outside this machine. `host`: default of
    `runner.advertise`, this machine's name there.

    Raises ConfigError if the gateway listens on loopback only."""
    if is_loopback(runner.host):
        raise ConfigError(
            f"runner.host = {runner.host!r}: a {runner.executor} cannot reach the gateway there;"
            " set it to '0.0.0.0', or to the address of the network they share"
        )
    host = runner.advertise or host
    if not host:
        raise ConfigError("runner.advertise is missing: set this machine's address for the jobs")
    return f"http://{f'[{host}]' if ':' in host else host}:{urlsplit(base_url).port}/v1"


@contextmanager
def task_folder(task: bytes, place: AgentPlace | None = None) -> Iterator[Path]:
    """A private folder of one attempt with its task file: in the workspace, or temporary."""
    if place is not None:
        try:
            Path(place.private, TASK).write_bytes(task)
            place.give(place.private)
        except OSError as error:
            message = f"cannot write to the workspace: {error.strerror}"
            raise FailedAttemptError(ErrorKind.WORKSPACE, message) from None
        yield place.private
        return
    with tempfile.TemporaryDirectory(prefix="agentrl-", ignore_cleanup_errors=True) as name:
        Path(name, TASK).write_bytes(task)
        yield Path(name)


class FailedAttemptError(Exception):
    """Raised to end an attempt of a `SandboxExecutor` with a failure."""

    def __init__(self, kind: ErrorKind, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, traceback=traceback)


class SandboxExecutor:
    """Base class of executors that run agents outside of this process, each with its attempt's
    key."""

    sealed = True
    limit: int | None = None

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        span, start, result, failure = secrets.token_hex(8), time.time_ns(), None, None
        try:
            result = await self._execute(active, span)
        except FailedAttemptError as error:
            failure = error.failure
        fields: Any = {"id": span, "attempt": active.id, "name": "attempt", "kind": "agent"}
        end, ok = time.time_ns(), failure is None
        root = Span(**fields, parent=None, start=start, end=end, ok=ok)
        return ExecutionResult(result=result, failure=failure, spans=[root])

    async def _execute(self, active: ActiveAttempt, span: str) -> Json:
        """Return the agent's result. `span`: id of the attempt's root span.

        Raises FailedAttemptError."""
        raise NotImplementedError


def parse_result(text: str) -> Json:
    """Decode a text as JSON; return it stripped if it does not parse, or if the store cannot keep
    its numbers: 2**70 in the answer of a language model is text."""
    try:
        return as_json(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError, NotJsonError):
        return text.strip()


def check_exit(status: int, stderr: str) -> None:
    """Raise FailedAttemptError for a process that failed, with its exit status and last line."""
    if status:
        how, last = describe_exit(status), stderr.strip().rpartition("\n")[2].strip()
        message = f"the agent {how}: {last}" if last else f"the agent {how}"
        raise FailedAttemptError(ErrorKind.AGENT, message, stderr[-MAX_TRACEBACK_CHARS:])


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    is_named = -status in set(signal.Signals)
    name = signal.Signals(-status).name if is_named else f"signal {-status}"
    cause = processes.cause_of(status)
    return f"was killed by {name}" + (f", {cause}: {processes.RUNNER_MEMORY_HINT}" if cause else "")


def too_large(where: str) -> FailedAttemptError:
    return FailedAttemptError(ErrorKind.AGENT, executors.too_large(where))


# A process with few imports, because it is forked for every command.
SUPERVISOR = ("-I", "-S", supervisor.__file__)


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
    """A process that exchanges messages with this one."""

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
        processes.kill_watch()
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

        Raises SupervisorLost if the template and its replacement have died; OSError if this process
        has too many open files."""
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
        """Start a process whose descriptor 3 is a socket to this one. printed: maximum bytes of
        output that are copied, see `LogPipe`. Raises as `launch` does."""
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
        self._limit, self._remaining = limit, limit

    def reset(self) -> None:
        self._remaining = self._limit

    def data_received(self, data: bytes) -> None:
        if self._remaining <= 0:
            return
        sys.stderr.write(data[: self._remaining].decode(errors="replace"))
        self._remaining -= len(data)
        if self._remaining <= 0:
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


MB = 2**20


class CommandExecutor(SandboxExecutor):
    """Starts `agent.command` for each attempt.

    `runner.memory_mb` limits the data segment of each process (RLIMIT_DATA); a limit on their sum
    needs a container."""

    def __init__(
        self, agent: AgentConfig, runner: RunnerConfig, *, root: Path, gateway: str
    ) -> None:
        """`root`: the run file's folder. `gateway`: base URL for agents on this machine."""
        self.argv = shlex.split(agent.command) if isinstance(agent.command, str) else agent.command
        self.folder = root / agent.folder
        self.agent, self.runner, self.gateway = agent, runner, gateway
        self._launcher = ProcessLauncher(env=passed_environment(agent.pass_env))

    async def start(self) -> None:
        """Raise ConfigError if the command cannot be started in its folder."""
        if not self.argv:
            raise ConfigError("agent.command is missing: write it as a list or a shell-like string")
        if not self.folder.is_dir():
            raise ConfigError(f"agent.folder: there is no folder {self.folder}")
        program = self.argv[0]
        if not ((self.folder / program).is_file() if "/" in program else shutil.which(program)):
            raise ConfigError(f"agent.command: there is no program {program!r} on this machine")
        await self._launcher.start()

    async def close(self) -> None:
        await self._launcher.close()

    async def _execute(self, active: ActiveAttempt, span: str) -> Json:
        task = msgspec.json.encode(input_of(active))
        with task_folder(task, active.place) as folder:
            spec = self._spec(active, span, task, folder)
            ended = await self._run_process(active, spec, folder)
            try:
                return self._read(folder, *ended)
            except FailedAttemptError as error:
                error.failure = explained(error.failure, spec["env"])
                raise

    def _spec(self, active: ActiveAttempt, span: str, task: bytes, folder: Path) -> ProcessSpec:
        env = passed_environment(self.agent.pass_env) | self.agent.env
        env |= attempt_environment(active, self.gateway, span, task, env)
        env["AGENTRL_TASK_FILE"] = str(folder / TASK)
        env["AGENTRL_RESULT_FILE"] = str(folder / RESULT)
        works_in, home = self.folder, folder / "home"
        if (place := active.place) is not None:
            works_in, home = place.folder, Path(place.env["HOME"])
            env |= {**place.env, "AGENTRL_ROOT": str(self.folder)} | self.agent.env
        argv = self._command(active, env, home, works_in)
        if place is not None:
            place.give(home)
            argv = [*place.prefix, *argv]
        spec = ProcessSpec(argv=argv, env=env, folder=str(works_in))
        if self.runner.memory_mb:
            spec["memory"] = self.runner.memory_mb * MB
        return spec

    def _command(
        self, active: ActiveAttempt, env: dict[str, str], home: Path, works_in: Path
    ) -> list[str]:
        """Return the command line of an attempt, and add to its variables. `home`: a separate HOME,
        if any. `works_in`: the working directory."""
        return self.argv

    async def _run_process(
        self, active: ActiveAttempt, spec: ProcessSpec, folder: Path, stdin: int | None = None
    ) -> tuple[int, str, str]:
        """Return exit status, stdout and the end of stderr. All descendants of the process are
        killed at its end and on cancellation. If the runner is killed, `folder`, which contains the
        task, is deleted, too. `stdin`: a file descriptor, if not the task.

        Raises FailedAttemptError if the process had to be killed."""
        spec["remove"] = str(folder)
        stdout = OutputPipe(executors.MAX_RESULT_BYTES)
        stderr = OutputPipe(MAX_TRACEBACK_CHARS, tail=True)
        if stdin is None:
            # A harness has its prompt as an argument, and would append its stdin to it.
            path = os.devnull if self.agent.harness else folder / TASK
            stdin = os.open(path, os.O_RDONLY)
        fds = [stdin, await stdout.open(), await stderr.open()]
        try:
            process = await self._launcher.launch(spec, fds)
            try:
                async with asyncio.timeout(active.left):
                    status = await process.wait()
                    if active.left <= 0:  # the event loop was blocked
                        raise TimeoutError
            except (TimeoutError, asyncio.CancelledError):
                late = out_of_time(active)
                process.kill()
                with suppress(SupervisorLost):
                    await process.wait()
                raise
        except SupervisorLost as lost:
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, str(lost)) from None
        except TimeoutError:
            raise FailedAttemptError(late.kind, late.message, await stderr.text()) from None
        if stdout.cut:
            raise too_large("stdout")
        return status, await stdout.text(), await stderr.text()

    def _read(self, folder: Path, status: int, stdout: str, stderr: str) -> Json:
        """Return the result of a process that exited. Raises FailedAttemptError."""
        # Harnesses print errors to stdout, among much else.
        printed = stdout.splitlines() if self.agent.harness else ()
        words = (line for line in printed if "error" in line.lower())
        check_exit(status, "\n".join([stderr, *words]))
        try:
            if folder.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            with open(folder / RESULT, errors="replace", opener=_open_no_link) as file:
                size = os.fstat(file.fileno()).st_size
                if size > executors.MAX_RESULT_BYTES:
                    raise too_large("its result file")
                if size:
                    stdout = file.read()
        except FileNotFoundError:
            pass  # the result is on stdout
        except OSError as error:  # the agent replaced its file or folder
            message = f"the agent's result file cannot be read: {error.strerror}"
            raise FailedAttemptError(ErrorKind.AGENT, message) from None
        return parse_result(stdout)


def _open_no_link(path: str, flags: int) -> int:
    """Open a file without following links, which may point to files that only the runner can read,
    such as expected answers, and without blocking on a named pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
