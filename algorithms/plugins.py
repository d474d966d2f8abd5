"""Loading of policy servers (`engine.kind`) and learners (`learner.kind`). This module does not
import torch, so that errors in users' plug-ins are found before a run starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.core.config import RunConfig
from agentrl.core.config.infrastructure import ENGINES
from agentrl.core.plugins import check_call, load_plugin

ENGINE, LEARNER = "engine.kind", "learner.kind"


def engine_factory(config: RunConfig) -> Any:
    """A factory (config, model, tokenizer, adapters, name) -> PolicyServer, or None for built-in
    kinds.

    model: trained in place, and served as `name` if there are no adapters. Raises ConfigError for a
    factory that cannot be loaded or called with these arguments."""
    factory = load_plugin("engines", config.engine.kind, ENGINES, Path(config.root), key=ENGINE)
    if factory is not None:
        check_call(factory, "config", "model", "tokenizer", "adapters", "name", key=ENGINE)
    return factory


def learner_factory(kind: str, root: Path) -> Any:
    """The factory (config, algo, model, tokenizer, adapters, name) -> Learner of `learner.kind`.

    root: the run file's folder. name: of the policy, and of its adapter if it has one. The learner
    updates `model` in place, because the policy server reads it. Raises ConfigError as
    `engine_factory` does."""
    factory = load_plugin("learners", kind, (), root, key=LEARNER)
    check_call(factory, "config", "algo", "model", "tokenizer", "adapters", "name", key=LEARNER)
    return factory
