"""Estimates of a run before it starts: memory from the shape of its model, and what parts estimate.
Fragmentation, libraries and agents are not included."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.model.memory import GIB, USABLE_MEMORY, available, bytes_needed
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.base.parts import installed_plugins
from agentrl.base.processes import PHASE
from agentrl.config import RunConfig
from agentrl.config.policies import trained_policies, view

log = logging.getLogger("agentrl.algorithm")

CURE = (
    "set what is smaller of learner.token_budget, engine.max_batch and engine.max_context, or "
    "learner.gradient_checkpointing=true, policy.dtype=bfloat16 or policy.lora.rank=16"
)


def announce(config: RunConfig, models: list[LoadedModel]) -> None:
    """Log the estimates of a run that is about to train, as a warning if memory is too small."""
    learning = trained_policies(config) if config.steps and config.learner.kind == "torch" else []
    for model in (each for each in models if set(each.policies).intersection(learning)):
        own = view(config, next(name for name in model.policies if name in learning))
        fits, sentence = memory(own, model.model)
        log.log(PHASE if fits else logging.WARNING, f"memory: about {sentence}")
        for line in others(own, model.model):
            log.log(PHASE, line)


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
        return False, f"{sentence}; {CURE}"
    total = available(config)
    if torch.cuda.is_available() and (share := config.engine.gpu_share(config, network, total)):
        sentence += f", {config.engine.kind} {share * total / GIB:.2g}"
    return True, sentence


def others(config: RunConfig, network: Any) -> Iterator[str]:
    """What parts estimate for a policy."""
    for point in installed_plugins("estimates"):
        yield from point.load()(config, network)
