"""How reward models join a training run: their scores are rewards of the groups of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
from transformers import PreTrainedModel

from agentrl.algorithms.learners.auxiliary import freeze, load_auxiliary
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.forward import supported_packing
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.reward_models.scorers import (
    ImplicitScorer,
    ImplicitTrainer,
    RewardModel,
    ScalarScorer,
    load_scalar,
)
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig, TorchLearnerConfig
from agentrl.config.rewards import ImplicitRewardModelConfig
from agentrl.errors import ConfigError
from agentrl.types import Scope


def with_reward_models(updater: Updater, model: LoadedModel) -> Updater:
    """The updater of a policy with rewards of reward models, and training of those that learn."""
    if not updater.config.reward_models:
        return updater
    models, trainers = make_reward_models(
        updater.config, model.model, model.tokenizer, model.source
    )
    if isinstance(updater.learner, TorchLearner):
        updater.learner.keep(*trainers)
    before = updater.preprocessor
    completers = (*before.completers, *models)
    return replace(updater, preprocessor=replace(before, completers=completers, trainers=trainers))


def check_reward_models(config: RunConfig, algo: Algo) -> None:
    """Raise ConfigError for a setting without effect, and for a reward model that learns with a
    learner that cannot save it."""
    for key, why in _unused_settings(config, algo):
        raise ConfigError(f"{key} is set, {why}; leave it out")
    _refuse_training_elsewhere(config)


def _unused_settings(config: RunConfig, algo: Algo) -> Iterator[tuple[str, str]]:
    preset = f"and algorithm.preset = {algo.name!r}"
    for name, model in config.reward_models.items():
        reward = name if model.scope == "rollout" else f"{model.scope}:{name}"
        if reward not in algo.rewards:
            why = f"{preset} reads no reward {reward!r}; name it in algorithm.options, or"
            yield f"reward_models.{name}", why
        if isinstance(model, ImplicitRewardModelConfig) and not model.train:
            changed = {
                field.name
                for field in msgspec.structs.fields(model)
                if getattr(model, field.name) != field.default
            }
            for key in sorted(changed & {"lr", "loss"}):
                yield f"reward_models.{name}.{key}", "and it does not learn without train"


def _refuse_training_elsewhere(config: RunConfig) -> None:
    """Raise ConfigError for a reward model that learns, with a learner that cannot save it."""
    for name, section in config.reward_models.items():
        learns = isinstance(section, ImplicitRewardModelConfig) and section.train
        if learns and not isinstance(config.learner, TorchLearnerConfig):
            raise ConfigError(
                f"reward_models.{name}.train: checkpoints of learner.kind = "
                f"{config.learner.kind!r} hold no reward model; leave it out"
            )


def make_reward_models(
    config: RunConfig, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> tuple[tuple[RewardModel, ...], tuple[ImplicitTrainer, ...]]:
    """Load the reward models, with the trainers of those that learn.

    Raises PolicyError for a model that cannot be loaded, has another vocabulary or the wrong kind.
    """
    models: list[RewardModel] = []
    trainers: list[ImplicitTrainer] = []
    packing, budget = config.learner.packed, config.learner.token_budget
    for name, settings in config.reward_models.items():
        key, scope = f"reward_models.{name}", Scope(settings.scope)
        if not isinstance(settings, ImplicitRewardModelConfig):
            source = config.model_source(settings.model)
            model = load_scalar(f"{key}.model", source, policy, tokenizer)
            packed = supported_packing(model, packing)
            scalar = ScalarScorer(model, packed, budget, settings.disagreement)
            models.append(RewardModel(name, scalar, scope, context=context_length(model)))
            continue
        source, other = (
            config.model_source(path) if path else start
            for path in (settings.model, settings.reference)
        )
        model = freeze(load_auxiliary(f"{key}.model", source, policy, tokenizer))
        against = freeze(load_auxiliary(f"{key}.reference", other, policy, tokenizer))
        scorer = ImplicitScorer(
            model, against, settings.beta, supported_packing(model, packing), budget
        )
        limits = [limit for each in (model, against) if (limit := context_length(each)) is not None]
        context = min(limits, default=None)
        models.append(RewardModel(name, scorer, scope, sums=True, context=context))
        if settings.train and isinstance(config.learner, TorchLearnerConfig):
            norm, kind = config.algorithm.max_grad_norm, config.learner.optimizer
            trainers.append(
                ImplicitTrainer(models[-1], scorer, settings.lr, norm, kind, settings.loss)
            )
    return tuple(models), tuple(trainers)
