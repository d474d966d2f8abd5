"""Weights & Biases; `WANDB_MODE`, `WANDB_ENTITY` and the rest of its variables hold.

A step given twice counts once: the backend refuses steps that do not grow. Its own step is not
ours, because the evaluation after the last step comes again, as the first part of a step, when the
run is made longer; charts are drawn over `step`.
"""

from __future__ import annotations

import wandb

from agentrl.config import RunConfig
from agentrl.telemetry.sinks.base import Mark, settings
from agentrl.types import StepRow


class Wandb:
    def __init__(self, config: RunConfig, mark: Mark) -> None:
        self.run = wandb.init(
            project=config.metrics.project,
            id=mark.id,
            name=config.name,
            resume="allow",
            dir=config.output,
            config=settings(config),
        )
        self.run.define_metric("*", step_metric="step")

    def write(self, row: StepRow) -> None:
        self.run.log(row.metrics | {"step": row.step}, step=2 * row.step + row.committed)

    def close(self) -> None:
        self.run.finish()


def open_sink(config: RunConfig, mark: Mark) -> Wandb:
    return Wandb(config, mark)
