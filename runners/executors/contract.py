"""What a process in any language is told about its rollout, and how it answers.

It finds in its environment `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`,
`ANTHROPIC_API_KEY` (the attempt's own key, worth nothing but model calls of this attempt while it
runs), `TRACEPARENT` (the attempt's trace), `OTEL_EXPORTER_OTLP_ENDPOINT` with the headers to use
it, and `AGENTRL_TASK`, the task's input as JSON. The same JSON is on stdin; an input larger than
`LARGEST_VARIABLE` is only there, and where there is a shared disk in the file that
`AGENTRL_TASK_FILE` names. It answers on stdout, or in the file that `AGENTRL_RESULT_FILE` names
when it is given one (a container is not) and writes it: JSON if the whole of it parses, else text.
Exit status 0 is success.
"""

from __future__ import annotations

import secrets
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from agentrl.addresses import is_loopback
from agentrl.config import RunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners.executors.environment import NO_TELEMETRY
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.scoring.results import LONGEST_TRACEBACK
from agentrl.types import ErrorKind, Failure, Json, Span

TASK, RESULT = "task.json", "result"  # in the folder of one attempt
LARGEST_VARIABLE = 100_000  # bytes; Linux refuses variables above 128 KiB
LARGEST_RESULT = 16 * 2**20  # bytes
LARGEST_PRINT = 2**20  # bytes of one rollout in the runner's log
PYTHON = ("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "*_PROXY")
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")


def attempt_environment(active: ActiveAttempt, gateway: str, span: str) -> dict[str, str]:
    """The environment of one attempt; `gateway` is the URL that ends in /v1 as the process sees
    it, `span` the span id its own spans hang from."""
    root = gateway.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": gateway,
        "OPENAI_API_BASE": gateway,
        "OPENAI_API_KEY": active.key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": active.key,
        **NO_TELEMETRY,
        "TRACEPARENT": f"00-{active.id}-{span}-01",
        "OTEL_EXPORTER_OTLP_ENDPOINT": root,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{active.key}",
    }


def task_variable(task: bytes) -> dict[str, str]:
    """Nothing when it is too large, and when no variable can hold it."""
    small = len(task) <= LARGEST_VARIABLE
    return {"AGENTRL_TASK": task.decode()} if small else {}


@contextmanager
def task_folder(task: bytes) -> Iterator[Path]:
    """A folder of one attempt, with its task in it."""
    with tempfile.TemporaryDirectory(prefix="agentrl-", ignore_cleanup_errors=True) as name:
        Path(name, TASK).write_bytes(task)
        yield Path(name)


def passed_environment(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """What a process of this machine sees of the runner's own environment."""
    return matching(environment, (*PASSED, *patterns))


def matching(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    wanted = tuple(patterns)
    return {k: v for k, v in environment.items() if any(fnmatch(k, p) for p in wanted)}


def reachable_url(base_url: str, runner: RunnerConfig, host: str) -> str:
    """The gateway's URL as others than this machine's processes see it; `host` is how they call
    this machine unless the run file says otherwise.

    Raises ConfigError where the gateway only listens to this machine."""
    if is_loopback(runner.host):
        raise ConfigError(
            f"runner.host = {runner.host!r}: a {runner.executor} cannot reach the gateway there;"
            " set it to '0.0.0.0', or to the address of the network they share"
        )
    host = runner.advertise or host
    if not host:
        raise ConfigError("runner.advertise is missing: how do the jobs call this machine?")
    return f"http://{f'[{host}]' if ':' in host else host}:{urlsplit(base_url).port}/v1"


def parse_result(text: str) -> Json:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text.strip()


def exit_failure(status: int, stderr: str) -> Failure | None:
    """Why the process failed, if it did: its last words, and on which of them it ended."""
    if status == 0:
        return None
    how = describe_exit(status)
    last = stderr.strip().rpartition("\n")[2].strip()
    message = f"the agent {how}: {last}" if last else f"the agent {how}"
    return Failure(kind=ErrorKind.AGENT, message=message, traceback=stderr[-LONGEST_TRACEBACK:])


def describe_exit(status: int) -> str:
    return (
        f"ended with exit status {status}" if status >= 0 else f"was killed by {_signal(-status)}"
    )


def too_large(where: str) -> Failure:
    message = f"the agent wrote more than {LARGEST_RESULT} bytes to {where}"
    return Failure(kind=ErrorKind.AGENT, message=message)


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class RootSpan:
    """The span that stands for a whole attempt, where the agent runs elsewhere."""

    def __init__(self, active: ActiveAttempt) -> None:
        self.id, self._active, self._start = secrets.token_hex(8), active, time.time_ns()

    def ended(self, *, ok: bool) -> Span:
        return Span(
            id=self.id,
            attempt=self._active.id,
            parent=None,
            name="attempt",
            kind="agent",
            start=self._start,
            end=time.time_ns(),
            ok=ok,
        )
