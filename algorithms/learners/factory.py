"""The learner that a run file asks for."""

from __future__ import annotations

import os
from typing import Any, Literal

from transformers import AutoTokenizer, PreTrainedModel

from agentrl.algorithms.learners import auxiliary
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.learners.implicit_reward import ImplicitTrainer
from agentrl.algorithms.learners.reference import check_vocabulary
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.learners.verl.learner import VerlLearner
from agentrl.algorithms.learners.verl.settings import settings
from agentrl.algorithms.model.cpu_threads import ThreadTuner, thread_tuner
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.plugins import learner_factory
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, PolicyError
from agentrl.plugins import check_protocol
from agentrl.types import POLICY


def make_learner(
    config: RunConfig,
    algo: Algo,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    start: str,
    adapters: Adapters | None = None,
    trainers: tuple[ImplicitTrainer, ...] = (),
    policy: str = POLICY,
) -> Learner:
    """A learner of `model`, which is loaded from `start`, or of its adapter `policy`; to be closed
    if it has a method `close`.

    Raises PolicyError for models it cannot load, ConfigError for settings that it cannot follow,
    where verl is asked for and missing, and for a plug-in that is no learner or lacks a stream."""
    if factory := learner_factory(config):
        return _from_plugin(factory, config, algo, model, tokenizer, adapters, policy)
    if config.learner.kind == "verl":
        if config.critic.model and config.critic.model != "copy":
            named = auxiliary.model_source(config, config.critic.model)
            _check_reads("critic.model", named, tokenizer)
        return VerlLearner(
            model,
            tokenizer,
            settings(config, start),
            adapters=adapters,
            policy=policy,
            frozen=_frozen(config, algo, tokenizer, start),
            every=config.reference.every,
        )
    return TorchLearner(
        model,
        tokenizer,
        critic=auxiliary.make_critic(config, model, tokenizer, start),
        frozen=auxiliary.make_frozen_models(config, algo, model, tokenizer, start),
        weight_decay=config.algorithm.weight_decay,
        max_grad_norm=config.algorithm.max_grad_norm,
        token_budget=config.learner.token_budget,
        packing=config.learner.packed,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        fp32_head=config.learner.fp32_head,
        optimizer=config.learner.optimizer,
        threads=_threads(config, model),
        adapters=adapters,
        policy=policy,
        trainers=trainers,
    )


def _from_plugin(
    factory: Any,
    config: RunConfig,
    algo: Algo,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    adapters: Adapters | None,
    policy: str,
) -> Learner:
    for name, section in config.reward_models.items():
        if section.train:
            raise ConfigError(
                f"reward_models.{name}.train: checkpoints of learner.kind = "
                f"{config.learner.kind!r} hold no reward model; leave it out"
            )
    learner: Learner = factory(config, algo, model, tokenizer, adapters, policy)
    check_protocol(learner, Learner, by=factory, key="learner.kind")
    optional = {"v": algo.critic, "k": algo.symbols, "e": algo.entropy}
    needed = algo.needs | {stream for stream, is_read in optional.items() if is_read}
    if missing := sorted(needed - learner.supplies):
        raise ConfigError(
            f"learner.kind = {config.learner.kind!r}: algorithm.preset = {algo.name!r} reads "
            f"{', '.join(missing)}, and the learner supplies {', '.join(sorted(learner.supplies))}"
        )
    return learner


def _threads(config: RunConfig, model: PreTrainedModel) -> ThreadTuner:
    """As many as the run file says, all cores, or what is measured."""
    number = config.learner.threads
    if number or model.device.type != "cpu":
        return ThreadTuner(number or os.cpu_count() or 1)
    return thread_tuner(model.num_parameters(), "training computes", os.cpu_count() or 1)


def _frozen(
    config: RunConfig, algo: Algo, tokenizer: Tokenizer, start: str
) -> dict[Literal["q", "t"], str]:
    """The models behind the streams that the algorithm reads, for the workers to load. The
    reference of an adapter is the model without it, unless the run file names another."""
    asked = {"q": ("reference", config.reference.model), "t": ("teacher", config.teacher.model)}
    names: dict[Literal["q", "t"], str] = {}
    for letter in auxiliary.FROZEN:
        section, given = asked[letter]
        if letter in algo.needs and (given or not config.policy.lora.rank):
            names[letter] = auxiliary.model_source(config, given) if given else start
            _check_reads(f"{section}.model", names[letter], tokenizer)
    return names


def _check_reads(key: str, name: str, tokenizer: Tokenizer) -> None:
    """Raises PolicyError unless the model reads the tokens of the policy."""
    try:
        own = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PolicyError(f"{key} = {name!r}: cannot be loaded: {reason}") from None
    check_vocabulary(key, name, own, tokenizer)
