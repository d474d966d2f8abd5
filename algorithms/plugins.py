"""Policy servers and learners from outside the library, as `engine.kind` and `learner.kind` name
them. Does not import torch, so what does not fit is refused before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.config.infrastructure import ENGINES, LEARNERS
from agentrl.plugins import check_call, load_plugin

ENGINE, LEARNER = "engine.kind", "learner.kind"


def engine_factory(config: RunConfig) -> Any:
    """(config, model, tokenizer, adapters, name) -> PolicyServer, or None for the library's own.

    model: the one whose weights are trained in place, by `name` where there are no adapters.
    Raises ConfigError for what cannot be loaded or called like that."""
    factory = load_plugin("engines", config.engine.kind, ENGINES, Path(config.root), key=ENGINE)
    if factory is not None:
        check_call(factory, "config", "model", "tokenizer", "adapters", "name", key=ENGINE)
    return factory


def learner_factory(config: RunConfig) -> Any:
    """(config, algo, model, tokenizer, adapters, name) -> Learner, or None for the library's own.

    name: of the policy, and of its adapter where there are any. The learner keeps `model` up to
    date in place: the policy server reads it. Raises ConfigError as `engine_factory` does."""
    factory = load_plugin("learners", config.learner.kind, LEARNERS, Path(config.root), key=LEARNER)
    if factory is not None:
        check_call(factory, "config", "algo", "model", "tokenizer", "adapters", "name", key=LEARNER)
    return factory
