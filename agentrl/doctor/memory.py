"""The memory of a run at its peak, by the shape of its model, and settings that lower it. An
estimate: fragmentation and what libraries keep for themselves come on top."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.model.lm_head import MAX_LOGITS
from agentrl.config import RunConfig
from agentrl.doctor import Status
from agentrl.doctor.machine import GIB

USABLE = 0.9  # of the memory
CURE = (
    "set what is smaller of learner.token_budget, engine.max_batch and engine.max_context, or "
    "learner.gradient_checkpointing=true, policy.dtype=bfloat16 or policy.lora.rank=16"
)


def memory(config: RunConfig, source: str) -> tuple[Status, str]:
    with torch.device("meta"):  # shapes without weights
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    usable, parts = USABLE * available(config), bytes_needed(config, network)
    shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())
    sentence = f"{sum(parts.values()) / GIB:.2g} of {usable / GIB:.2g} GiB: {shown}"
    return ("ok", sentence) if sum(parts.values()) <= usable else ("fail", f"{sentence}; {CURE}")


def bytes_needed(config: RunConfig, network: Any) -> dict[str, float]:
    """By purpose, of a policy that learns and is served in one process."""
    shape, learner, engine = network.config.get_text_config(), config.learner, config.engine
    width = 4 if config.policy.dtype == "float32" else 2
    weights, layers, hidden = network.num_parameters(), shape.num_hidden_layers, shape.hidden_size
    linear = [m for m in network.modules() if isinstance(m, torch.nn.Linear)]
    adapter = config.policy.lora.rank * sum(m.in_features + m.out_features for m in linear)
    beside = sum(bool(own.model) for own in (config.reference, config.teacher, config.critic))
    # Kept of each token and layer: about 14 vectors of the hidden size and 3 of the MLP's.
    kept = 14 * hidden + 3 * getattr(shape, "intermediate_size", 4 * hidden)
    of_layers = layers * hidden + kept if learner.gradient_checkpointing else layers * kept
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads
    cached = engine.max_batch * engine.max_context if engine.kind == "embedded" else 0
    return {
        "weights": weights * width * (1 + beside),
        # Gradient, two moments and, of bfloat16, a master weight, all of them float32.
        "optimizer": (adapter or weights) * (12 if width == 4 else 16),
        "KV cache": cached * layers * 2 * heads * size * width,
        # A chunk of logits, its softmax and gradient; the sampler's rows.
        "logits": 4 * (3 * MAX_LOGITS + 2 * engine.max_batch * shape.vocab_size),
        "activations": learner.token_budget * of_layers * width,
    }


def available(config: RunConfig) -> int:
    """Bytes of the GPU or of this machine."""
    if config.policy.device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
