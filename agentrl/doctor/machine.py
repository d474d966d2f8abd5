"""Checks of the machine that load no model. Without a run file, `config` has the defaults."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
import msgspec

from agentrl.core.access import read_sent_key
from agentrl.core.config import RunConfig
from agentrl.core.config.base import KindSection, field_types, structs_of
from agentrl.core.config.derived import has_no_own_policy
from agentrl.core.errors import ConfigError, NotFound, install_command
from agentrl.doctor import Status, run_check
from agentrl.store import open_store
from agentrl.store.urls import split_secret

DRIVER = Path("/proc/driver/nvidia")
TRIED = Path(__file__).with_name("tried.json")  # `make constraints` writes it
SHOWN = {"torch", "transformers", "peft", "bitsandbytes"}  # plus packages of learners and engines
GPU_PATHS = (
    "weight sync by ipc and nccl, vLLM's sleep, learner.offload, updates with policy.quantize, "
    "8-bit optimizers, learners other than torch with all of their settings"
)
GIB = 2**30
MAX_HEADER_BYTES = 100 * 2**20  # limit of the safetensors format
STORE_TIMEOUT = 15.0  # seconds for a store to answer
MAX_CLOCK_SKEW = 5.0  # seconds between two clocks


def packages(config: RunConfig) -> tuple[Status, str]:
    if lacking := config.learner.lacking or config.engine.lacking:
        return "fail", lacking
    types = field_types(RunConfig)
    kinds = (kind for table in ("learner", "engine") for kind in structs_of(types[table]))
    needed = {name for kind in kinds if issubclass(kind, KindSection) for name in kind.packages}
    installed = {
        f"{package.name} {package.version}"
        for package in distributions()
        if package.name in SHOWN | needed
    }
    return "ok", ", ".join((f"Python {platform.python_version()}", *sorted(installed)))


def versions(config: RunConfig) -> tuple[Status, str] | None:
    """Installed libraries that are newer than the newest version agentrl's tests have run with."""
    newer = {}
    for name, tried in msgspec.json.decode(TRIED.read_bytes(), type=dict[str, str]).items():
        with suppress(PackageNotFoundError):
            if _release(installed := version(name)) > _release(tried):
                newer[name] = installed, tried
    if not newer:
        return None
    listed = ", ".join(f"{name} {new} (tested: {old})" for name, (new, old) in newer.items())
    pins = " ".join(f"{name}=={old}" for name, (_, old) in newer.items())
    return "warn", (
        f"newer than the newest version tested with agentrl: {listed}; "
        f"if something fails, run `pip install {pins}`"
    )


def _release(text: str) -> tuple[int, ...]:
    """The release numbers of a version, without the zeros at their end: (2, 13) of 2.13.0+cpu."""
    release = re.match(r"v?(\d+!)?(\d+(\.\d+)*)", text)
    numbers = [int(part) for part in release[2].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def gpu(config: RunConfig) -> tuple[Status, str]:
    """Whether torch is installed and can use the machine's GPUs."""
    if find_spec("torch") is None:
        return "fail", f"torch is not installed; {install_command('train')}"
    import torch

    if torch.cuda.is_available():
        cards = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        return "warn", f"{cards}, not run on a GPU by agentrl's tests: {GPU_PATHS}; see the proofs"
    if not DRIVER.exists():
        return "ok", f"none: models are trained and served on {os.cpu_count()} cores"
    return "warn" if config.policy.device == "cpu" else "fail", (
        f"torch for CUDA {torch.version.cuda} cannot use it; update the driver, or install the "
        "torch for it (pytorch.org/get-started)"
    )


async def store(config: RunConfig) -> tuple[Status, str] | None:
    """Whether the store answers. Raises StoreError if another version of agentrl wrote it."""
    if not config.store:
        return None
    try:
        async with (
            asyncio.timeout(STORE_TIMEOUT),
            open_store(config.store, readonly=True) as opened,
        ):
            await opened.run(config.name)
    except NotFound:
        return "ok", "it will be created"
    except TimeoutError:
        return "fail", f"no answer within {STORE_TIMEOUT:g} s; start its server, or correct `store`"
    return "ok", "it answers"


def clock(config: RunConfig) -> tuple[Status, str] | None:
    """The difference between the clocks of this machine and a store server."""
    if not config.store.startswith("http"):
        return None
    with suppress(httpx.HTTPError, KeyError):
        answer = httpx.head(split_secret(config.store)[0], trust_env=False, timeout=STORE_TIMEOUT)
        ahead = time.time() - parsedate_to_datetime(answer.headers["date"]).timestamp()
        if abs(ahead) > MAX_CLOCK_SKEW:
            return "warn", f"{ahead:+.0f} s from the store's; synchronise both by NTP"
    return None


def disk(config: RunConfig) -> tuple[Status, str]:
    """Whether the disk has space for the checkpoints to keep, the best one and the one being
    written."""
    folder = Path(config.output or ".").absolute()
    while not folder.exists():
        folder = folder.parent
    free, files = shutil.disk_usage(folder).free, Path(config.model_path() or "?").glob("*.safe*")
    # Weights, two float32 moments and, for bfloat16, float32 master weights.
    width = 0 if config.policy.lora.rank else 12 if config.policy.dtype == "float32" else 14
    checkpoint = width * sum(map(_weights, files))
    needed = GIB // 10 + checkpoint * (config.keep_checkpoints + 2)
    sentence = f"{free / GIB:.1f} GiB free in {folder}, {needed / GIB:.1f} for checkpoints"
    fix = "free some, set another folder with output=, or lower keep_checkpoints"
    return ("ok", sentence) if free >= needed else ("fail", f"{sentence}; {fix}")


def _weights(file: Path) -> int:
    """The number of weights in a safetensors file, by its header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        tensors = msgspec.json.decode(opened.read(min(size, MAX_HEADER_BYTES)))
    return sum(prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")


def ports(config: RunConfig) -> tuple[Status, str] | None:
    """Whether the configured ports of this machine are free."""
    servers = {
        "engine": config.engine,
        "runner": config.runner if config.runner.processes else None,
    }
    if config.engine.kind != "embedded" or has_no_own_policy(config):
        servers.pop("engine")  # a vLLM child reports its own port
    for name, server in servers.items():
        if server is None or not server.port:
            continue
        try:
            family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
            socket.create_server((server.host, server.port), family=family).close()
        except OSError as error:
            where = f"{name}.port = {server.port} at {server.host}"
            return (
                "fail",
                f"{where}: {error.strerror}; set {name}.port to a free port, or 0 for any",
            )
    return None


def keys(config: RunConfig) -> tuple[Status, str] | None:
    """API keys in the environment. Raises ConfigError for a missing key or unusable certificate."""
    variables = {
        f"upstreams.{name}": upstream.key_env for name, upstream in config.upstreams.items()
    }
    variables |= config.engine.sent_keys
    for name, variable in variables.items():
        read_sent_key(variable, f"{name}.key_env", "the endpoint's")
    access = config.engine.access
    access.server_tls()
    names = [name for name, variable in variables.items() if variable]
    names += ["engine"] if access.keys else []
    return ("ok", f"the environment has the keys of {', '.join(names)}") if names else None


def proxies(config: RunConfig) -> tuple[Status, str] | None:
    """Upstreams for which the environment names a proxy: agentrl ignores it, agents' clients do
    not."""
    hosts = {urlsplit(upstream.base_url).netloc for upstream in config.upstreams.values()} - {""}
    outside = ", ".join(sorted(host for host in hosts if not proxy_bypass(host)))
    if not outside or not getproxies().keys() - {"no"}:
        return None
    return "warn", f"[upstreams] are called without the proxy; name in NO_PROXY {outside}"


AT_START = (keys, ports, clock, disk, proxies)
CHECKS = (packages, versions, gpu, store, *AT_START)


def check_at_start(config: RunConfig) -> Iterator[str]:
    """Warnings at the start of `agentrl train`. Raises ConfigError for failures. Needs no torch."""
    for finding in (finding for check in AT_START for finding in run_check(check, config)):
        if finding.status == "fail":
            raise ConfigError(f"{finding.sentence}; {finding.cure}")
        if finding.status == "warn":
            yield f"{finding.name}: {finding.sentence}; {finding.cure}"
