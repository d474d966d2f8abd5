"""Whether the memory of this machine is enough, and settings that lower what is needed."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.model.memory import GIB, USABLE, available, bytes_needed, vllm_share
from agentrl.config import RunConfig, VllmEngineConfig
from agentrl.doctor import Status

CURE = (
    "set what is smaller of learner.token_budget, engine.max_batch and engine.max_context, or "
    "learner.gradient_checkpointing=true, policy.dtype=bfloat16 or policy.lora.rank=16"
)


def memory(config: RunConfig, source: str) -> tuple[Status, str]:
    """Of a run at its peak, by the shape of its model."""
    with torch.device("meta"):  # shapes without weights
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    usable, parts = USABLE * available(config), bytes_needed(config, network)
    shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())
    sentence = f"{sum(parts.values()) / GIB:.2g} of {usable / GIB:.2g} GiB: {shown}"
    if sum(parts.values()) > usable:
        return "fail", f"{sentence}; {CURE}"
    engine = config.engine
    if isinstance(engine, VllmEngineConfig) and torch.cuda.is_available():
        share = engine.vllm.gpu_memory or vllm_share(config, network, available(config))
        sentence += f", vLLM {share * available(config) / GIB:.2g}"
    return "ok", sentence
