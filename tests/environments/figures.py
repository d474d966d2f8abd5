"""The figures of a plug-in in the interpreter that has its package, as one line of JSON:
`.environments/NAME/bin/python -m tests.environments.NAME.figures`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agentrl.core.config.derived import EnvironmentName
from agentrl.environments.packages import examine


def print_figures(
    environment: str, folder: Path = Path(), best: float = 1.0, **options: Any
) -> None:
    """`agentrl doctor --environment` of it, in this process. `folder`: of its files. `best`: the
    most that any player can score, of which `ground_truth` is the share of the solutions."""
    named = EnvironmentName.read(environment, options, folder)
    report = asyncio.run(examine(named, 3, lambda line: print(line, file=sys.stderr)))
    score = report.ground_truth
    known = {"tasks": sum(report.tasks.values()), "score": score, "best": best}
    known |= {"ground_truth": None if score is None else round(score / best, 9)}
    known |= {"rollouts_per_s": report.rollouts_per_s, "splits": report.tasks}
    print(json.dumps(known | {"ok": report.ok, "lines": report.lines}))
