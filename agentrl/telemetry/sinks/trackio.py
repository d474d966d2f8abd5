"""trackio: a local database, or the Space or server of `TRACKIO_SPACE_ID` and `TRACKIO_SERVER_URL`.

It sends from its own thread, so a step is safe only when its session has finished; therefore each
step has its own session. A step written twice is shown twice.
"""

from __future__ import annotations

import trackio

from agentrl.config import RunConfig
from agentrl.telemetry.sinks.base import SinkPosition, public_settings
from agentrl.types import StepRow


class Trackio:
    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        self.config = config
        self.name = f"{config.name}-{position.id}"  # trackio identifies runs by name

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
