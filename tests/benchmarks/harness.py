"""Do coding harnesses run unmodified, is all that they ask recorded, and does a policy learn
through one of them?

python -m tests.benchmarks.harness --json

Every installed harness mends a bug in `--rollouts` repositories, `--concurrency` at a time, as a
scripted model says; a harness is exact if every call was recorded in the trace of its rollout with
the tokens and log-probs that were served. Then `examples/harness/run.toml` is trained once a
seed: the scores are of held-out tasks, greedy, and the seconds cover the whole command.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.runners.harness import HARNESSES, load_preset
from agentrl.runners.harness_check import Report, check
from tests.benchmarks import demo
from tests.benchmarks.report import arguments, report
from tests.runners.harnesses.refusing_proxy import RefusingProxy

RUN_FILE = Path(__file__).parents[2] / "examples" / "harness" / "run.toml"


async def run(name: str, rollouts: int, concurrency: int) -> tuple[Report, list[str]]:
    """What the harness did, and which addresses outside of this machine it asked for."""
    proxy = RefusingProxy()
    size = {"rollouts": rollouts, "concurrency": concurrency}
    async with proxy.serving() as env:
        report = await check(name, Path(), timeout=600.0, env=env, **size)
    return report, proxy.refused


def measure(names: list[str], rollouts: int, concurrency: int) -> dict[str, Any]:
    exact, refused, missing = [], 0, []
    result: dict[str, Any] = {}
    for name in names:
        try:
            load_preset(name, Path()).find_program()
        except ConfigError:
            missing.append(name)
            continue
        report, reached = asyncio.run(run(name, rollouts, concurrency))
        if report.served == len(report.calls) == report.exact > 0 and not any(report.problems()):
            exact.append(name)
        refused += len(report.refused)
        result[f"{name}_recorded"] = f"{report.exact}/{report.served}"
        result[f"{name}_reached"] = reached
        result[f"{name}_rollouts_per_s"] = round(rollouts / report.seconds, 3)
    counts = {"harnesses_exact": len(exact), "harnesses": len(names), "not_installed": missing}
    return counts | {"refused": refused} | result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--harnesses", nargs="*", default=list(HARNESSES))
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    logging.getLogger("agentrl").setLevel(logging.ERROR)
    result = measure(options.harnesses, options.rollouts, options.concurrency)
    with tempfile.TemporaryDirectory() as folder:
        rows = [demo.run(seed, Path(folder), RUN_FILE) for seed in options.seeds]
    for key in ("before", "after", "before_sampled", "after_sampled", "seconds", "rollouts_per_s"):
        result[key] = [round(row[key], 3) for row in rows]
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
