"""The table [learner.verl] of the run file."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

from agentrl.config.base import Count, Seconds, Section
from agentrl.config.infrastructure import LearnerConfig


class VerlConfig(Section, frozen=True):
    """Settings of verl's workers, for `learner.kind = "verl"`."""

    address: str = ""  # Address of a Ray cluster; empty: start one on this machine.
    nodes: Count = 1  # machines of the cluster that train
    gpus_per_node: Count = 1  # GPUs of a machine, each with one worker.
    # Implementation of attention; sdpa pads rows.
    attention: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"
    offload: bool = False  # Whether weights and optimizer state are on the host between calls.
    timeout: Seconds = 1800.0  # Seconds of one call, at most: an update, or loading the model.
    # verl's own settings of its model, engine and optimizer, by part: any of its keys that no
    # setting of agentrl determines, such as engine = {ulysses_sequence_parallel_size = 2}.
    options: dict[Literal["model", "engine", "optimizer"], dict[str, Any]] = {}


class VerlLearnerConfig(LearnerConfig, frozen=True, tag="verl"):
    """Training with verl's workers, on many GPUs."""

    packages = ("verl", "ray", "flash-attn")
    placement = ("packing", "verl.")
    computes = frozenset()

    verl: VerlConfig = VerlConfig()

    @property
    def lacking(self) -> str:
        if self.verl.attention == "sdpa" or find_spec("flash_attn"):
            return ""
        return "no flash attention; set learner.verl.attention=sdpa, or install flash-attn"

    def derived(self, config: Any) -> str:
        from agentrl.algorithms.learners.verl.settings import describe_settings

        return describe_settings(config)


def verl_of(config: Any) -> VerlConfig:
    """The settings of a run that verl's workers train."""
    assert isinstance(config.learner, VerlLearnerConfig)
    return config.learner.verl
