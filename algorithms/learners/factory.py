"""Makes what the run file asks for: the learner of a policy and the models beside it.

Models that the algorithm does not read are not loaded; settings that have no effect are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import msgspec
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.auxiliary import (
    Reference,
    ValueModel,
    check_vocabulary,
    freeze,
    load_auxiliary,
)
from agentrl.algorithms.learners.base import Frozen, Learner
from agentrl.algorithms.learners.reward_models import (
    ImplicitScorer,
    ImplicitTrainer,
    RewardModel,
    ScalarScorer,
    load_scalar,
)
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.learners.verl.learner import VerlLearner
from agentrl.algorithms.learners.verl.settings import settings as verl_settings
from agentrl.algorithms.model.cpu_threads import ThreadTuner, thread_tuner
from agentrl.algorithms.model.load import Tokenizer, context_length
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.model.packing import supported_packing
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.distill import TopKDistillation
from agentrl.algorithms.plugins import learner_factory
from agentrl.algorithms.presets.registry import Supply
from agentrl.config import (
    ImplicitRewardModelConfig,
    RunConfig,
    Section,
    TorchLearnerConfig,
    VllmEngineConfig,
)
from agentrl.config.schema import MODEL_LR
from agentrl.errors import ConfigError, PolicyError
from agentrl.failures import brief
from agentrl.plugins import check_protocol
from agentrl.types import POLICY, Float32, Scope

HEAD_STEP = 0.05  # of a shared one, over its width: AdamW moves a value by the sum over all of it


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
    own = config.learner
    if factory := learner_factory(config):
        _check_no_reward_model_learns(config)
        learner: Learner = factory(config, algo, model, tokenizer, adapters, policy)
        check_protocol(learner, Learner, by=factory, key="learner.kind")
        _check_streams(own.kind, algo, learner, {"t"} if config.teacher.upstream else set())
        return learner
    if own.kind == "verl":
        frozen = frozen_sources(config, algo, start)
        asked = dict(frozen.values())
        if config.critic.model and config.critic.model != "copy":
            asked["critic.model"] = config.model_source(config.critic.model)
        for key, name in asked.items():
            _check_reads(key, name, tokenizer)
        return VerlLearner(
            model,
            tokenizer,
            verl_settings(config, start),
            adapters=adapters,
            policy=policy,
            frozen={letter: name for letter, (_, name) in frozen.items()},
            every=config.reference.every,
        )
    if not isinstance(own, TorchLearnerConfig):
        raise ConfigError(f"learner.kind = {own.kind!r} cannot be loaded here")
    return TorchLearner(
        model,
        tokenizer,
        critic=make_critic(config, model, tokenizer, start),
        frozen=make_frozen_models(config, algo, model, tokenizer, start),
        weight_decay=config.algorithm.weight_decay,
        max_grad_norm=config.algorithm.max_grad_norm,
        token_budget=own.token_budget,
        packing=own.packed,
        gradient_checkpointing=own.gradient_checkpointing,
        fp32_head=own.fp32_head,
        optimizer=own.optimizer,
        threads=_threads(own.threads, model),
        adapters=adapters,
        policy=policy,
        trainers=trainers,
        offload=own.offload,
        release=isinstance(config.engine, VllmEngineConfig) and config.engine.vllm.sleep > 0,
    )


def available_streams(config: RunConfig) -> frozenset[Supply]:
    """The streams that a run can give its algorithm. There is always a reference: the initial
    policy."""
    streams: set[Supply] = {"o", "b", "q"}
    if config.learner.kind != "verl":  # what a plug-in lacks is refused once it is made
        streams |= {"k", "e"}
    if config.critic.model:
        streams.add("v")
    if config.teacher.model or config.teacher.upstream:
        streams.add("t")
    return frozenset(streams)


def refuse_unused_settings(config: RunConfig, algo: Algo) -> None:
    """Raises ConfigError for a setting without effect."""
    for key, why in _unused_settings(config, algo):
        raise ConfigError(f"{key} is set, {why}; leave it out")


def make_critic(
    config: RunConfig, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> ValueModel | None:
    """The critic of a run, if it has one. start: directory or hub name of the initial policy.

    Raises PolicyError for a model that cannot be loaded or reads other tokens."""
    settings = config.critic
    if not settings.model:
        return None
    decoder, width = None, policy.config.get_text_config().hidden_size
    if settings.model != "shared":
        name = start if settings.model == "copy" else config.model_source(settings.model)
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


def caches_reference(config: RunConfig, algo: Algo) -> bool:
    """Whether the log-probs of the reference come from the store instead of a model in memory."""
    return bool(config.data.name) and "q" in algo.needs and not config.reference.every


def frozen_sources(config: RunConfig, algo: Algo, start: str) -> dict[Frozen, tuple[str, str]]:
    """The frozen models behind the streams that the algorithm reads: the setting that names each,
    and its directory or hub name. The reference of an adapter is the model without it, which the
    learner has, unless the run file names another."""
    asked: dict[Frozen, tuple[str, str]] = {}
    if "q" in algo.needs and not caches_reference(config, algo):
        asked["q"] = "reference.model", config.reference.model
    if "t" in algo.needs and not config.teacher.upstream:
        asked["t"] = "teacher.model", config.teacher.model
    return {
        letter: (key, config.model_source(name) if name else start)
        for letter, (key, name) in asked.items()
        if name or not config.policy.lora.rank
    }


def make_frozen_models(
    config: RunConfig, algo: Algo, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> dict[Frozen, Reference]:
    """The frozen models that the algorithm reads. Raises PolicyError as `load_auxiliary` does."""
    return {
        letter: Reference(
            load_auxiliary(key, name, policy, tokenizer),
            policy,
            config.reference.every if letter == "q" else 0,
        )
        for letter, (key, name) in frozen_sources(config, algo, start).items()
    }


def make_reward_models(
    config: RunConfig, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> tuple[tuple[RewardModel, ...], tuple[ImplicitTrainer, ...]]:
    """The reward models, and the trainers of those that learn.

    Raises PolicyError for a model that cannot be loaded, reads other tokens, or is of another kind.
    """
    made: list[RewardModel] = []
    trainers: list[ImplicitTrainer] = []
    packing, budget = config.learner.packed, config.learner.token_budget
    for name, settings in config.reward_models.items():
        key, source = f"reward_models.{name}", config.model_source(settings.model)
        scope = Scope(settings.scope)
        if not isinstance(settings, ImplicitRewardModelConfig):
            model = load_scalar(f"{key}.model", source, policy, tokenizer)
            packed, doubt = supported_packing(model, packing), settings.disagreement
            scalar = ScalarScorer(model, packed, budget, doubt)
            made.append(RewardModel(name, scalar, scope, context=context_length(model)))
            continue
        other = config.model_source(settings.reference) if settings.reference else start
        model = freeze(load_auxiliary(f"{key}.model", source, policy, tokenizer))
        against = freeze(load_auxiliary(f"{key}.reference", other, policy, tokenizer))
        scorer = ImplicitScorer(
            model, against, settings.beta, supported_packing(model, packing), budget
        )
        limits = [limit for each in (model, against) if (limit := context_length(each)) is not None]
        made.append(RewardModel(name, scorer, scope, sums=True, context=min(limits, default=None)))
        if settings.train and isinstance(config.learner, TorchLearnerConfig):
            norm, kind = config.algorithm.max_grad_norm, config.learner.optimizer
            trainers.append(
                ImplicitTrainer(made[-1], scorer, settings.lr, norm, kind, settings.loss)
            )
    return tuple(made), tuple(trainers)


def score_batch(
    algo: Algo,
    learner: Learner,
    batch: Batch,
    cached: Mapping[str, Float32] | None = None,
    taught: Callable[[Batch], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Batch, dict[str, Tensor]]:
    """The batch with the critic's values and the reference's log-probs, where the algorithm reads
    them, and the log-probs [N] of each frozen model by stream; to imitate a teacher at several
    tokens, these are the batch's symbols, and t_K [N, K] its log-probs. cached: those of the
    reference, by rollout. taught: what a teacher that the learner has not gives as `Learner.top`,
    for as many tokens as the algorithm reads."""
    streams: dict[str, Tensor] = {}
    if "q" in algo.needs and cached is None:
        streams["q"] = learner.logprobs(batch, "q").double()
    if cached is not None:
        known = [torch.tensor(cached[id], dtype=torch.float64) for id in batch.rollouts]
        streams["q"] = torch.cat(known) if known else torch.empty(0)
    if algo.distill is not None and batch.n_tokens:
        symbols, t_NK = taught(batch) if taught else _taught(algo.distill, learner, batch)
        batch = replace(batch, symbols=symbols)
        streams |= {"t": t_NK[:, 0].double(), "t_K": t_NK}
    elif "t" in algo.needs:
        t_N = taught(batch)[1][:, 0] if taught else learner.logprobs(batch, "t")
        streams["t"] = t_N.double()
    values = learner.values(batch) if algo.critic else batch.values
    return replace(batch, values=values, reference=streams.get("q", batch.reference)), streams


def _taught(distill: TopKDistillation, learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens [N, K] at which a teacher is imitated, and its log-probs."""
    if distill.of == "teacher":
        return learner.top(batch, distill.k, "t")
    symbols, _ = learner.top(batch, distill.k)
    return symbols, learner.symbol_logprobs(replace(batch, symbols=symbols), "t")


def _unused_settings(config: RunConfig, algo: Algo) -> Iterator[tuple[str, str]]:
    """Settings without effect, and why."""
    none = f"and algorithm.preset = {algo.name!r}"
    critic, reference = config.critic, config.reference
    if critic.model and not algo.critic:
        yield "critic.model", f"{none} reads no values of a critic"
    if not critic.model:
        for key in _changed_keys(critic):
            yield f"critic.{key}", "and there is no critic.model"
    elif critic.model != "shared" and "coefficient" in _changed_keys(critic):
        # AdamW divides a loss of its own by its size again.
        yield "critic.coefficient", "and weighs nothing in a model of the critic's own"
    if "q" not in algo.needs:
        why = f"{none} penalises no leaving of a reference; set the coefficient of its penalty"
        for key in _changed_keys(reference):
            yield f"reference.{key}", why
    if config.policy.lora.rank and reference.every:
        why = "and the reference of an adapter is the model without it, which does not change"
        yield "reference.every", why
    if not reference.target and "horizon" in _changed_keys(reference):
        yield "reference.horizon", "and there is no reference.target"
    for name, model in config.reward_models.items():
        reward = name if model.scope == "rollout" else f"{model.scope}:{name}"
        if reward not in algo.rewards:
            why = f"{none} reads no reward {reward!r}; name it in algorithm.options, or"
            yield f"reward_models.{name}", why
        if isinstance(model, ImplicitRewardModelConfig) and not model.train:
            for key in sorted(set(_changed_keys(model)) & {"lr", "loss"}):
                yield f"reward_models.{name}.{key}", "and it does not learn without train"
    for name in config.judges if not config.policies else ():
        if name not in algo.rewards:
            why = f"{none} reads no reward {name!r}; name it in algorithm.options, or"
            yield f"judges.{name}", why
    for key in _changed_keys(config.teacher) if "t" not in algo.needs else ():
        yield f"teacher.{key}", f"{none} imitates none"
    if not config.teacher.upstream and "concurrency" in _changed_keys(config.teacher):
        yield "teacher.concurrency", "and there is no teacher.upstream"
    if config.teacher.upstream and algo.distill is not None and algo.distill.of == "policy":
        why = "and says nothing of the policy's most probable tokens, which of = 'policy' compares"
        yield "teacher.upstream", f"{why} (a teacher.model does)"


def _changed_keys(section: Section) -> list[str]:
    """Keys that are not at their defaults."""
    fields = msgspec.structs.fields(section)
    return [field.name for field in fields if getattr(section, field.name) != field.default]


def _check_no_reward_model_learns(config: RunConfig) -> None:
    for name, section in config.reward_models.items():
        if isinstance(section, ImplicitRewardModelConfig) and section.train:
            raise ConfigError(
                f"reward_models.{name}.train: checkpoints of learner.kind = "
                f"{config.learner.kind!r} hold no reward model; leave it out"
            )


def _check_streams(kind: str, algo: Algo, learner: Learner, given: set[str]) -> None:
    """Raises ConfigError where a plug-in lacks what the algorithm reads and is not given to it."""
    optional = {"v": algo.critic, "k": algo.symbols, "e": algo.entropy}
    needed = algo.needs | {stream for stream, is_read in optional.items() if is_read}
    if missing := sorted(needed - learner.supplies - given):
        raise ConfigError(
            f"learner.kind = {kind!r}: algorithm.preset = {algo.name!r} reads "
            f"{', '.join(missing)}, and the learner supplies {', '.join(sorted(learner.supplies))}"
        )


def _threads(number: int, model: PreTrainedModel) -> ThreadTuner:
    """`learner.threads`, or all cores, or for small models what is measured to be faster."""
    if number or model.device.type != "cpu":
        return ThreadTuner(number or os.cpu_count() or 1)
    return thread_tuner(model.num_parameters(), "training computes", os.cpu_count() or 1)


def _check_reads(key: str, name: str, tokenizer: Tokenizer) -> None:
    """Raises PolicyError unless the model has the vocabulary of the policy."""
    try:
        own = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{key} = {name!r}: cannot be loaded: {brief(str(error))}") from None
    check_vocabulary(key, name, own, tokenizer)
