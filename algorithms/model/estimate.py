"""Estimates of a run before it starts: memory, from the shape of its model and the settings, and
what parts estimate. Agents are not included, nor what fragments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.model.lm_head import MAX_LOGITS
from agentrl.base import memory as host
from agentrl.base.parts import installed_plugins
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
    """Total memory of the policy's GPU, or of this machine or container, in bytes."""
    if config.policy.device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return host.total()


def shape_of(source: str, *, local: bool = False) -> Any:
    """The model of a directory or hub name without its weights. local: do not ask the hub."""
    with torch.device("meta"):
        shape = AutoConfig.from_pretrained(source, local_files_only=local)
        return AutoModelForCausalLM.from_config(shape)


def describe(config: RunConfig, source: str) -> Iterator[str]:
    """The estimates for a model that is not loaded, with weights of 0."""
    network = shape_of(source, local=True)
    fits, sentence = memory(config, network)
    yield f"memory: about {sentence}"
    if fits:
        where = config.policy.device
        device = ("cuda" if torch.cuda.is_available() else "cpu") if where == "auto" else where
        network = network.to(getattr(torch, config.policy.dtype)).to_empty(device=device).eval()
        for each in network.parameters():
            each.detach().zero_()
        yield from others(config, network)


def memory(config: RunConfig, network: Any) -> tuple[bool, str]:
    """Whether memory suffices, and a sentence with its parts and, if not, the remedy."""
    usable, parts = USABLE_MEMORY * available(config), bytes_needed(config, network)
    shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())
    sentence = f"{sum(parts.values()) / GIB:.2g} of {usable / GIB:.2g} GiB: {shown}"
    if sum(parts.values()) > usable:
        return False, f"{sentence}; {host.CURE}"
    total = available(config)
    if torch.cuda.is_available() and (share := config.engine.gpu_share(config, network, total)):
        sentence += f", {config.engine.kind} {share * total / GIB:.2g}"
    return True, sentence


def others(config: RunConfig, network: Any) -> Iterator[str]:
    """What parts estimate for a policy."""
    for point in installed_plugins("estimates"):
        yield from point.load()(config, network)
