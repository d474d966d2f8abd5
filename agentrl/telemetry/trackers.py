"""Metrics sinks of experiment trackers: MLflow, TensorBoard, trackio, and Weights & Biases."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from agentrl.core.config import RunConfig
from agentrl.core.types import StepRow, split_step, step_number
from agentrl.telemetry.sinks import SinkPosition, plain_name, public_settings

ID = "agentrl.id"  # tag by which a run is found again
PARAMETERS_PER_REQUEST = 100  # parameters per request


class Mlflow:
    """MLflow: the server of `MLFLOW_TRACKING_URI`, or else files in `<output>/mlruns`.

    A step written twice counts once on a server: its database identifies a value by name, step and
    time, and the time is that of the commit. Files keep both values. In files a metric's name must
    not be a path prefix of another's, such as `calls` of `calls/refused`, so their names have dots
    instead of slashes."""

    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            uri = Path(config.output, "mlruns").as_uri()
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # works without a server
        self.client = MlflowClient(uri)
        self.separator = "." if uri.startswith("file:") or "://" not in uri else "/"
        project = config.metrics.project
        existing = self.client.get_experiment_by_name(project)
        experiment = existing.experiment_id if existing else self.client.create_experiment(project)
        runs = self.client.search_runs([experiment], f"tags.`{ID}` = '{position.id}'")
        self.run = runs[0] if runs else self._create(experiment, config, position)
        self.client.update_run(self.run.info.run_id, status="RUNNING")  # even if it had ended

    def write(self, row: StepRow) -> None:
        from mlflow.entities import Metric

        at = int(row.at * 1000)
        metrics = [
            Metric(plain_name(name).replace("/", self.separator), value, at, part.step)
            for part in split_step(row)
            for name, value in sorted(part.metrics.items())
        ]
        self.client.log_batch(self.run.info.run_id, metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run.info.run_id)

    def _create(self, experiment: str, config: RunConfig, position: SinkPosition) -> Any:
        from mlflow.entities import Param

        run = self.client.create_run(experiment, tags={ID: position.id}, run_name=config.name)
        params = [Param(key, str(value)) for key, value in public_settings(config).items()]
        for first in range(0, len(params), PARAMETERS_PER_REQUEST):
            self.client.log_batch(
                run.info.run_id, params=params[first : first + PARAMETERS_PER_REQUEST]
            )
        return run


class TensorBoard:
    """TensorBoard: event files in `<output>/tensorboard`.

    A step written twice counts once: a writer that reopens the folder records the step at which it
    starts, and TensorBoard drops values of earlier files from this step on. Of the evaluation
    before the step both points are kept; they are equal."""

    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        purge_step = step_number(position.next)
        folder = Path(config.output, "tensorboard")
        opened = {int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")}
        # Files are read in the order of their names, which contain the second of their opening and
        # then the process id, so within one second the order could be wrong.
        while int(time.time()) in opened:
            time.sleep(0.05)
        self.writer = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, row: StepRow) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for part in split_step(row):
            metrics = sorted(part.metrics.items())
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics]
            event = Event(wall_time=row.at, step=part.step, summary=Summary(value=values))
            self.writer.add_event(event)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Trackio:
    """trackio: a local database, or the Space or server of `TRACKIO_SPACE_ID` and
    `TRACKIO_SERVER_URL`.

    It sends from its own thread, so a step is safe only when its session has finished; therefore
    each step has its own session. A step written twice is shown twice."""

    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        self.config = config
        self.name = f"{config.name}-{position.id}"  # trackio identifies runs by name

    def write(self, row: StepRow) -> None:
        import trackio

        run = trackio.init(
            project=self.config.metrics.project,
            name=self.name,
            resume="allow",
            config=public_settings(self.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        for part in split_step(row):
            run.log(part.metrics, step=part.step)
        run.finish()

    def close(self) -> None: ...


class Wandb:
    """Weights & Biases; `WANDB_MODE`, `WANDB_ENTITY` and its other variables apply.

    A step written twice counts once: the backend refuses steps that do not increase. W&B's step
    differs from the run's, because the evaluation after the last step becomes the first part of a
    row if the run is extended; the x-axis of charts is `step`."""

    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        import wandb

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
        for part in split_step(row):
            self.run.log(part.metrics | {"step": part.step}, step=row.step + part.step)

    def close(self) -> None:
        self.run.finish()
