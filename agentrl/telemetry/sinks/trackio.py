"""trackio: a local database, or the Space or server of `TRACKIO_SPACE_ID` and `TRACKIO_SERVER_URL`.

It sends in a thread of its own, so a step is there for sure when its session is finished, and each
step gets one. A step given twice is shown twice.
"""

from __future__ import annotations

import trackio

from agentrl.config import RunConfig
from agentrl.telemetry.sinks.base import SinkPosition, public_settings
from agentrl.types import StepRow


class Trackio:
    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        self.config = config
        self.name = f"{config.name}-{position.id}"  # trackio knows runs by name only

    def write(self, row: StepRow) -> None:
        run = trackio.init(
            project=self.config.metrics.project,
            name=self.name,
            resume="allow",
            config=public_settings(self.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        run.log(row.metrics, step=row.step)
        run.finish()

    def close(self) -> None: ...


open_sink = Trackio
