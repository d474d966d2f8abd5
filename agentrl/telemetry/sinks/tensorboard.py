"""TensorBoard: event files in `<output>/tensorboard`.

A step given twice counts once: whoever opens the folder again says at which step, and TensorBoard
forgets what earlier files have from there on.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from agentrl.config import RunConfig
from agentrl.telemetry.sinks.base import Mark
from agentrl.types import StepRow


class TensorBoard:
    def __init__(self, folder: Path, purge_step: int) -> None:
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


def open_sink(config: RunConfig, mark: Mark) -> TensorBoard:
    return TensorBoard(Path(config.output, "tensorboard"), mark.next + bool(mark.names))
