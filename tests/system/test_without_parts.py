"""With all parts out at once a LangChain agent trains, and every setting of a part is unknown."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ",".join(point.name for point in entry_points(group="agentrl.parts"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_trains_without_any_part(tmp_path: Path) -> None:
    example, model = ROOT / "examples" / "staff", tmp_path / "model"  # building models is a part
    build = "import pathlib, sys, policy; policy.build(pathlib.Path(sys.argv[1]), 0)"
    # Threads of several processes of tests wait for each other.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    made = [sys.executable, "-c", build, model]
    subprocess.run(made, cwd=example, check=True, timeout=300, env=alone)
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "without"), "WITHOUT_PARTS": PARTS}
    settings = ["steps=2", "algorithm.groups=2", "eval.every=0", "tasks.heldout="]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agentrl", "train", "examples/staff/run.toml"),
            *("policy.build=", f"policy.model={model}"),
            *(*settings, f"output={tmp_path / 'run'}"),
        ],
        capture_output=True, text=True, env=env, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "checkpoints/000002" in done.stdout.replace("\n", "")
