"""A run with a sink that works and one whose server is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from agentrl.telemetry.sinks import SinkPosition
from tests import warm

pytestmark = pytest.mark.skipif(
    not (find_spec("tensorboard") and find_spec("mlflow")), reason="two sinks are needed"
)
EVENTS = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]).Reload()
print([event.step for event in events.Scalars("reward/mean")], len(events.Scalars("eval/score")))
"""


def test_a_sink_that_fails_is_said_once_and_stops_nothing(run_folder: Path) -> None:
    command = ["-m", "agentrl", "train", "run.toml", "steps=2"]
    command += ["algorithm.groups=2", "algorithm.group_size=4"]
    command += ['metrics.sinks=["tensorboard", "mlflow"]']
    nowhere = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    environment = os.environ | nowhere | {"COLUMNS": "500"}
    trained = warm.run(*command, cwd=run_folder, env=environment, timeout=110)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("metrics sink mlflow: ") == 1
    marks = {
        name: msgspec.json.decode(
            (run_folder / f"out/metrics/{name}.json").read_bytes(), type=SinkPosition
        )
        for name in ("tensorboard", "mlflow")
    }
    assert marks["tensorboard"].next == 2
    assert "eval/score" in marks["tensorboard"].names
    assert marks["mlflow"].next == 0
    events = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EVENTS, "out/tensorboard"],
        cwd=run_folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert events.stdout == "[1, 2] 2\n", events.stderr
