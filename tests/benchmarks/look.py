"""Does an agent that looks at pictures learn, and can it without them? Trains `examples/look` once
per seed, exactly as `make look` does.

python -m tests.benchmarks.look --json

Before and after are success on 200 held-out reports, of which no page was seen in training; chance
is 20 %. `blind_...`: the same run with an agent to whom every page is a grey picture (`--sighted`
leaves it out), from the policy that was built for the first. `seconds` and `cpu_seconds` cover the
whole command, with building the policy and all evaluations, `cpu_seconds` all processes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.benchmarks.demo import run
from tests.benchmarks.report import arguments, report

RUN_FILE = Path(__file__).parents[2] / "examples" / "look" / "run.toml"
KEYS = (
    "before", "after", "before_sampled", "after_sampled", "seconds", "cpu_seconds",
    "logprob_difference_max",
)  # fmt: skip
WAYS = {"": (), "blind_": ("agent.path=agent.py:blind",)}


def figures(seeds: list[int], ways: dict[str, tuple[str, ...]]) -> dict[str, list[float]]:
    """For each key a value for each seed."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for prefix, overrides in ways.items():
            for seed in seeds:
                own, built = Path(folder, prefix, f"seed-{seed}"), Path(folder, f"policy-{seed}")
                if built.is_dir():
                    shutil.copytree(built, own / "policy")
                made = run(seed, own.parent, RUN_FILE, *overrides)
                if not built.is_dir():
                    shutil.copytree(own / "policy", built)
                for key in KEYS:
                    found.setdefault(prefix + key, []).append(made[key])
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sighted", action="store_true", help="without the blind twins")
    options = parser.parse_args()
    ways = {"": WAYS[""]} if options.sighted else WAYS
    result = {"seeds": options.seeds} | figures(options.seeds, ways)
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
