"""Loads the policies of a run: each is a model, or an adapter of a shared model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.algorithms.lora.loading import load_adapted
from agentrl.algorithms.model import digests
from agentrl.algorithms.model.adapters import Adapters
from agentrl.algorithms.model.load import Tokenizer, load_model, vocabulary_size
from agentrl.algorithms.train.checkpoint import parse_name
from agentrl.base.files import atomic_directory
from agentrl.base.loading import load_attribute
from agentrl.base.processes import log_phase
from agentrl.base.progress import still_at
from agentrl.config import LoraConfig, RunConfig
from agentrl.config.policies import frozen_policies, trained_policies, view
from agentrl.errors import ConfigError, PolicyError

log = logging.getLogger("agentrl.algorithm")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with the policies that it is, or that are adapters of it."""

    source: str  # directory or hub name
    model: PreTrainedModel
    tokenizer: Tokenizer
    adapters: Adapters | None = None  # named by policy; None: the model is the policy
    policies: list[str] = field(default_factory=list)
    built: bool = False  # whether policy.build or [warmup] has just made it


def load_policies(config: RunConfig) -> list[LoadedModel]:
    """Load the models of all policies of a run, with their adapters.

    Raises PolicyError for a model that cannot be loaded, and for an adapter of another model."""
    from agentrl.algorithms.demonstrations.warmup import warm_up  # which loads models, too

    bases: dict[tuple[str, str], LoadedModel] = {}
    for name in (*trained_policies(config), *frozen_policies(config)):
        own = view(config, name)
        source, built = policy_directory(own)
        built |= warm_up(own, source)
        source, lora = own.model_path(), own.initial_policy.lora
        adapted = bool(lora.rank or lora.adapter)
        key = (source, "" if adapted else name)
        try:
            if key not in bases:
                bases[key] = load_base_model(source, own, adapted=adapted, built=built)
            bases[key].policies.append(name)
            if adapters := bases[key].adapters:
                add_adapter(adapters, name, lora, own)
                if lora != own.policy.lora:
                    adapters.keep_reference(name)
        except PolicyError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise PolicyError(f"{where}{error}") from None
    return list(bases.values())


def load_base_model(
    source: str, config: RunConfig, *, adapted: bool, built: bool = False
) -> LoadedModel:
    digests.check(Path(source))
    log_phase(log, f"loading the model {source}")
    if adapted:
        return LoadedModel(source, *load_adapted(source, config), built=built)
    policy = config.policy
    model, tokenizer = load_model(source, policy.dtype, policy.device, config=config)
    return LoadedModel(source, model, tokenizer, built=built)


def add_adapter(adapters: Adapters, name: str, lora: LoraConfig, config: RunConfig) -> None:
    """Add the adapter of a policy. An adapter directory without a rank is loaded frozen."""
    if not lora.rank:
        adapters.open(name, config.path(lora.adapter))
        log_phase(log, adapters.coverage(name))
        return
    rank, alpha, targets = lora.rank, lora.alpha, lora.targets
    adapters.add(name, rank=rank, alpha=alpha, targets=targets, seed=config.seed)
    log_phase(log, adapters.coverage(name))
    if lora.adapter:
        adapters.restore(name, adapters.read(name, config.path(lora.adapter)))


def policy_directory(config: RunConfig) -> tuple[str, bool]:
    """The initial model, a local directory or a hub name, and whether `policy.build` has just built
    it, because there was none."""
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
    """The steps of the checkpoint that a run without steps of its own scores; 0: it scores none."""
    for name in [] if config.steps else trained_policies(config):
        policy = view(config, name).policy
        path = Path(policy.lora.adapter or policy.model)
        for folder in (path, path.parent):  # one of several policies has a folder in it
            found = parse_name(folder)
            if found and (folder / "state.json").is_file():
                return found[0]
    return 0


def vocabulary_sizes(bases: Sequence[LoadedModel]) -> dict[str, int]:
    """The vocabulary size by policy."""
    return {name: vocabulary_size(base.model) for base in bases for name in base.policies}
