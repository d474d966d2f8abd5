"""verl's configuration, from a run file, without importing verl or torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from agentrl.core.config import RunConfig
from agentrl.core.config.infrastructure import VerlConfig, VerlLearnerConfig
from agentrl.core.config.learning import MODEL_LR
from agentrl.core.config.validate import flatten
from agentrl.core.errors import ConfigError, install_command

VERL = ((0, 9), (0, 11))  # supported releases: from, and below
CONNECT_TIMEOUT = 10.0  # seconds

SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"
# verl's options -> the setting of agentrl that determines them, or "" if they are constant.
FIXED_OPTIONS = {
    "path": "policy.model", "lora_rank": "policy.lora", "lora_alpha": "policy.lora",
    "target_modules": "policy.lora", "use_remove_padding": "learner.verl.attention",
    "enable_gradient_checkpointing": "learner.gradient_checkpointing",
    "mixed_precision": "policy.dtype", "max_token_len_per_gpu": "learner.token_budget",
    "infer_max_token_len_per_gpu": "learner.token_budget", "lr": "algorithm.lr",
    "param_offload": "learner.offload", "optimizer_offload": "learner.offload",
    "seed": "seed", "weight_decay": "algorithm.weight_decay",
    "clip_grad": "algorithm.max_grad_norm", "dtype": "policy.dtype", "model_dtype": "",
    "forward_only": "", "use_dynamic_bsz": "", "optimizer": "", "lr_scheduler_type": "",
}  # fmt: skip

FSDP2, MEGATRON = "fsdp2", "megatron"  # verl's engines that the learner can train with
BETAS = (0.9, 0.95)  # AdamW's betas
RAY = ("nodes", "gpus_per_node")  # where verl's workers run

OPTIMIZERS: dict[str, dict[str, Any]] = {
    FSDP2: {"optimizer": "AdamW", "betas": list(BETAS), "lr_scheduler_type": "constant"},
    MEGATRON: {
        "optimizer": "adam",
        "override_optimizer_config": dict(zip(("adam_beta1", "adam_beta2"), BETAS, strict=True)),
        "lr_decay_style": "constant",
        "lr_warmup_steps": 0,
        "total_training_steps": 2**31,  # for a learning-rate schedule, which is not used
    },
}

VerlSettings = dict[str, dict[str, Any]]
"""Keyword arguments of verl's configuration classes by part: model, engine, optimizer; critic, with
a model and optimizer of its own, empty without one; and the placement of workers (ray)."""


def settings(config: RunConfig, model: str) -> VerlSettings:
    """verl's configuration of a run. model: directory or hub name of the initial policy.

    Raises ConfigError for settings that verl does not support."""
    for key, why in _unsupported_settings(config):
        raise ConfigError(f"{key}: {why}; leave it out, or set learner.kind = 'torch'")
    verl, lora = _own(config), config.policy.lora
    narrow = "bf16" if config.policy.dtype == "bfloat16" else "fp32"
    packed = verl.attention == "flash_attention_2"
    decoder = {
        "path": model,
        "use_remove_padding": packed,  # only flash attention knows where a packed row ends
        "enable_gradient_checkpointing": config.learner.gradient_checkpointing,
        "override_config": {"attn_implementation": verl.attention},
    }
    adapter = {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.targets or "all-linear",
    }
    strategy = _strategy(verl)
    optimizer = {
        "weight_decay": config.algorithm.weight_decay,
        "clip_grad": config.algorithm.max_grad_norm,
        "lr": config.algorithm.lr,  # learning rate of the first step; each step passes its own
    } | OPTIMIZERS[strategy]
    merged: VerlSettings = {
        "ray": {key: getattr(verl, key) for key in RAY},
        "model": decoder | (adapter if lora.rank else {}),
        "engine": {
            "strategy": strategy,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": config.learner.token_budget,
            "infer_max_token_len_per_gpu": config.learner.token_budget,
            "param_offload": config.learner.offload,
            "optimizer_offload": config.learner.offload,
            "seed": config.seed,
        }
        | ({"dtype": config.policy.dtype} if strategy == MEGATRON else _sharded(narrow)),
        "optimizer": optimizer,
        "critic": _critic(config, decoder, optimizer),
    }
    return _with_options(merged, verl)


def _own(config: RunConfig) -> VerlConfig:
    assert isinstance(config.learner, VerlLearnerConfig)
    return config.learner.verl


def _strategy(verl: VerlConfig) -> str:
    """verl's engine. Raises ConfigError for an unknown one."""
    strategy = verl.options.get("engine", {}).get("strategy", FSDP2)
    if strategy not in (FSDP2, MEGATRON):
        raise ConfigError(
            f"learner.verl.options.engine.strategy = {strategy!r}: agentrl trains with {FSDP2!r} "
            f"and {MEGATRON!r}; set one of them"
        )
    return str(strategy)


def _sharded(narrow: str) -> dict[str, Any]:
    """Settings of FSDP2. narrow: dtype of forward and backward."""
    wide = {"reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return {
        "model_dtype": "fp32",  # dtype of master weights; forward and backward use param_dtype
        "mixed_precision": {"param_dtype": narrow, **wide},
        "use_torch_compile": False,
    }


def _with_options(merged: VerlSettings, verl: VerlConfig) -> VerlSettings:
    """Merge `learner.verl.options` into the settings. Raises ConfigError for a key of "
    "FIXED_OPTIONS."""
    for part, options in verl.options.items():
        for key, value in options.items():
            if key in FIXED_OPTIONS:
                fixed = "its learner depends on the value"
                fix = f"set {FIXED_OPTIONS[key]}" if FIXED_OPTIONS[key] else fixed
                raise ConfigError(f"learner.verl.options.{part}.{key} is decided by agentrl; {fix}")
            # A critic has a model and an optimizer of its own, with the same options.
            for target in (merged[part], merged["critic"].get(part, {})):
                default = target.get(key)
                target[key] = default | value if isinstance(default, dict) else value
    ranks = verl.nodes * verl.gpus_per_node
    shared = int(merged["engine"].get(SEQUENCE_PARALLEL, 1))
    if shared > 1 and (ranks % shared or not merged["model"]["use_remove_padding"]):
        raise ConfigError(
            f"learner.verl.options.engine.{SEQUENCE_PARALLEL} = {shared}: it must divide the "
            f"{ranks} GPUs, and needs learner.verl.attention = 'flash_attention_2'"
        )
    return merged


def describe_settings(config: RunConfig) -> str:
    """`settings` as comments to append to a run file, for `--dry-run`."""
    model = config.model_path() or str(Path(config.output, "policy"))
    lines = ["", "# Configuration of verl:"]
    for key, value in flatten(settings(config, model)).items():
        lines.append(f"# {key} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"


def check(config: RunConfig) -> None:
    """Raise ConfigError for errors that can be found before anything starts: unsupported settings,
    missing packages, an unreachable Ray cluster."""
    if not isinstance(config.learner, VerlLearnerConfig):
        return
    settings(config, config.policy.model)
    check_installed()
    _check_reachable(os.environ.get("RAY_ADDRESS", ""))


def check_installed() -> None:
    """Raise ConfigError if verl is missing or its release is not supported."""
    missing = [name for name in ("verl", "ray", "tensordict") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"learner.kind = 'verl': {missing[0]} is not installed: {install_command('verl')}"
        )
    installed = importlib.metadata.version("verl")
    release = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if not VERL[0] <= release < VERL[1]:
        raise ConfigError(
            f"learner.kind = 'verl': verl {installed} is not supported; install 'verl>=0.9,<0.11'"
        )


def _check_reachable(address: str) -> None:
    """Connect to HOST:PORT, because Ray would retry for minutes; Ray resolves "auto" and the
    like."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS = {address!r}: verl needs to be on a node of the cluster, not "
            "behind Ray's client; run agentrl there and give HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"RAY_ADDRESS = {address!r}: Ray cannot be reached there ({error}); give the "
            "address that `ray start` printed"
        ) from None


def _critic(config: RunConfig, decoder: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    """Settings of the critic's model and optimizer; empty without a critic."""
    critic = config.critic
    if not critic.model:
        return {}
    path = decoder["path"] if critic.model == "copy" else config.model_source(critic.model)
    critic_optimizer = optimizer | {"lr": critic.lr or MODEL_LR}
    return {"model": decoder | {"path": path}, "optimizer": critic_optimizer}


def _unsupported_settings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings that only the torch learner supports, each with the reason."""
    if config.critic.model == "shared":
        yield "critic.model = 'shared'", "a critic of verl is a model of its own ('copy')"
    if config.learner.packing == "trie":
        yield "learner.packing = 'trie'", "verl has rows only"
    if _strategy(_own(config)) == MEGATRON:
        unsupported = {
            "policy.lora.rank": config.policy.lora.rank,
            "critic.model": config.critic.model,
            "reference.every": config.reference.every,
        }
        if config.algorithm.max_kl:
            yield (
                "algorithm.max_kl",
                "the optimizer of verl's strategy = 'megatron' cannot undo a step",
            )
        for key in (key for key, value in unsupported.items() if value):
            yield key, "with verl's strategy = 'megatron' agentrl trains the policy's weights alone"
        if config.learner.gradient_checkpointing:
            yield (
                "learner.gradient_checkpointing",
                "megatron's is learner.verl.options.engine.override_transformer_config."
                "recompute_granularity",
            )
