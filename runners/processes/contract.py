"""The interface of an agent process: its environment variables, its input and its result.

A program in any language finds in its environment `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` (the attempt's own key, valid only for model calls of this
attempt while it runs), `TRACEPARENT` (the attempt's trace), `OTEL_EXPORTER_OTLP_ENDPOINT` with its
headers, and `AGENTRL_TASK`, the task's input as JSON. The same JSON is on stdin and, on a shared
disk, in the file `AGENTRL_TASK_FILE`; an input larger than `LARGEST_VARIABLE` is only there. The
program writes its result to stdout, or to the file `AGENTRL_RESULT_FILE` if that is set (not in a
container): JSON if all of it parses and no integer has more than 64 bits, else text. Exit status 0
is success.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from agentrl.base import memory
from agentrl.base.access import is_loopback
from agentrl.base.jsonvalues import NotJsonError, as_json
from agentrl.base.model_clients import NO_TELEMETRY, model_variables
from agentrl.config import RunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners import executors
from agentrl.runners.executors import ExecutionResult
from agentrl.runners.executors.environment import KEYS, matching
from agentrl.runners.gateway.attribution import ActiveAttempt, AgentPlace
from agentrl.runners.scoring.results import LONGEST_TRACEBACK
from agentrl.types import ErrorKind, Failure, Json, Span

TASK, RESULT = "task.json", "result"  # files in the folder of one attempt
LARGEST_VARIABLE = 100_000  # bytes; Linux refuses variables above 128 KiB
LARGEST_PRINT = 2**20  # bytes printed by one rollout in the runner's log
PYTHON = ("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "*_PROXY")
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
MODEL = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "NO_PROXY", "no_proxy"),
    *(*KEYS, *NO_TELEMETRY),
)  # variables that the runner's own `environment` sets


def attempt_environment(
    active: ActiveAttempt, gateway: str, span: str, task: bytes
) -> dict[str, str]:
    """Return the variables of one attempt. `gateway`: its URL as seen by the process, ending in
    /v1. `span`: id of the parent for the process's spans. No `AGENTRL_TASK` if the task is too
    large for a variable."""
    return model_variables(gateway, active.key) | {
        "TRACEPARENT": f"00-{active.id}-{span}-01",
        "OTEL_EXPORTER_OTLP_ENDPOINT": gateway.removesuffix("/v1"),
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{active.key}",
        **task_variable(task),
    }


def task_variable(task: bytes) -> dict[str, str]:
    return {"AGENTRL_TASK": task.decode()} if len(task) <= LARGEST_VARIABLE else {}


def passed_environment(patterns: Iterable[str]) -> dict[str, str]:
    """Return the runner's variables that a process on this machine inherits."""
    return matching(os.environ, (*PASSED, *patterns))


def private_folders(home: str, repository: Path) -> dict[str, str]:
    """Return variables that keep a program in the folders of its attempt. PWD is included: a shell
    or wrapper may leave it stale, and some programs trust it."""
    own = {"CONFIG": "config", "DATA": "local/share", "STATE": "local/state", "CACHE": "cache"}
    xdg = {f"XDG_{name}_HOME": f"{home}/.{folder}" for name, folder in own.items()}
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
    """A private folder of one attempt with its task: the workspace's, or a temporary one."""
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
    """Base class: runs agents outside this process, each with its attempt's own key."""

    sealed = True
    limit: int | None = None

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        span, start, result, failure = secrets.token_hex(8), time.time_ns(), None, None
        try:
            result = await self._execute(active, span)
        except FailedAttemptError as error:
            failure = error.failure
        known: Any = {"id": span, "attempt": active.id, "name": "attempt", "kind": "agent"}
        end, ok = time.time_ns(), failure is None
        root = Span(**known, parent=None, start=start, end=end, ok=ok)
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
        raise FailedAttemptError(ErrorKind.AGENT, message, stderr[-LONGEST_TRACEBACK:])


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    known = -status in set(signal.Signals)
    name = signal.Signals(-status).name if known else f"signal {-status}"
    cause = memory.cause_of(status)
    return f"was killed by {name}" + (f", {cause}: {memory.FEWER}" if cause else "")


def too_large(where: str) -> FailedAttemptError:
    return FailedAttemptError(ErrorKind.AGENT, executors.too_large(where))
