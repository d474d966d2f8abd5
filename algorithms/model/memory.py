"""Estimates of the memory of a run, from the model's shape and the settings, without fragmentation
and libraries' own allocations."""

from __future__ import annotations

import os
from typing import Any

import torch

from agentrl.algorithms.model.lm_head import MAX_LOGITS
from agentrl.config import RunConfig

GIB = 2**30
USABLE_MEMORY = 0.9  # fraction of the memory
WIDTHS = {"4bit": 0.6, "8bit": 1.1}  # bytes per weight, including embeddings and scales
SERVING = 1.2  # memory of vLLM without keys and values, as a multiple of its weights


def bytes_needed(config: RunConfig, network: Any) -> dict[str, float]:
    """Bytes by purpose, for training a policy and, with the embedded engine, serving it."""
    shape, learner, engine = network.config.get_text_config(), config.learner, config.engine
    width, bits = bytes_of_weight(config), config.policy.quantize
    weights, layers, hidden = network.num_parameters(), shape.num_hidden_layers, shape.hidden_size
    linear = [m for m in network.modules() if isinstance(m, torch.nn.Linear)]
    adapter = config.policy.lora.rank * sum(m.in_features + m.out_features for m in linear)
    auxiliary = sum(bool(own.model) for own in (config.reference, config.teacher, config.critic))
    # Saved per token and layer: about 14 vectors of the hidden size and 3 of the MLP's.
    saved = 14 * hidden + 3 * getattr(shape, "intermediate_size", 4 * hidden)
    per_token = layers * hidden + saved if learner.gradient_checkpointing else layers * saved
    cached = engine.max_batch * engine.max_context if engine.kind == "embedded" else 0
    return {
        "weights": weights * (WIDTHS[bits] if bits else width) + weights * width * auxiliary,
        # Gradient, two moments and, for bfloat16, a master weight, all in float32.
        "optimizer": (adapter or weights) * (12 if width == 4 else 16),
        "KV cache": cached * bytes_of_token(config, network),
        # A chunk of logits, its softmax and gradient; the sampler's rows.
        "logits": 4 * (3 * MAX_LOGITS + 2 * engine.max_batch * shape.vocab_size),
        "activations": learner.token_budget * per_token * width,
    }


def bytes_of_weight(config: RunConfig) -> int:
    return 4 if config.policy.dtype == "float32" else 2


def bytes_of_token(config: RunConfig, network: Any) -> int:
    """Bytes of the keys and values of one token."""
    shape = network.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(shape.num_hidden_layers * 2 * heads * size * bytes_of_weight(config))


def available(config: RunConfig) -> int:
    """Total memory of the policy's GPU, or of this machine, in bytes."""
    if config.policy.device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
