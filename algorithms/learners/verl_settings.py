"""What a run file comes to in verl's own words, before verl or torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from agentrl.config import RunConfig, flatten
from agentrl.errors import ConfigError

VERL = ((0, 9), (0, 11))  # releases it is made for: from, and below

Settings = dict[str, dict[str, Any]]
"""verl's configuration classes by part (model, engine, optimizer), and where they run (ray)."""


def settings(config: RunConfig, model: str) -> Settings:
    """model: directory or hub name of what the policy begins as.

    Raises ConfigError for what the run file asks for and verl cannot do here."""
    for key, why in _unable(config):
        raise ConfigError(f"{key}: {why}; leave it out, or set learner.kind = 'torch'")
    asked = config.learner.verl
    narrow = "bf16" if config.policy.dtype == "bfloat16" else "fp32"
    packed = asked.attention == "flash_attention_2"
    return {
        "ray": {
            "address": asked.address,
            "nodes": asked.nodes,
            "gpus_per_node": asked.gpus_per_node,
            "timeout": asked.timeout,
        },
        "model": {
            "path": model,
            "use_remove_padding": packed,  # it needs attention that knows where a row ends
            "enable_gradient_checkpointing": config.learner.gradient_checkpointing,
            "override_config": {"attn_implementation": asked.attention},
        },
        "engine": {
            "strategy": "fsdp2",
            "model_dtype": "fp32",  # master weights; computed with in param_dtype
            "mixed_precision": {
                "param_dtype": narrow,
                "reduce_dtype": "fp32",
                "buffer_dtype": "fp32",
            },
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": config.learner.token_budget,
            "infer_max_token_len_per_gpu": config.learner.token_budget,
            "use_torch_compile": False,
            "param_offload": asked.offload,
            "optimizer_offload": asked.offload,
            "seed": config.seed,
        },
        "optimizer": {
            "optimizer": "AdamW",
            "betas": [0.9, 0.95],
            "weight_decay": config.algorithm.weight_decay,
            "clip_grad": config.algorithm.max_grad_norm,
            "lr": config.algorithm.lr,  # of the first step; each step brings its own
            "lr_scheduler_type": "constant",
        },
    }


def described(config: RunConfig) -> str:
    """`settings` as comments under a run file, for `--dry-run`."""
    directory = config.path(config.policy.model)
    if not config.policy.model:
        model = str(Path(config.output, "policy"))
    else:
        model = str(directory) if directory.is_dir() else config.policy.model
    lines = ["", "# What verl is configured with:"]
    for key, value in flatten(settings(config, model)).items():
        lines.append(f"# {key} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"


def _unable(config: RunConfig) -> list[tuple[str, str]]:
    """Settings of the run file that mean something only to the other learner."""
    found = []
    if config.policy.lora.rank:
        found.append(("policy.lora.rank", "the verl learner trains all weights, no adapter"))
    if config.critic.model:
        found.append(("critic.model", "the verl learner has no critic"))
    if config.reference.every:
        found.append(("reference.every", "the verl learner's reference never changes"))
    if config.learner.optimizer != "adamw":
        found.append(("learner.optimizer", "the verl learner has adamw alone"))
    if config.learner.fp32_head:
        found.append(("learner.fp32_head", "verl computes the head in policy.dtype"))
    if config.learner.threads:
        found.append(("learner.threads", "Ray says how many threads a worker has"))
    found += [
        (f"reward_models.{name}.train", "the verl learner's checkpoints hold no reward model")
        for name, model in config.reward_models.items()
        if model.train
    ]
    return found
