"""Checks of a run's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.load import vocabulary_gap, vocabulary_size
from agentrl.algorithms.model.text import Codec
from agentrl.algorithms.preflight import estimate
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.base.failures import one_line
from agentrl.config import RunConfig
from agentrl.doctor import Status
from agentrl.errors import PolicyError
from agentrl.types import Json


def memory(config: RunConfig, source: str) -> tuple[Status, str]:
    """Whether a run's peak memory fits. source: directory or hub name of the policy's model."""
    fits, sentence = estimate.memory(config, readable_shape(source))
    return ("ok" if fits else "fail"), sentence


def readable_shape(source: str) -> Any:
    """The model without its weights. Raises PolicyError if it cannot be read, or not from the hub:
    each of these errors has the model's name and a cure."""
    try:
        return estimate.shape_of(source)
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"model {source!r}: cannot be read: {one_line(str(error))}; policy.model: the folder "
            "of a model, or a name on the hub, which this machine has to reach once"
        ) from None


def tokenizer(model: LoadedModel) -> tuple[Status, str]:
    """Whether the vocabulary of the tokenizer matches that of the model."""
    rows, tokens = vocabulary_size(model.model), len(model.tokenizer)
    if gap := vocabulary_gap(model.model, model.tokenizer):
        return "fail", f"{model.source}: {gap}"
    return "ok", f"{tokens} tokens for {rows} embeddings of {model.source}"


def context(model: LoadedModel, config: RunConfig, task: Mapping[str, Json]) -> tuple[Status, str]:
    """Whether a task and an answer fit into the context."""
    limit, asked = context_length(model.model), config.engine.max_context
    longest, answer = min(asked, limit or asked), config.sampling.max_tokens or 0
    size = len(Codec(model.tokenizer).encode(str(task.get("input", ""))))
    rest = f"sampling.max_tokens {answer}" if answer else f"an answer at most {longest - size}"
    sentence = f"{longest} tokens, of which a task takes {size} and {rest}"
    cure = f"lower sampling.max_tokens or raise engine.max_context (the model: {limit or 'any'})"
    return ("ok", sentence) if size + answer < longest else ("fail", f"{sentence}; {cure}")
