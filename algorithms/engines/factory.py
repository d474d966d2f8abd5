"""Builds the policy server from `[engine]` of the run file."""

from __future__ import annotations

from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.load import Model, Tokenizer
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.plugins import engine_factory
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.plugins import check_protocol
from agentrl.types import POLICY


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
    if factory := engine_factory(config):
        server: PolicyServer = factory(config, model, tokenizer, adapters, name)
        check_protocol(server, PolicyServer, by=factory, key="engine.kind")
        return server
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
            keys=engine.kv_on_update if config.algorithm.samples_during_update else None,
            access=engine.access,
        )
    raise ConfigError(f"engine.kind = {engine.kind!r} is not served here")
