"""`agentrl gateway serve`: the gateway in front of a deployed agent's model."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click
from msgspec.structs import replace

from agentrl.base.access import is_loopback
from agentrl.config import RunConfig, load
from agentrl.errors import ConfigError

READ = {"name", "root", "output", "store", "runner", "upstreams", "roles", "role_rules", "sessions"}


@click.group()
def gateway() -> None:
    """Serve the model API of a deployed agent."""


@gateway.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def serve(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Forward an agent's calls to [upstreams] of RUN_FILE and record its sessions, until SIGTERM.

    Users' feedback is posted to /v1/feedback; `agentrl data mine` makes data sets of both."""
    from agentrl.runners.sessions.recorder import serve as serve_sessions
    from agentrl.trainer import hide_secrets

    config = load(run_file, overrides)
    check(config)
    stop = asyncio.Event()

    async def until_signal() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_sessions(hide_secrets(config), started=click.echo, stop=stop)

    asyncio.run(until_signal())


def check(config: RunConfig) -> None:
    """Raises ConfigError for settings without effect, for missing or ambiguous upstreams, and for a
    public address without a key."""
    plain, host = RunConfig(), config.runner.host
    unread = [t for t in RunConfig.__struct_fields__ if getattr(config, t) != getattr(plain, t)]
    if left := [f"[{table}]" for table in unread if table not in READ]:
        raise ConfigError(f"{left[0]} has no effect on `agentrl gateway serve`; remove it")
    if replace(config.runner, host=plain.runner.host, port=0) != plain.runner:
        raise ConfigError("[runner]: `agentrl gateway serve` reads only host and port")
    if not config.upstreams or (len(config.upstreams) > 1 and not config.roles):
        raise ConfigError("set [upstreams.NAME], which answers; with several, set [roles] too")
    if not (is_loopback(host) or config.sessions.key_env):
        raise ConfigError(f"runner.host = {host!r}: anybody could call; set sessions.key_env")
