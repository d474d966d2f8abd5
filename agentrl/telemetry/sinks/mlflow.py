"""MLflow: the server of `MLFLOW_TRACKING_URI`, or else files in `<output>/mlruns`.

A step written twice counts once on a server, whose database identifies a value by name, step and
time, and the time is that of the commit. Files keep both. In files no metric's name may be a parent
of another's, as `calls` of `calls/refused`, so their names have dots instead of slashes.
"""

from __future__ import annotations

import os
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from agentrl.config import RunConfig
from agentrl.telemetry.sinks.base import SinkPosition, plain_name, public_settings
from agentrl.types import StepRow

ID = "agentrl.id"  # tag with which a run is found again
PARAMETERS_PER_REQUEST = 100  # parameters per request


class Mlflow:
    def __init__(self, config: RunConfig, position: SinkPosition) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            uri = Path(config.output, "mlruns").as_uri()
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # works without a server
        self.client = MlflowClient(uri)
        self.separator = "." if uri.startswith("file:") or "://" not in uri else "/"
        project = config.metrics.project
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        runs = self.client.search_runs([experiment], f"tags.`{ID}` = '{position.id}'")
        self.run = runs[0] if runs else self._create(experiment, config, position)
        self.client.update_run(self.run.info.run_id, status="RUNNING")  # also if it had ended

    def write(self, row: StepRow) -> None:
        at = int(row.at * 1000)
        named = {plain_name(k).replace("/", self.separator): v for k, v in row.metrics.items()}
        metrics = [Metric(name, v, at, row.step) for name, v in sorted(named.items())]
        self.client.log_batch(self.run.info.run_id, metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run.info.run_id)

    def _create(self, experiment: str, config: RunConfig, position: SinkPosition) -> Run:
        run = self.client.create_run(experiment, tags={ID: position.id}, run_name=config.name)
        params = [Param(key, str(value)) for key, value in public_settings(config).items()]
        for first in range(0, len(params), PARAMETERS_PER_REQUEST):
            self.client.log_batch(
                run.info.run_id, params=params[first : first + PARAMETERS_PER_REQUEST]
            )
        return run


open_sink = Mlflow
