"""The table [warmup] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from agentrl.config.base import Count, Natural, Positive, Section


class WarmupConfig(Section, frozen=True):
    """Supervised fine-tuning of the policy before the run's first step."""

    # Conversations, as "file.jsonl" or "file.py:name" of {"messages": [...], "tools": [...]};
    # empty: no fine-tuning
    data: str = ""
    steps: Count = 100  # Optimizer steps, at most.
    batch: Count = 16  # conversations per optimizer step, drawn at random
    # Peak learning rate: linear warm-up over 10 % of the steps, then linear decay to 0.
    lr: Positive = 1e-5
    # Checks of held-out conversations without a lower loss that end it; 0: hold none out, and make
    # all steps.
    patience: Natural = 3

    makes_weights: ClassVar[bool] = True

    def initial(self, config: Any, policy: Any) -> Any:
        directory = warmed(config)
        if not (self.data and directory.is_dir()):
            return policy
        if policy.lora.rank:
            return replace(policy, lora=replace(policy.lora, adapter=str(directory)))
        return replace(policy, model=str(directory), build="")

    def problems(self, config: Any) -> Iterator[str]:
        if not self.data:
            if self != WarmupConfig():
                yield "[warmup] has no effect without `data`, the conversations to imitate"
            return
        if config.policies:
            yield (
                "[warmup] trains a run's only policy, and this run has [policies]; do it in another"
                " run and use its <output>/warmup as their model or lora.adapter"
            )
        elif config.policy.lora.rank and config.learner.kind != "torch":
            yield (
                "[warmup] trains an adapter only with learner.kind = 'torch'; do it in another run"
                " and use its <output>/warmup as policy.lora.adapter"
            )


def warmup_of(config: Any) -> WarmupConfig:
    settings: WarmupConfig = config.warmup
    return settings


def warmed(config: Any) -> Path:
    """The directory of the policy after the warm-up: a model, or an adapter."""
    return Path(config.output, "warmup")
