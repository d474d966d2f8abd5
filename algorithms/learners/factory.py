"""The learner of a policy and its auxiliary models, built from the run file.

Models that the algorithm does not read are not loaded; settings without effect are errors.

`use_liger` replaces norms and gated activations of one loaded model by Liger Kernel's fused ones.
They are Triton kernels, so the model must be on an NVIDIA GPU; a sampler and a learner that share
the model both use them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedModel

from agentrl.algorithms.learners.auxiliary import Reference, ValueModel, load_auxiliary
from agentrl.algorithms.learners.base import Frozen, Learner
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.lm_head import ThreadTuner, thread_tuner
from agentrl.algorithms.model.load import Adapters
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.ratios import LearnerOutput
from agentrl.algorithms.plugins import learner_factory
from agentrl.algorithms.vision.learner import ImageTextLearner
from agentrl.core.config import RunConfig, Section, TorchLearnerConfig
from agentrl.core.config.learning import MODEL_LR
from agentrl.core.errors import ConfigError, PolicyError, install_command
from agentrl.core.plugins import check_protocol
from agentrl.core.types import POLICY

KEY = "learner.liger_kernel"


SHARED_COEFFICIENT = 0.5  # coefficient of the value loss, if the critic shares the policy's layers
HEAD_STEP = 0.05  # a shared head's learning rate times its width: how far AdamW moves a value


def make_learner(
    config: RunConfig,
    algo: Algo,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    adapters: Adapters | None = None,
    policy: str = POLICY,
) -> Learner:
    """Build the learner of `model`, or of its adapter `policy`. The caller closes it.

    Raises PolicyError for models that cannot be loaded; ConfigError for unsupported settings, for a
    factory that returns no learner, and for a learner without a stream that `algo` reads."""
    factory = learner_factory(config.learner.kind, Path(config.root))
    learner: Learner = factory(config, algo, model, tokenizer, adapters, policy)
    check_protocol(learner, Learner, source=factory, key="learner.kind")
    try:
        _check_fit(config, algo, learner)
    except ConfigError:
        learner.close()
        raise
    return learner


def torch_learner(
    config: RunConfig,
    algo: Algo,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    adapters: Adapters | None,
    name: str,
) -> TorchLearner:
    """The built-in factory of a learner. Raises PolicyError for models that cannot be loaded or
    trained."""
    settings, start = config.learner, model.name_or_path
    assert isinstance(settings, TorchLearnerConfig)
    if settings.liger_kernel:
        use_liger(model)
    kind = TorchLearner if inputs_of(model) is None else ImageTextLearner
    return kind(
        model,
        tokenizer,
        critic=make_critic(config, model, tokenizer, start),
        frozen=make_frozen_models(config, algo, model, tokenizer, start),
        weight_decay=config.algorithm.weight_decay,
        max_grad_norm=config.algorithm.max_grad_norm,
        token_budget=settings.token_budget,
        packing=settings.packed,
        gradient_checkpointing=settings.gradient_checkpointing,
        fp32_head=settings.fp32_head,
        optimizer=settings.optimizer,
        threads=_threads(settings.threads, model),
        adapters=adapters,
        policy=name,
        offload=settings.offload,
        release=config.engine.frees_gpu,
    )


def available_outputs(config: RunConfig) -> frozenset[LearnerOutput]:
    """The outputs that a run can provide to its algorithm. A reference is always among them: the
    initial policy."""
    outputs: set[LearnerOutput] = {"old", "sampler", "reference", *config.learner.computes}
    if config.critic.model:
        outputs.add("values")
    if config.teacher.model:
        outputs.add("teacher")
    return frozenset(outputs)


def refuse_unused_settings(config: RunConfig, algo: Algo) -> None:
    """Raise ConfigError for a setting without effect."""
    for key, why in _unused_settings(config, algo):
        raise ConfigError(f"{key} is set, {why}; leave it out")


def make_critic(
    config: RunConfig, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> ValueModel | None:
    """Build the critic of a run, if it has one. start: directory or hub name of the initial policy.

    Raises PolicyError for a model that cannot be loaded or has another vocabulary."""
    settings = config.critic
    if not settings.model:
        return None
    decoder, width = None, policy.config.get_text_config().hidden_size
    if settings.model != "shared":
        name = start if settings.model == "copy" else config.model_source(settings.model)
        model = load_auxiliary("critic.model", name, policy, tokenizer, head=False)
        decoder = model.base_model
    return ValueModel(
        policy,
        decoder,
        lr=settings.lr or (HEAD_STEP / width if decoder is None else MODEL_LR),
        coefficient=SHARED_COEFFICIENT if decoder is None else 1.0,
        weight_decay=config.algorithm.weight_decay,
        max_grad_norm=config.algorithm.max_grad_norm,
    )


def caches_reference(config: RunConfig, algo: Algo) -> bool:
    """Whether the reference's log-probs come from the store instead of a model in memory."""
    # Prompts with the privileged text.
    reads_privileged = algo.telling is not None and algo.telling.teacher == "reference"
    cached = "reference" in algo.needs and not config.reference.every and not reads_privileged
    return not config.plays_rollouts and cached


def frozen_sources(config: RunConfig, algo: Algo, start: str) -> dict[Frozen, tuple[str, str]]:
    """The frozen models to load, by stream: the setting that names each, and its directory or hub
    name. An adapter's default reference is the model without it, which is loaded already."""
    sources: dict[Frozen, tuple[str, str]] = {}
    if "reference" in algo.needs and not caches_reference(config, algo):
        sources["reference"] = "reference.model", config.reference.model
    if "teacher" in algo.needs and not config.teacher_server:
        sources["teacher"] = "teacher.model", config.teacher.model
    return {
        stream: (key, config.model_source(name) if name else start)
        for stream, (key, name) in sources.items()
        if name or not config.policy.lora.rank
    }


def make_frozen_models(
    config: RunConfig, algo: Algo, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> dict[Frozen, Reference]:
    """Load the frozen models of `frozen_sources`. Raises PolicyError as `load_auxiliary` does."""
    return {
        stream: Reference(
            load_auxiliary(key, name, policy, tokenizer),
            policy,
            config.reference.every if stream == "reference" else 0,
        )
        for stream, (key, name) in frozen_sources(config, algo, start).items()
    }


def _unused_settings(config: RunConfig, algo: Algo) -> Iterator[tuple[str, str]]:
    """Settings without effect, each with the reason."""
    preset = f"and algorithm.preset = {algo.name!r}"
    critic, reference = config.critic, config.reference
    if critic.model and not algo.reads_critic:
        yield "critic.model", f"{preset} reads no values of a critic"
    if not critic.model:
        for key in _changed_keys(critic):
            yield f"critic.{key}", "and there is no critic.model"
    if "reference" not in algo.needs:
        why = f"{preset} has no penalty towards a reference; set the coefficient of its penalty"
        for key in _changed_keys(reference):
            yield f"reference.{key}", why
    if config.policy.lora.rank and reference.every:
        why = "and the reference of an adapter is the model without it, which does not change"
        yield "reference.every", why
    if not reference.target_kl and "kl_horizon" in _changed_keys(reference):
        yield "reference.kl_horizon", "and there is no reference.target_kl"
    for key in _changed_keys(config.teacher) if "teacher" not in algo.needs else ():
        yield f"teacher.{key}", f"{preset} reads no teacher"
    if config.teacher_server and algo.distill is not None and algo.distill.of == "policy":
        why = (
            "and a server has no log-probs of the policy's most probable tokens, which of = "
            "'policy' reads (a model in memory does)"
        )
        yield "teacher.model", why


def _changed_keys(section: Section) -> list[str]:
    """Keys that differ from their defaults."""
    fields = msgspec.structs.fields(section)
    return [field.name for field in fields if getattr(section, field.name) != field.default]


def _check_fit(config: RunConfig, algo: Algo, learner: Learner) -> None:
    """Raise ConfigError if the algorithm reads a stream that the learner does not supply and that
    does not come with the groups, or if the run would undo its steps and cannot."""
    kind = f"learner.kind = {config.learner.kind!r}"
    optional = {"values": algo.reads_critic, "top_tokens": algo.topk, "entropy": algo.entropy,
                "observations": algo.echo}  # fmt: skip
    elsewhere = {"teacher": config.teacher_server, "reference": caches_reference(config, algo)}
    needed = algo.needs | {stream for stream, is_read in optional.items() if is_read}
    needed -= {stream for stream, is_given in elsewhere.items() if is_given}
    if missing := sorted(needed - learner.supplies):
        raise ConfigError(
            f"{kind}: algorithm.preset = {algo.name!r} reads {', '.join(missing)}, and the learner "
            f"supplies {', '.join(sorted(learner.supplies))}"
        )
    if config.algorithm.max_kl and not learner.undoable:
        raise ConfigError(
            f"algorithm.max_kl: {kind} cannot undo a step; leave it out, or give the learner "
            "`undoable`, `mark` and `shrink` (agentrl.algorithms.learners.base)"
        )


def _threads(number: int, model: PreTrainedModel) -> ThreadTuner:
    """`learner.threads`, or all cores, or for small models the number that measures faster."""
    if number or model.device.type != "cpu":
        return ThreadTuner(number or os.cpu_count() or 1)
    return thread_tuner(model.num_parameters(), "training computes", os.cpu_count() or 1)


def use_liger(model: Any) -> None:
    """Replace the model's norms and gated activations. Raises PolicyError if that is impossible."""
    if model.device.type != "cuda":
        raise PolicyError(
            f"{KEY}: the policy is on {model.device.type}, not on a GPU; leave it out"
        )
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise PolicyError(
            f"{KEY}: liger-kernel cannot be imported ({error}); {install_command('liger')}"
        ) from None
    kind = model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise PolicyError(f"{KEY}: Liger Kernel does not support model type {kind!r}; leave it out")
    # Liger also replaces classes and functions of transformers' module, for models that are loaded
    # later, which may be on a CPU.
    module = vars(sys.modules[type(model).__module__])
    before = dict(module)
    try:
        monkey_patch._apply_liger_kernel_to_instance(
            model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        module.update(before)
