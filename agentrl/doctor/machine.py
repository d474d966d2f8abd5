"""Checks of the machine that load no model. Without a run file `config` is the default one."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from agentrl.config import RunConfig, VerlLearnerConfig, VllmEngineConfig, agent_env, store_in
from agentrl.doctor import Status, run_check
from agentrl.errors import ConfigError, NotFound
from agentrl.runners.gateway.routing import frozen_route
from agentrl.store import open_store
from agentrl.store.urls import split_secret
from agentrl.threads import run_blocking

DRIVER = Path("/proc/driver/nvidia")
SHOWN = {"torch", "transformers", "vllm", "verl", "ray", "flash-attn", "peft", "bitsandbytes"}
GPU_PATHS = "tree attention, weight sync by ipc and nccl, 8-bit optimizers, verl's workers"
GIB = 2**30
ANSWER = 15.0  # seconds in which a store must answer
SKEW = 5.0  # seconds between two clocks


def packages(config: RunConfig) -> tuple[Status, str]:
    """Raises PolicyError where vLLM is asked for and missing or too old."""
    if isinstance(config.engine, VllmEngineConfig) and not config.engine.vllm.urls:
        from agentrl.algorithms.engines.vllm.process import check_installed

        check_installed()
    verl = config.learner if isinstance(config.learner, VerlLearnerConfig) else None
    if verl and verl.verl.attention != "sdpa" and find_spec("flash_attn") is None:
        return "fail", "no flash attention; set learner.verl.attention=sdpa, or install flash-attn"
    found = {f"{each.name} {each.version}" for each in distributions() if each.name in SHOWN}
    return "ok", ", ".join((f"Python {platform.python_version()}", *sorted(found)))


def gpu(config: RunConfig) -> tuple[Status, str]:
    """Whether torch is there and can use the GPUs that are there."""
    if find_spec("torch") is None:
        return "fail", "torch is not installed; pip install 'agentrl[train]'"
    import torch

    if torch.cuda.is_available():
        card, cards = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        return "warn", (
            f"{cards} {card.name} of {card.total_memory / GIB:.0f} GiB. Not run on a GPU by "
            f"agentrl's own tests: {GPU_PATHS}; rely on what the proofs below show here"
        )
    if not DRIVER.exists():
        return "ok", f"none: models are trained and served on {os.cpu_count()} cores"
    return "warn" if config.policy.device == "cpu" else "fail", (
        f"torch for CUDA {torch.version.cuda} cannot use this machine's GPU; update its driver, or "
        "install the torch for it (pytorch.org/get-started)"
    )


def store(config: RunConfig) -> tuple[Status, str] | None:
    """Raises StoreError for a store that does not answer, or is of another version."""
    new = not Path(config.output).exists()
    if not config.store or (new and config.store == store_in(Path(config.output))):
        return None

    async def ask() -> None:
        async with asyncio.timeout(ANSWER), open_store(config.store, readonly=True) as opened:
            await opened.run(config.name)

    try:
        run_blocking(ask())
    except NotFound:
        return "ok", "an empty database, in which it will be made"
    except TimeoutError:
        return "fail", f"no answer within {ANSWER:g} s; start its server, or correct `store`"
    return "ok", "it answers"


def clock(config: RunConfig) -> tuple[Status, str] | None:
    """This machine's clock against that of the store's server; a file has this machine's."""
    server = None
    if config.store.startswith("http"):
        with suppress(httpx.HTTPError, KeyError):
            answer = httpx.head(split_secret(config.store)[0], trust_env=False, timeout=ANSWER)
            server = parsedate_to_datetime(answer.headers["date"]).timestamp()
    elif config.store.startswith("postgres") and find_spec("psycopg"):
        import psycopg

        with suppress(psycopg.Error), psycopg.connect(config.store, connect_timeout=15) as conn:
            query = "select extract(epoch from clock_timestamp())::float8"
            (server,) = conn.execute(query).fetchone() or (None,)
    if server is None or abs(ahead := time.time() - server) < SKEW:
        return None
    return "warn", (
        f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the store's, so times do not "
        "fit together and keys expire early or late; synchronise both by NTP"
    )


def ports(config: RunConfig) -> None:
    """Raises ConfigError for a port that another process has."""
    for key, own in (("engine", config.engine), ("runner", config.runner)):
        family = socket.AF_INET6 if ":" in own.host else socket.AF_INET
        try:
            if own.port:
                socket.create_server((own.host, own.port), family=family).close()
        except OSError as error:
            raise ConfigError(
                f"{key}.port = {own.port}: {error.strerror}; set it to a free one, or 0 for any"
            ) from None


def disk(config: RunConfig) -> tuple[Status, str]:
    """Room for the checkpoints that are kept, and one that is written."""
    folder = Path(config.output or ".").absolute()
    while not folder.exists():
        folder = folder.parent
    free, needed = shutil.disk_usage(folder).free, GIB // 10
    if not config.policy.lora.rank:
        # Weights, two float32 moments and, of bfloat16, a float32 master weight.
        times = 3 if config.policy.dtype == "float32" else 7
        files = Path(config.model_path() or "none").glob("*.safetensors")
        needed += times * sum(f.stat().st_size for f in files) * (config.keep_checkpoints + 1)
    sentence = f"{free / GIB:.1f} GiB free in {folder}, {needed / GIB:.1f} for checkpoints"
    cure = "free some, name another folder by output=, or lower keep_checkpoints"
    return ("ok", sentence) if free >= needed else ("fail", f"{sentence}; {cure}")


def proxies(config: RunConfig) -> tuple[Status, str] | None:
    """Upstreams are called directly, whatever the proxy; agents' clients use it."""
    hosts = {urlsplit(each.base_url).netloc for each in config.upstreams.values()} - {""}
    outside = ", ".join(sorted(host for host in hosts if not proxy_bypass(host)))
    if not outside or not getproxies().keys() - {"no"}:
        return None
    return "warn", f"[upstreams] are called without the proxy; name in NO_PROXY {outside}"


def keys(config: RunConfig) -> None:
    """Raises ConfigError for a variable that has no value where runners are started."""
    if config.runner.processes:
        agent_env.with_values(config)
        for name, upstream in config.upstreams.items():
            frozen_route(name, upstream)


AT_START = (clock, ports, disk, proxies, keys)
CHECKS = (packages, gpu, store, *AT_START)


def check_at_start(config: RunConfig) -> list[str]:
    """What `agentrl train` warns of; it does not import torch. Raises ConfigError for the first
    check that fails."""
    warnings = []
    for finding in (each for check in AT_START for each in run_check(check, config)):
        if finding.status == "fail":
            raise ConfigError(f"{finding.sentence}; {finding.cure}")
        if finding.status == "warn":
            warnings.append(f"{finding.sentence}; {finding.cure}")
    return warnings
