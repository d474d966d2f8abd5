"""TensorBoard: event files in `<output>/tensorboard`.

A step written twice counts once: a writer that reopens the folder records the step at which it
starts, and TensorBoard drops values of earlier files from this step on.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from agentrl.config import RunConfig
from agentrl.telemetry.sinks.base import SinkPosition
from agentrl.types import StepRow


class TensorBoard:
    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        purge_step = position.next + bool(position.names)
        folder = Path(config.output, "tensorboard")
        opened = {int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")}
        # Files are read in the order of their names, which have the second of their opening and
        # then the process: within one second the order could be wrong.
        while int(time.time()) in opened:
            time.sleep(0.05)
        self.writer = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, row: StepRow) -> None:
        values = [Summary.Value(tag=k, simple_value=v) for k, v in sorted(row.metrics.items())]
        event = Event(wall_time=row.at, step=row.step, summary=Summary(value=values))
        self.writer.add_event(event)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


open_sink = TensorBoard
