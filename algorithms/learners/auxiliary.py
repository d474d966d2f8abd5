"""The models beside the policy that the run file asks for: critic, reference, teacher, rewards.

What an algorithm does not read is not loaded, and what is configured for nothing is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

import msgspec
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.learners.critic import ValueModel
from agentrl.algorithms.learners.implicit_reward import ImplicitTrainer
from agentrl.algorithms.learners.reference import Reference, load_auxiliary
from agentrl.algorithms.learners.reward_models import (
    ImplicitScorer,
    RewardModel,
    ScalarScorer,
    Scorer,
    load_scalar,
)
from agentrl.algorithms.model.load import Tokenizer, context_length
from agentrl.algorithms.model.packing import check_model, supported_packing
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.kl_control import KlController, make_kl_controller
from agentrl.algorithms.presets.registry import Supply
from agentrl.config import RunConfig, Section
from agentrl.config.schema import MODEL_LR
from agentrl.errors import ConfigError
from agentrl.types import Scope

FROZEN: Final[tuple[Literal["q", "t"], ...]] = ("q", "t")  # streams of models that do not learn
HEAD_STEP = 0.05  # of a shared one, over its width: AdamW moves a value by the sum over all of it
FrozenModels = dict[Literal["q", "t"], Reference]


def available_streams(config: RunConfig) -> frozenset[Supply]:
    """The streams that a run can give its algorithm. A reference is always to be had: what the
    policy began as."""
    streams: set[Supply] = {"o", "b", "q"}
    if config.learner.kind != "verl":  # what a plug-in lacks is refused once it is made
        streams |= {"k", "e"}
    if config.critic.model:
        streams.add("v")
    if config.teacher.model:
        streams.add("t")
    return frozenset(streams)


def refuse_unused_settings(config: RunConfig, algo: Algo) -> None:
    """Raises ConfigError for a setting that could not matter."""
    for key, why in _unused_settings(config, algo):
        raise ConfigError(f"{key} is set, {why}; leave it out")


def make_critic(
    config: RunConfig, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> ValueModel | None:
    """The critic of a run, if it has one. start: what the policy began as.

    Raises PolicyError for a model that cannot be loaded or reads other tokens."""
    settings = config.critic
    if not settings.model:
        return None
    decoder, width = None, policy.config.get_text_config().hidden_size
    if settings.model != "shared":
        name = start if settings.model == "copy" else model_source(config, settings.model)
        whole = load_auxiliary("critic.model", name, policy, tokenizer, head=False)
        decoder = whole.base_model
    return ValueModel(
        policy,
        decoder,
        lr=settings.lr or (HEAD_STEP / width if decoder is None else MODEL_LR),
        coefficient=settings.coefficient if decoder is None else 1.0,
        weight_decay=settings.weight_decay,
        max_grad_norm=config.algorithm.max_grad_norm,
    )


def make_frozen_models(
    config: RunConfig, algo: Algo, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> FrozenModels:
    """The frozen models that the algorithm reads. The reference of an adapter is the model without
    it, which the learner has, unless the run file names another."""
    frozen: FrozenModels = {}
    settings = config.reference
    if "q" in algo.needs and (settings.model or not config.policy.lora.rank):
        name = model_source(config, settings.model) if settings.model else start
        model = load_auxiliary("reference.model", name, policy, tokenizer)
        frozen["q"] = Reference(model, policy, settings.every)
    if "t" in algo.needs:
        name = model_source(config, config.teacher.model)
        frozen["t"] = Reference(load_auxiliary("teacher.model", name, policy, tokenizer), policy)
    return frozen


def make_controller(config: RunConfig, algo: Algo) -> KlController | None:
    """What adapts the penalty on leaving the reference, if anything does."""
    settings = config.reference
    return make_kl_controller(algo, settings.target, settings.horizon) if settings.target else None


def make_reward_models(
    config: RunConfig, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> tuple[tuple[RewardModel, ...], tuple[ImplicitTrainer, ...]]:
    """The models that give rewards, and what trains those of them that learn.

    Raises PolicyError for a model that cannot be loaded, reads other tokens, or is of another kind.
    """
    made, trainers = [], []
    packing, budget = config.learner.packed, config.learner.token_budget
    for name, settings in config.reward_models.items():
        key, source = f"reward_models.{name}", model_source(config, settings.model)
        scorer: Scorer
        if settings.kind == "scalar":
            model = load_scalar(f"{key}.model", source, policy, tokenizer)
            scorer, limits = (
                ScalarScorer(model, supported_packing(model, packing), budget),
                [context_length(model)],
            )
        else:
            other = model_source(config, settings.reference) if settings.reference else start
            model = _freeze(load_auxiliary(f"{key}.model", source, policy, tokenizer))
            against = _freeze(load_auxiliary(f"{key}.reference", other, policy, tokenizer))
            scorer = ImplicitScorer(
                model, against, settings.beta, supported_packing(model, packing), budget
            )
            limits = [context_length(model), context_length(against)]
        context = min((limit for limit in limits if limit is not None), default=None)
        whole = settings.kind == "implicit"
        made.append(RewardModel(name, scorer, Scope(settings.scope), whole, context))
        if settings.train and isinstance(scorer, ImplicitScorer):
            limit, kind = config.algorithm.max_grad_norm, config.learner.optimizer
            trainers.append(
                ImplicitTrainer(made[-1], scorer, settings.lr, limit, kind, settings.loss)
            )
    return tuple(made), tuple(trainers)


def score_batch(algo: Algo, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
    """The batch with the critic's values and the reference's log-probs, where the algorithm reads
    them, and the log-probs [N] of each frozen model by stream."""
    streams: dict[str, Tensor] = {
        letter: learner.logprobs(batch, letter).double()
        for letter in FROZEN
        if letter in algo.needs
    }
    values = learner.values(batch) if algo.critic else batch.values
    return replace(batch, values=values, reference=streams.get("q", batch.reference)), streams


def model_source(config: RunConfig, name: str) -> str:
    """A model's directory, relative to the run file, or a hub name."""
    directory = config.path(name)
    return str(directory) if directory.is_dir() else name


def _unused_settings(config: RunConfig, algo: Algo) -> list[tuple[str, str]]:
    """Settings that could not matter, and why."""
    none = f"and algorithm.preset = {algo.name!r}"
    idle = []
    if config.critic.model and not algo.critic:
        idle.append(("critic.model", f"{none} reads no values of a critic"))
    if not config.critic.model:
        idle += [
            (f"critic.{key}", "and there is no critic.model")
            for key in _changed_keys(config.critic)
        ]
    elif config.critic.model != "shared" and "coefficient" in _changed_keys(config.critic):
        # AdamW divides a loss of its own by its size again.
        idle.append(("critic.coefficient", "and weighs nothing in a model of the critic's own"))
    if "q" not in algo.needs:
        why = f"{none} penalises no leaving of a reference; set the coefficient of its penalty"
        idle += [(f"reference.{key}", why) for key in _changed_keys(config.reference)]
    if config.policy.lora.rank and config.reference.every:
        why = "and the reference of an adapter is the model without it, which does not change"
        idle.append(("reference.every", why))
    if not config.reference.target and "horizon" in _changed_keys(config.reference):
        idle.append(("reference.horizon", "and there is no reference.target"))
    for name, model in config.reward_models.items():
        reference = name if model.scope == "rollout" else f"{model.scope}:{name}"
        if reference not in algo.rewards:
            why = f"{none} reads no reward {reference!r}; name it in algorithm.options, or"
            idle.append((f"reward_models.{name}", why))
        if model.kind == "scalar":
            idle += [
                (f"reward_models.{name}.{key}", "and means something for kind = 'implicit' alone")
                for key in sorted(set(_changed_keys(model)) & {"beta", "reference", "train"})
            ]
        if not model.train:
            idle += [
                (f"reward_models.{name}.{key}", "and it does not learn without train")
                for key in sorted(set(_changed_keys(model)) & {"lr", "loss"})
            ]
    if config.teacher.model and "t" not in algo.needs:
        idle.append(("teacher.model", f"{none} imitates none"))
    return idle


def _changed_keys(section: Section) -> list[str]:
    """Keys that are not at their defaults."""
    fields = msgspec.structs.fields(section)
    return [field.name for field in fields if getattr(section, field.name) != field.default]


def _freeze(model: PreTrainedModel) -> PreTrainedModel:
    check_model(model)
    return model.eval().requires_grad_(False)
