"""Builds the library's own learner, which other packages' and parts' stand beside. Needs no torch
before it is called, because the front loads it before a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agentrl.config import RunConfig, TorchLearnerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.algorithms.learners.torch import TorchLearner
    from agentrl.algorithms.model.cpu_threads import ThreadTuner
    from agentrl.algorithms.model.load import Tokenizer
    from agentrl.algorithms.model.lora import Adapters
    from agentrl.algorithms.objective.core import Algo


def torch_learner(
    config: RunConfig,
    algo: Algo,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    adapters: Adapters | None,
    name: str,
) -> TorchLearner:
    """The learner of `model` or its adapter `name`. Raises PolicyError for models that cannot be
    loaded or trained."""
    from agentrl.algorithms.learners.factory import make_critic, make_frozen_models
    from agentrl.algorithms.learners.torch import TorchLearner

    own, start = config.learner, model.name_or_path
    assert isinstance(own, TorchLearnerConfig)
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
        policy=name,
        offload=own.offload,
        release=config.engine.frees_gpu,
    )


def _threads(number: int, model: PreTrainedModel) -> ThreadTuner:
    """`learner.threads`, or all cores, or for small models the number that measures faster."""
    from agentrl.algorithms.model.cpu_threads import ThreadTuner, thread_tuner

    if number or model.device.type != "cpu":
        return ThreadTuner(number or os.cpu_count() or 1)
    return thread_tuner(model.num_parameters(), "training computes", os.cpu_count() or 1)
