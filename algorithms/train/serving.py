"""The policy servers of a run, which serve each policy, trained or frozen, under its name.

Owns one policy server for each model in memory; the adapters of a model share it. Invariant:
weights, versions and the set of served policies change only inside `updating`, when no call is in
flight (unless `algorithm.samples_during_update`); a policy that did not learn keeps its version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.algorithms.engines.base import PolicyServer, advertised_url, run_unless_failed
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.load import CONFIG, Adapters, Model
from agentrl.algorithms.plugins import engine_factory
from agentrl.algorithms.train.policies import LoadedModel, load_base_model
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import FrozenPolicy, view
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.core.files import atomic_directory
from agentrl.core.plugins import check_protocol
from agentrl.core.types import POLICY, PolicyVersion
from agentrl.store.base import Store


class PolicyServers:
    """The servers of one run."""

    def __init__(self, config: RunConfig, bases: Sequence[LoadedModel]) -> None:
        """bases: the loaded models, with their adapters. Raises PolicyError for a model that cannot
        be served."""
        engine = config.engine
        setting = engine.single_model_setting
        if len(bases) > 1 and setting:
            raise PolicyError(
                f"{setting} serve one model, and the policies have {len(bases)}; make them adapters"
                f" of one (policies.NAME.lora), or remove {setting}"
            )
        self._config = config
        self._servers: dict[str, PolicyServer] = {}  # policy -> its server
        self._versions: dict[str, int] = {}
        self._bases = list(bases)
        self._idle = 0.0  # seconds
        self._held_since: float | None = None  # time since which no call is in flight
        self._closing: list[PolicyServer] = []  # servers to close after their last call
        for number, base in enumerate(bases):
            server = _make_server(config, base, number)
            for name in base.policies:
                self._servers[name], self._versions[name] = server, 0
        self._in_flight = config.algorithm.samples_during_update
        if self._in_flight and not all(getattr(s, "in_flight", False) for s in self._distinct()):
            raise ConfigError(
                f"algorithm.async_sampling = {config.algorithm.async_sampling!r}: engine.kind = "
                f"{engine.kind!r} cannot change weights while calls run; use 'drained'"
            )

    async def start(self, frozen: int = 0) -> None:
        """Start all servers. frozen: further policies that will be served beside the loaded ones.
        Raises PolicyError if a port is taken, or a server does not start."""
        async with AsyncExitStack() as started:
            for server in self._distinct():
                if frozen and hasattr(server, "make_room"):
                    server.make_room(frozen)
                await server.start()
                started.push_async_callback(server.close)
            started.pop_all()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Context in which weights may change: no call is in flight, and new ones wait. With
        `algorithm.samples_during_update` calls continue, and changes happen between two steps."""
        try:
            async with AsyncExitStack() as stack:
                for server in () if self._in_flight else self._distinct():
                    await stack.enter_async_context(server.updating())
                self._held_since = None if self._in_flight else time.monotonic()
                yield
        finally:
            self._idle, self._held_since = self._held(), None
            while self._closing:
                server = self._closing.pop()
                async with server.updating():  # waits for the end of the server's calls
                    pass
                await server.close()

    def idle_seconds(self) -> float:
        """Seconds without calls because of updates, since the last call of this method."""
        idle, self._idle = self._held(), 0.0
        if self._held_since is not None:
            self._held_since = time.monotonic()
        return idle

    def _held(self) -> float:
        since = self._held_since
        return self._idle + (0.0 if since is None else time.monotonic() - since)

    async def publish(self, versions: Mapping[str, int]) -> None:
        """Serve the current weights of trained policies as these versions. Ignores policies with
        the same version as before, and those without a server. Call inside `updating`."""
        for name, version in versions.items():
            if self._versions.get(name, version) != version:
                await self._servers[name].publish(version, self._wire(name))
                self._versions[name] = version

    async def freeze(self, name: str, directory: Path, version: int) -> None:
        """Also serve the checkpoint of a model, or of an adapter of a served model, as `version` of
        policy `name`. Call inside `updating`.

        Raises PolicyError if the name is taken, or the checkpoint cannot be loaded."""
        if name in self._servers:
            raise PolicyError(f"{name!r} is served already; drop it first")
        if (directory / CONFIG).is_file():
            base = self._base_of(directory)
            assert base.adapters is not None
            base.adapters.open(name, directory)
            server = self._servers[base.policies[0]]
            await server.add(name, version)
        else:
            if self._config.engine.kind != "embedded":
                raise PolicyError(
                    f"{name!r}: engine.kind = {self._config.engine.kind!r} serves one model and "
                    "its adapters, and this is another one; train adapters (policy.lora.rank), or "
                    "set engine.kind = 'embedded'"
                )
            config, policy = self._config, name.partition("@")[0]
            settings = view(config, policy) if policy in config.policies else config
            base = await asyncio.to_thread(load_base_model, str(directory), settings, adapted=False)
            base.policies.append(name)
            # These weights never change.
            algorithm = replace(self._config.algorithm, async_sampling=None)
            server = _make_server(replace(self._config, algorithm=algorithm), base, 1)
            await server.start()
            await server.publish(version)
        self._servers[name], self._versions[name] = server, version

    async def serve_frozen(self, players: Mapping[str, FrozenPolicy]) -> None:
        """Also serve these frozen policies by their names. Call inside `updating`. Raises
        PolicyError for one that cannot be served."""
        for name, player in players.items():
            await self.freeze(name, self._weights_of(name, player), player.steps)

    async def drop(self, name: str) -> None:
        """Stop serving a frozen policy: later calls to it fail. Call inside `updating`."""
        server = self._servers.pop(name)
        del self._versions[name]
        if server not in self._distinct():
            self._closing.append(server)
            return
        await server.remove(name)
        for base in self._bases:
            if base.adapters is not None and name in base.adapters.names:
                base.adapters.close(name)

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; cancels it and raises PolicyError when a server has failed for good."""
        await run_unless_failed(work, self._distinct())

    def table(self) -> list[tuple[str, int, str, str]]:
        """(policy, version, base URL, model name at the server) of all served policies."""
        host = self._config.engine.advertise
        return [
            (name, self._versions[name], advertised_url(server.base_url, host), self._wire(name))
            for name, server in self._servers.items()
        ]

    async def announce(self, store: Store, run: str, epoch: int) -> None:
        """Write the version and address of each policy to the store, if they have changed."""
        stored = await store.policies(run)
        for name, version, base_url, model in self.table():
            row = PolicyVersion(
                run=run, policy=name, version=version, base_url=base_url, model=model
            )
            if stored.get(name) != row:
                await store.publish(row, epoch=epoch)

    async def close(self) -> None:
        """Stop all servers. May be called again."""
        for server in self._distinct():
            await server.close()

    def _distinct(self) -> list[PolicyServer]:
        return list(dict.fromkeys(self._servers.values()))

    def _wire(self, name: str) -> str:
        """The model name of a policy at its server; the server's own if this is its only policy."""
        server = self._servers[name]
        alone = sum(policy_server is server for policy_server in self._servers.values()) == 1
        return server.model if alone else name

    def _weights_of(self, name: str, player: FrozenPolicy) -> Path:
        """The directory of a frozen policy's weights. Writes an adapter that was never trained."""
        if player.directory:
            return Path(player.directory)
        base = next(base for base in self._bases if player.policy in base.policies)
        if base.adapters is None:
            raise PolicyError(
                f"{name}: {player.policy!r} is not an adapter, so it has no untrained version"
            )
        path = Path(self._config.output, "players", name)
        lora, seed = view(self._config, player.policy).policy.lora, self._config.seed
        base.adapters.add(name, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=seed)
        with atomic_directory(path) as partial:
            base.adapters.save(name, partial)
        base.adapters.close(name)
        return path

    def _base_of(self, directory: Path) -> LoadedModel:
        """The loaded model that an adapter was trained on, by the name in the adapter's files."""
        adapted = [base for base in self._bases if base.adapters is not None]
        if not adapted:
            raise PolicyError(
                f"{directory} is an adapter, and no policy of this run is; name a checkpoint of a "
                "whole model"
            )
        return next((b for b in adapted if b.adapters and b.adapters.fits(directory)), adapted[0])


def _make_server(config: RunConfig, base: LoadedModel, number: int) -> PolicyServer:
    """Build the policy server of a model. Servers other than number 0 get a free port and a
    separate folder."""
    if number:
        output = str(Path(config.output, "servers", str(number)))
        config = replace(config, engine=replace(config.engine, port=0), output=output)
    return policy_server(config, base.model, base.tokenizer, base.adapters, base.policies[0])


def policy_server(
    config: RunConfig,
    model: Model,
    tokenizer: Tokenizer,
    adapters: Adapters | None = None,
    name: str = POLICY,
) -> PolicyServer:
    """A policy server, not yet started, for the trained model (as policy `name`) or its adapters.

    Raises PolicyError for a model that it cannot serve, and for a missing vLLM."""
    engine = config.engine
    if engine.kind == "embedded":
        return EmbeddedServer(
            model,
            tokenizer,
            host=engine.host,
            port=engine.port,
            name=name,
            max_batch=engine.max_batch,
            max_context=engine.max_context,
            threads=engine.threads,
            adapters=adapters,
            in_flight=config.algorithm.samples_during_update,
            access=engine.access,
        )
    factory = engine_factory(config)
    server: PolicyServer = factory(config, model, tokenizer, adapters, name)
    check_protocol(server, PolicyServer, source=factory, key="engine.kind")
    return server
