"""Builds the learner on verl's workers, in the algorithm process."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedModel

from agentrl.algorithms.learners.auxiliary import check_vocabulary
from agentrl.algorithms.learners.factory import frozen_sources
from agentrl.algorithms.learners.verl.learner import VerlLearner
from agentrl.algorithms.learners.verl.settings import settings
from agentrl.algorithms.model.adapters import Adapters
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.objective.core import Algo
from agentrl.base.failures import one_line
from agentrl.config import RunConfig
from agentrl.errors import PolicyError


def verl_learner(
    config: RunConfig,
    algo: Algo,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    adapters: Adapters | None,
    name: str,
) -> VerlLearner:
    """The learner of `model` or its adapter `name`. Raises ConfigError for settings that verl does
    not support and without a supported verl, PolicyError for an auxiliary model of another
    vocabulary and for models that the workers cannot load."""
    frozen, critic = frozen_sources(config, algo, model.name_or_path), config.critic.model
    sources = dict(frozen.values())
    if critic and critic != "copy":
        sources["critic.model"] = config.model_source(critic)
    for key, source in sources.items():
        _check_vocabulary(key, source, tokenizer)
    return VerlLearner(
        model,
        tokenizer,
        settings(config, model.name_or_path),
        adapters=adapters,
        policy=name,
        frozen={stream: source for stream, (_, source) in frozen.items()},
        every=config.reference.every,
    )


def _check_vocabulary(key: str, name: str, tokenizer: Tokenizer) -> None:
    """Raise PolicyError unless the model `name` has the policy's vocabulary."""
    try:
        own = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{key} = {name!r}: cannot be loaded: {one_line(str(error))}") from None
    check_vocabulary(key, name, own, tokenizer)
