"""Loads the base that policies are adapters of."""

from __future__ import annotations

from agentrl.algorithms.lora.adapters import LoraAdapters
from agentrl.algorithms.lora.quantize import keep_gradients, load_quantized
from agentrl.algorithms.model.load import Model, Tokenizer, load_model
from agentrl.config import RunConfig


def load_adapted(source: str, config: RunConfig) -> tuple[Model, Tokenizer, LoraAdapters]:
    """The base without adapters, quantised or not. config: a policy's view of the run. Raises
    PolicyError as `load_model` does."""
    policy = config.policy
    if policy.quantize:
        loaded = load_quantized(source, policy.quantize, policy.dtype, policy.device, config)
    else:
        loaded = load_model(source, policy.dtype, policy.device, config=config)
        keep_gradients(loaded[0])  # its checkpoint may be quantised
    model, tokenizer = loaded
    experts = config.learner.adapts_experts and config.engine.serves_adapted_experts
    return model, tokenizer, LoraAdapters(model, experts=experts)
