"""Weights & Biases; `WANDB_MODE`, `WANDB_ENTITY` and its other variables apply.

A step written twice counts once: the backend refuses steps that do not increase. Its own step
differs from ours, because the evaluation after the last step becomes the first part of a step if
the run is made longer; the x-axis of charts is `step`.
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
