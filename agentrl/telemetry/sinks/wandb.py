"""Weights & Biases; `WANDB_MODE`, `WANDB_ENTITY` and the rest of its variables hold.

A step given twice counts once: the backend refuses steps that do not grow. Its own step is not
ours, because the evaluation after the last step comes again, as the first part of a step, when the
run is made longer; charts are drawn over `step`.
"""

from __future__ import annotations

import wandb

from agentrl.config import RunConfig
from agentrl.telemetry.sinks.base import SinkPosition, public_settings
from agentrl.types import StepRow


class Wandb:
    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        self.run = wandb.init(
            project=config.metrics.project,
            id=position.id,
            name=config.name,
            resume="allow",
            dir=config.output,
            config=public_settings(config),
        )
        self.run.define_metric("*", step_metric="step")

    def write(self, row: StepRow) -> None:
        self.run.log(row.metrics | {"step": row.step}, step=2 * row.step + row.committed)

    def close(self) -> None:
        self.run.finish()


open_sink = Wandb
