"""The policies of a run in memory: each a model, or an adapter on a model that several share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from agentrl import digests
from agentrl.algorithms.model.load import Tokenizer, load_model, vocabulary_size
from agentrl.algorithms.model.lora import Adapters
from agentrl.config import LoraConfig, RunConfig
from agentrl.config import policies as team
from agentrl.errors import ConfigError, PolicyError
from agentrl.files import atomic_directory
from agentrl.loading import load_attribute
from agentrl.processes import PHASE

log = logging.getLogger("agentrl.algorithm")


@dataclass(frozen=True, slots=True)
class Base:
    """A model, and the policies that are it or its adapters, as the run began with them."""

    source: str  # directory or hub name
    model: PreTrainedModel
    tokenizer: Tokenizer
    adapters: Adapters | None = None  # by the names of the policies; none: the model is the policy
    policies: list[str] = field(default_factory=list)
    built: bool = False  # just now, as the run file says


def load_bases(config: RunConfig) -> list[Base]:
    """The models of all policies of a run, each with the adapters that it has.

    Raises PolicyError for what cannot be loaded, or is an adapter of another model."""
    bases: dict[tuple[str, str], Base] = {}
    for name in (*team.trained(config), *team.frozen(config)):
        own = team.view(config, name)
        source, built = policy_directory(own)
        adapted = bool(own.policy.lora.rank or own.policy.lora.adapter)
        key = (source, "" if adapted else name)
        try:
            if key not in bases:
                bases[key] = load_base(source, config, adapted=adapted, built=built)
            bases[key].policies.append(name)
            add_adapter(bases[key].adapters, name, own)
        except PolicyError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise PolicyError(f"{where}{error}") from None
    return list(bases.values())


def load_base(source: str, config: RunConfig, *, adapted: bool, built: bool = False) -> Base:
    digests.check(Path(source))
    log.log(PHASE, f"loading the model {source}")
    model, tokenizer = load_model(source, config.policy.dtype, config.policy.device)
    adapters = Adapters(model) if adapted else None
    return Base(source, model, tokenizer, adapters, built=built)


def add_adapter(adapters: Adapters | None, name: str, config: RunConfig) -> None:
    """The adapter that the run file asks for, by the name of its policy; none: all weights are the
    policy's. A directory alone, without a rank, is one that stays as it is."""
    settings: LoraConfig = config.policy.lora
    if adapters is None:
        return
    if not settings.rank:
        adapters.open(name, config.path(settings.adapter))
        return
    adapters.add(
        name,
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
        seed=config.seed,
    )
    if settings.adapter:
        adapters.restore(name, adapters.read(name, config.path(settings.adapter)))


def policy_directory(config: RunConfig) -> tuple[str, bool]:
    """The model to start from, a local directory or a hub name, and whether it was built just now,
    as the run file says it is to be where there is none."""
    settings = config.policy
    directory = config.path(settings.model) if settings.model else Path(config.output, "policy")
    if not settings.build or directory.is_dir():
        return (str(directory) if directory.is_dir() else settings.model), False
    build = load_attribute(settings.build, Path(config.root), key="policy.build")
    if not callable(build):
        raise ConfigError(f"policy.build = {settings.build!r}: it is not a function")
    log.log(PHASE, f"building the model with {settings.build}")
    with atomic_directory(directory) as partial:
        try:
            build(partial, config.seed)
        except Exception as error:
            raise ConfigError(
                f"policy.build = {settings.build!r} raised {type(error).__name__}: {error}"
            ) from error
    return str(directory), True


def vocabulary(bases: Sequence[Base]) -> dict[str, int]:
    """How many token ids each policy has, by its name."""
    return {name: vocabulary_size(base.model) for base in bases for name in base.policies}
