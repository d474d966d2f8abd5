"""Loading of a run's policies: each is a model, or an adapter of a shared model."""

from __future__ import annotations

import logging
from pathlib import Path

from agentrl.algorithms.train.checkpoint import parse_name
from agentrl.algorithms.train.policies import LoadedModel, add_adapter, load_base_model
from agentrl.algorithms.warmup import warm_up
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import (
    frozen_policies,
    initial_lora,
    trained_policies,
    view,
    warmup_folder,
)
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.core.files import atomic_directory, still_at
from agentrl.core.loading import load_attribute
from agentrl.core.processes import log_phase

log = logging.getLogger("agentrl.algorithm")


def load_policies(config: RunConfig) -> list[LoadedModel]:
    """Load the models of all policies of a run, with their adapters.

    Raises PolicyError for a model that cannot be loaded, and for an adapter of another model."""
    bases: dict[tuple[str, str], LoadedModel] = {}
    for name in (*trained_policies(config), *frozen_policies(config)):
        settings = view(config, name)
        source, built = policy_directory(settings)
        if settings.warmup.data and name in trained_policies(config):
            roles = config.policies[name].roles if config.policies else None
            built |= warm_up(settings, source, warmup_folder(config, name), roles)
        source, lora = settings.model_path(), initial_lora(config, name)
        adapted = bool(lora.rank or lora.adapter)
        key = (source, "" if adapted else name)
        try:
            if key not in bases:
                bases[key] = load_base_model(source, settings, adapted=adapted, built=built)
            bases[key].policies.append(name)
            if adapters := bases[key].adapters:
                add_adapter(adapters, name, lora, settings)
                if lora != settings.policy.lora:
                    adapters.keep_reference(name)
        except PolicyError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise PolicyError(f"{where}{error}") from None
    return list(bases.values())


def policy_directory(config: RunConfig) -> tuple[str, bool]:
    """The initial model, a local directory or a hub name, and whether `policy.build` has just built
    it."""
    settings = config.policy
    directory = config.path(settings.model) if settings.model else Path(config.output, "policy")
    if not settings.build or directory.is_dir():
        return (str(directory) if directory.is_dir() else settings.model), False
    build = load_attribute(settings.build, Path(config.root), key="policy.build")
    if not callable(build):
        raise ConfigError(f"policy.build = {settings.build!r}: it is not a function")
    log_phase(log, f"building the model with {settings.build}")
    with atomic_directory(directory) as partial, still_at(log, "building the model"):
        try:
            build(partial, config.seed)
        except Exception as error:
            raise ConfigError(
                f"policy.build = {settings.build!r} raised {type(error).__name__}: {error}"
            ) from error
    return str(directory), True


def evaluated_steps(config: RunConfig) -> int:
    """The step count of the checkpoint that an evaluation run scores; 0: it scores no
    checkpoint."""
    for name in [] if config.steps else trained_policies(config):
        policy = view(config, name).policy
        path = Path(policy.lora.adapter or policy.model)
        for folder in (path, path.parent):  # each of several policies has a subfolder
            checkpoint = parse_name(folder)
            if checkpoint and (folder / "state.json").is_file():
                return checkpoint[0]
    return 0
