"""Programs that verl runs in, with a time-out for each and everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PATHS = (HERE, HERE.parents[2] / "system", HERE.parents[3])  # `tests` is also a name of others'


def environment(**more: str) -> dict[str, str]:
    """In which verl runs without a GPU, and Ray counts two of them."""
    return os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # its FSDP engine registers for no other name
        "PYTHONPATH": os.pathsep.join([*map(str, PATHS), *filter(None, [os.getenv("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_OVERRIDE_RESOURCES": '{"CPU": 8, "GPU": 2}',
        **more,
    }


def program(file: Path, *arguments: str, limit: float, **more: str) -> None:
    """Run it to its end, which must be a good one. more: of its environment."""
    process = subprocess.Popen(
        [sys.executable, str(file), *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, said.decode()[-4000:]
